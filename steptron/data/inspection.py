"""What a dataset folder holds and whether its files are sound."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

import numpy as np

from steptron.data.dataset import Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.indexed import open_indexed
from steptron.data.manifest import Manifest, read_manifest
from steptron.data.tokenizer import TOKENIZER_FILE, Tokenizer

SPLITS = cast(tuple[Split, ...], get_args(Split))
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TextRun:
    """Consecutive tokens as text, all of them counting in the loss or none, all of them metadata or none."""

    text: str
    counts: bool
    metadata: bool = False


@dataclass(frozen=True)
class LengthBin:
    """Number of documents with ``low`` <= tokens < ``high``, and their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


def length_histogram(lengths_D: np.ndarray) -> list[LengthBin]:
    """Histogram over powers of two, from the shortest to the longest document."""
    lengths_D = lengths_D.astype(np.int64)
    exponents_D = np.frexp(lengths_D.astype(np.float64))[1] - 1
    bins = []
    for exponent in range(int(exponents_D.min()), int(exponents_D.max()) + 1):
        inside_D = exponents_D == exponent
        bins.append(LengthBin(2**exponent, 2 ** (exponent + 1), int(inside_D.sum()), int(lengths_D[inside_D].sum())))
    return bins


def text_runs(
    tokenizer: Tokenizer, tokens_T: np.ndarray, counts_T: np.ndarray, metadata_tokens: int = 0
) -> list[TextRun]:
    """Decodes tokens, the first of them metadata, cut where counting in the loss begins or ends."""
    runs = []
    if metadata_tokens:
        head_T, tokens_T = np.split(tokens_T, [metadata_tokens])
        head_counts_T, counts_T = np.split(counts_T, [metadata_tokens])
        runs.append(TextRun(tokenizer.decode(head_T.tolist()), bool(head_counts_T.any()), metadata=True))
    position = 0
    for counts, group in groupby(counts_T.tolist()):
        size = len(list(group))
        runs.append(TextRun(tokenizer.decode(tokens_T[position : position + size].tolist()), bool(counts)))
        position += size
    return runs


def check_files(folder: Path) -> list[str]:
    """Reads every file of a dataset in full and compares it with the manifest and the others.

    Returns:
        The problems found, each naming its file; empty for a sound dataset.

    Raises:
        DataError: the folder is no dataset.
    """
    manifest = read_manifest(folder)
    return [
        *_problems_of_tokenizer(folder, manifest),
        *_problems_of_sizes_and_hashes(folder, manifest),
        *(problem for split in SPLITS for problem in _problems_of_split(folder, manifest, split)),
    ]


def _problems_of_tokenizer(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        tokenizer = Tokenizer.load(folder)
    except DataError as error:
        yield str(error)
        return
    found = (tokenizer.hash, tokenizer.vocab_size, tokenizer.eod_id)
    if found != (manifest.tokenizer_hash, manifest.vocabulary_size, manifest.eod_id):
        yield f"{folder / TOKENIZER_FILE}: not the tokenizer that the manifest describes"


def _problems_of_sizes_and_hashes(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != record.size:
            yield f"{path}: {path.stat().st_size} bytes, the manifest says {record.size}"
        elif _sha256(path) != record.sha256:
            yield f"{path}: its content is not what was written (SHA-256 differs)"


def _problems_of_split(folder: Path, manifest: Manifest, split: Split) -> Iterator[str]:
    if manifest.split(split).documents == 0:
        return
    try:
        TokenDataset.open(folder, split)
        tokens = open_indexed(folder / split)
    except DataError as error:
        yield str(error)
        return
    for start in range(0, tokens.tokens_T.size, _CHUNK_TOKENS):
        chunk_T = tokens.tokens_T[start : start + _CHUNK_TOKENS]
        if int(chunk_T.max()) >= manifest.vocabulary_size or int(chunk_T.min()) < 0:
            yield (
                f"{folder / split}.bin: token ids up to {int(chunk_T.max())} near token {start}, the vocabulary has "
                f"{manifest.vocabulary_size}"
            )
            break
    ends_D = tokens.tokens_T[tokens.starts(slice(None)) + tokens.lengths_D - 1]
    wrong_D = np.flatnonzero(ends_D != manifest.eod_id)
    if wrong_D.size:
        yield (
            f"{folder / split}.bin: {wrong_D.size} documents do not end with the end-of-document token "
            f"(id {manifest.eod_id}), the first is document {int(wrong_D[0])}"
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
