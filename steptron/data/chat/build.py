"""Builds a dataset of conversations: read, check, render, tokenize, split, write, publish."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from steptron.data.build import (
    BAD_INPUT_FILE,
    BadInputLog,
    Progress,
    SplitWriter,
    add_selected,
    finish_dataset,
    read_batches,
    source_records,
)
from steptron.data.chat.encoder import ChatEncoder, Counts
from steptron.data.chat.problems import BadConversation
from steptron.data.chat.special import check_pieces_join, special_tokens
from steptron.data.chat.template import ChatTemplate, open_template
from steptron.data.errors import DataError
from steptron.data.indexed import smallest_dtype
from steptron.data.manifest import Manifest
from steptron.data.readers import Fields, InputFile, find_files
from steptron.data.replace import check_replaceable
from steptron.data.tokenizer import Tokenizer
from steptron.data.workers import encode_in_order
from steptron.platform.staging import publish, staging_folder

Policy = Literal["stop", "skip"]
POLICIES: tuple[Policy, ...] = ("stop", "skip")


@dataclass(frozen=True)
class ChatBuildOptions:
    """What to build.

    Attributes:
        inputs: JSONL files (plain, .gz, .zst), and folders that hold some.
        output: folder to write.
        tokenizer: ``tokenizer.json`` or the folder that holds it.
        template: ``step3p5``, ``hf`` (the one beside the tokenizer), or a file of Jinja.
        date: YYYY-MM-DD, for Jinja templates that write today's date.
        on_bad: whether a broken conversation stops the build or is left out.
        max_tokens: longest sample that is accepted, its end-of-document token included.
        on_long: whether a longer one stops the build or is left out.
        workers: tokenizing processes.
        validation_fraction: share of the conversations in the validation split.
        seed: decides, with its content, which split a conversation belongs to.
        domains: those of the conversations to take; all when empty.
        eod_token: end-of-document token, where the tokenizer's own files name none or another.
        force: replace a dataset at ``output``.
    """

    inputs: list[Path]
    output: Path
    tokenizer: Path
    template: str = "step3p5"
    date: str | None = None
    on_bad: Policy = "stop"
    max_tokens: int | None = None
    on_long: Policy = "stop"
    workers: int = 1
    validation_fraction: float = 0.01
    seed: int = 1234
    domains: Sequence[str] = ()
    eod_token: str | None = None
    force: bool = False


@dataclass
class Summary:
    """What was built.

    Attributes:
        domains: counts by domain, in order of appearance; "" for conversations that name none.
        passed_over: conversations of domains that were not asked for, by domain.
        lengths_D: int64, tokens of each sample, both splits, in input order.
    """

    domains: dict[str, Counts] = field(default_factory=dict)
    passed_over: Counter[str] = field(default_factory=Counter)
    lengths_D: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.domains.values():
            total.add(counts)
        return total

    def percentile(self, share: float) -> int:
        """The smallest length that at least ``share`` percent of the samples do not exceed."""
        return int(np.percentile(self.lengths_D, share, method="inverted_cdf"))


@dataclass(frozen=True)
class ChatBuildResult:
    """A finished dataset, its summary, what was left out, and files in folders that were not read."""

    manifest: Manifest
    summary: Summary
    bad: BadInputLog
    files_left_out: int


def build_chat_dataset(
    options: ChatBuildOptions, report: Callable[[Progress], None] = lambda _: None
) -> ChatBuildResult:
    """Builds a dataset. Nothing appears at ``options.output`` unless all of it does.

    The files depend on the options and the inputs' content only, not on ``workers`` or time.

    Raises:
        DataError: a wrong option, unusable inputs, tokenizer or template; a broken or too long conversation where the
            policy is to stop; or no conversation that can be trained on. Nothing is left.
        OSError: the folder cannot be written; nothing is left.
    """
    _check_options(options)
    options = dataclasses.replace(options, output=Path(os.path.abspath(options.output)))  # "." has no name to write to
    check_replaceable(options.output, options.force, BAD_INPUT_FILE)
    files, files_left_out = _conversation_files(options.inputs)
    tokenizer = Tokenizer.load(options.tokenizer, options.eod_token)
    check_pieces_join(tokenizer)
    template = open_template(options.template, options.tokenizer, special_tokens(tokenizer), options.date)
    with staging_folder(options.output) as folder:
        bad = BadInputLog(folder / BAD_INPUT_FILE)
        manifest, summary = _write_dataset(options, files, tokenizer, template, folder, bad, report)
        check_replaceable(options.output, options.force, BAD_INPUT_FILE)  # another build may have been faster
        publish(folder, options.output)
        bad.path = options.output / BAD_INPUT_FILE
    return ChatBuildResult(manifest, summary, bad, files_left_out)


def _check_options(options: ChatBuildOptions) -> None:
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1 process is needed")
    if not 0 <= options.validation_fraction < 1:
        raise DataError(f"--validation-fraction {options.validation_fraction}: must be at least 0 and below 1")
    if not 0 <= options.seed < 2**63:
        raise DataError(f"--seed {options.seed}: must be at least 0 and below 2^63")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise DataError(f"--max-tokens {options.max_tokens}: must be at least 1")
    if options.max_tokens is None and options.on_long != "stop":
        raise DataError(f"--on-long {options.on_long}: nothing is too long without --max-tokens; give it a number")
    for name, policy in (("--on-bad", options.on_bad), ("--on-long", options.on_long)):
        if policy not in POLICIES:
            raise DataError(f"{name} {policy}: must be one of {', '.join(POLICIES)}")


def _conversation_files(inputs: list[Path]) -> tuple[list[InputFile], int]:
    """The JSONL files of all inputs; a file that is named itself is read whatever its extension."""
    found, left_out = find_files(inputs)
    files = []
    for file in found:
        if file.format == "jsonl" or file.path in inputs:
            if file.format == "parquet":
                raise DataError(f"{file.path}: conversations are read from JSONL (plain, .gz, .zst), not from Parquet")
            files.append(dataclasses.replace(file, format="jsonl"))
        else:
            left_out += 1
    if not files:
        raise DataError(f"{', '.join(map(str, inputs))}: no JSONL file (.jsonl, .ndjson, and those as .gz or .zst)")
    return files, left_out


def _write_dataset(
    options: ChatBuildOptions,
    files: list[InputFile],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    folder: Path,
    bad: BadInputLog,
    report: Callable[[Progress], None],
) -> tuple[Manifest, Summary]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    encoder = ChatEncoder(
        tokenizer,
        template,
        options.seed,
        options.validation_fraction,
        dtype,
        max_tokens=options.max_tokens,
        domains=frozenset(options.domains) or None,
    )
    total_bytes = sum(file.size for file in files)
    bytes_of_batch: list[int] = []
    summary = Summary()
    lengths: list[np.ndarray] = []
    documents_I, bytes_I = np.zeros(len(options.inputs), np.int64), np.zeros(len(options.inputs), np.int64)
    done_bytes = 0
    with ExitStack() as stack:
        stack.callback(bad.close)
        splits = {
            name: SplitWriter(folder, name, dtype, tokenizer.vocab_size, stack) for name in ("train", "validation")
        }
        results = encode_in_order(read_batches(files, Fields(), bytes_of_batch), encoder, options.workers)
        stack.callback(results.close)
        for number, encoded in enumerate(results):
            for conversation in encoded.bad:
                _stop_or_log(conversation, options, bad)
            documents = encoded.documents
            for name, writer in splits.items():
                add_selected(writer, documents, documents.validation_D == (name == "validation"))
            np.add.at(documents_I, documents.sources_D, 1)
            np.add.at(bytes_I, documents.sources_D, documents.text_bytes_D)
            lengths.append(documents.lengths_D)
            for domain, counts in encoded.domains.items():
                summary.domains.setdefault(domain, Counts()).add(counts)
            summary.passed_over += encoded.passed_over
            done_bytes += bytes_of_batch[number]
            report(Progress("tokens", summary.total.conversations, bad.total, done_bytes, total_bytes))
        if missing := [domain for domain in options.domains if domain not in summary.domains]:
            there = ", ".join(sorted(name or "(none)" for name in {*summary.domains, *summary.passed_over})) or "none"
            raise DataError(
                f"--domain {missing[0]}: no conversation of this domain can be trained on; there are: {there}"
            )
        if not summary.domains:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in bad.counts.items())
            raise DataError(
                f"none of the {bad.total} conversations can be trained on: {kinds}; see the first: {_first(bad)}"
            )
        if splits["train"].documents == 0:
            raise DataError(
                f"all {summary.total.conversations} conversations fell into the validation split; lower "
                "--validation-fraction, or set it to 0"
            )
        summary.lengths_D = np.concatenate(lengths)
        manifest = finish_dataset(
            folder,
            tokenizer,
            splits,
            source_records(options.inputs, files, documents_I, bytes_I),
            seed=options.seed,
            validation_fraction=options.validation_fraction,
            bad_documents=bad.total,
            chat_template=template.label,
        )
    return manifest, summary


def _stop_or_log(conversation: BadConversation, options: ChatBuildOptions, bad: BadInputLog) -> None:
    flag, policy = ("--on-long", options.on_long) if conversation.kind == "too_long" else ("--on-bad", options.on_bad)
    if policy == "stop":
        raise DataError(f"{conversation}; mend it, or leave out all such conversations with {flag} skip")
    bad.add(conversation)


def _first(bad: BadInputLog) -> object:
    return next(iter(bad.examples.values()))[0]
