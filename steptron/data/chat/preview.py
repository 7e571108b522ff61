"""What a conversation looks like as training data: text that is trained, text that is not, and special tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from steptron.data.chat.encoder import ReadConversation, read_conversation
from steptron.data.chat.masks import SampleTokenizer, TokenizedSample
from steptron.data.chat.problems import BadConversation
from steptron.data.chat.special import check_pieces_join, special_tokens
from steptron.data.chat.template import open_template
from steptron.data.dataset import Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.readers import BadDocument, Fields, RawDocument, find_files, read_file
from steptron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextRun:
    """Consecutive tokens as text: all trained or none, and ordinary tokens or special ones."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class PreviewedSample:
    """A sample as text; ``title`` says where it comes from."""

    title: str
    tokens: int
    trained_tokens: int
    runs: list[TextRun]


def preview_lines(
    file: Path, tokenizer_path: Path, template: str, date: str | None, number: int, line: int | None
) -> Iterator[PreviewedSample | BadConversation]:
    """Renders conversations of a JSONL file (plain, .gz, .zst) as the build would.

    Args:
        file: the file.
        tokenizer_path: ``tokenizer.json`` or the folder that holds it.
        template, date: see :class:`steptron.data.chat.build.ChatBuildOptions`.
        number: how many conversations from the beginning.
        line: the line of the only conversation to render, from 1, instead.

    Raises:
        DataError: an unusable file, tokenizer or template; or no conversation there.
    """
    tokenizer = Tokenizer.load(tokenizer_path)
    check_pieces_join(tokenizer)
    special = special_tokens(tokenizer)
    chat_template = open_template(template, tokenizer_path, special, date)
    for item in _items(file, number, line):
        read = read_conversation(item, chat_template)
        if isinstance(read, BadConversation):
            yield read
            continue
        samples = SampleTokenizer(tokenizer, special).tokenize(read.samples)
        for index, sample in enumerate(samples):
            yield _previewed(_title(read, index), sample, tokenizer, special.values())


def preview_documents(folder: Path, split: Split, number: int) -> Iterator[PreviewedSample]:
    """Shows the first samples of a dataset folder.

    Raises:
        DataError: no dataset, or an empty split.
    """
    dataset, tokenizer = TokenDataset.open(folder, split), Tokenizer.load(folder)
    special = special_tokens(tokenizer)
    for document in range(min(number, dataset.num_documents)):
        tokens_T, counts_T = dataset.document(document)
        sample = TokenizedSample(tokens_T, counts_T.astype(np.uint8))
        yield _previewed(f"{split} document {document}", sample, tokenizer, special.values())


def text_runs(tokenizer: Tokenizer, sample: TokenizedSample, special_ids: Collection[int]) -> list[TextRun]:
    """Decodes a sample, cut where training begins or ends and around special tokens."""
    special = frozenset(special_ids)
    marked = [
        (token, bool(trained), token in special)
        for token, trained in zip(sample.tokens_T.tolist(), sample.loss_mask_T.tolist(), strict=True)
    ]
    return [
        TextRun(tokenizer.decode([token for token, _, _ in group]), trained, is_special)
        for (trained, is_special), group in ((key, list(run)) for key, run in groupby(marked, lambda one: one[1:]))
    ]


def _previewed(
    title: str, sample: TokenizedSample, tokenizer: Tokenizer, special_ids: Collection[int]
) -> PreviewedSample:
    runs = text_runs(tokenizer, sample, special_ids)
    return PreviewedSample(title, sample.tokens_T.size, int(sample.loss_mask_T.sum()), runs)


def _title(read: ReadConversation, index: int) -> str:
    domain = "" if read.conversation.domain is None else f", domain {read.conversation.domain}"
    part = f", sample {index + 1} of {len(read.samples)}" if len(read.samples) > 1 else ""
    return f"{read.raw.file}:{read.raw.line}{part}{domain}"


def _items(file: Path, number: int, line: int | None) -> Iterator[RawDocument | BadDocument]:
    if not file.is_file():
        raise DataError(f"{file}: no such file; give a JSONL file (plain, .gz, .zst) or a dataset folder")
    files, _ = find_files([file])
    if files[0].format != "jsonl":
        raise DataError(f"{file}: the name of a JSONL file must end with .jsonl or .ndjson, or that and .gz or .zst")
    items = (item.document for item in read_file(files[0], Fields()))
    if line is None:
        yield from islice(items, number)
        return
    chosen = next((item for item in items if item.line == line), None)
    if chosen is None:
        raise DataError(f"{file}: no conversation on line {line}")
    yield chosen
