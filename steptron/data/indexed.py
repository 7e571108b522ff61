"""Megatron's indexed dataset format: ``PREFIX.bin`` (tokens) and ``PREFIX.idx`` (where each sequence lies).

The layout is that of ``megatron.core.datasets.indexed_dataset`` (Megatron-Core 0.16.1 and 0.19.2):
a 34-byte header (magic, version 1, dtype code, number of sequences, number of document borders), then
int32 lengths, int64 byte offsets and int64 document borders. Files written here are byte for byte
those of Megatron's own builder, and either side reads the other's; the tests hold both.

It is written out here because importing Megatron's module executes all of ``megatron.core`` (4.3 s
of imports and 3,000 modules in each worker process, torch included) for what is one header and
three arrays, and because its checks are assertions that name no file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from steptron.data.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Codes of megatron.core.datasets.indexed_dataset.DType, the integer types among them.
_DTYPE_BY_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODE_BY_DTYPE = {dtype: code for code, dtype in _DTYPE_BY_CODE.items()}
_LONGEST_SEQUENCE = np.iinfo(np.int32).max
_VERIFIED_AT_ONCE = 2**17  # documents


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype of the format that holds every id below ``vocab_size``."""
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


@dataclass(frozen=True)
class WrittenFile:
    """Name, size in bytes and SHA-256 of a file that was written."""

    name: str
    size: int
    sha256: str


class IndexedWriter:
    """Writes one indexed dataset; every document is one sequence.

    Use as a context manager; the index is written by ``finish``.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._file = open(_bin_path(prefix), "wb")  # noqa: SIM115 - closed by finish or __exit__
        self._digest = hashlib.sha256()
        self._lengths: list[np.ndarray] = []
        self.num_tokens = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, tokens_T: np.ndarray, lengths_D: np.ndarray) -> None:
        """Appends D documents.

        Args:
            tokens_T: their tokens, one document after the other.
            lengths_D: tokens of each; the sum is T.

        Raises:
            DataError: a document has more than 2^31 - 1 tokens, the format's limit.
        """
        if lengths_D.size and int(lengths_D.max()) > _LONGEST_SEQUENCE:
            raise DataError(f"a document has {int(lengths_D.max())} tokens; the format's limit is {_LONGEST_SEQUENCE}")
        content = tokens_T.astype(self._dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._lengths.append(lengths_D.astype("<i4"))
        self.num_tokens += tokens_T.size

    def finish(self) -> list[WrittenFile]:
        """Writes the index and flushes both files to the disk."""
        size = self._file.tell()
        _flush_to_disk(self._file)
        self._file.close()
        lengths_D = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        ends_D = np.cumsum(lengths_D, dtype="<i8") * self._dtype.itemsize
        header = _HEADER.pack(_MAGIC, _VERSION, _CODE_BY_DTYPE[self._dtype], lengths_D.size, lengths_D.size + 1)
        index = b"".join(
            [
                header,
                lengths_D.tobytes(),
                (ends_D - lengths_D * np.int64(self._dtype.itemsize)).astype("<i8").tobytes(),
                np.arange(lengths_D.size + 1, dtype="<i8").tobytes(),
            ]
        )
        with open(_idx_path(self._prefix), "wb") as file:
            file.write(index)
            _flush_to_disk(file)
        return [
            WrittenFile(_bin_path(self._prefix).name, size, self._digest.hexdigest()),
            WrittenFile(_idx_path(self._prefix).name, len(index), hashlib.sha256(index).hexdigest()),
        ]


@dataclass(frozen=True)
class IndexedTokens:
    """An indexed dataset, memory-mapped.

    Attributes:
        path: the index file.
        tokens_T: all tokens, in the dtype of the file.
        lengths_D: int32, tokens of each document.
        pointers_D: int64, byte offset of each document in the file of tokens.
    """

    path: Path
    tokens_T: np.ndarray
    lengths_D: np.ndarray
    pointers_D: np.ndarray

    def starts(self, documents: np.ndarray | slice) -> np.ndarray:
        """int64, first token of each of some documents in ``tokens_T``."""
        return self.pointers_D[documents] // self.tokens_T.itemsize

    def verify(self) -> None:
        """Reads the whole index; needs no memory to speak of.

        Raises:
            DataError: documents are empty or do not follow each other without gaps.
        """
        _verify_index(self.path, self.lengths_D, self.pointers_D, self.tokens_T.itemsize)


def open_indexed(prefix: Path, *, verify: bool = True) -> IndexedTokens:
    """Memory-maps an indexed dataset whose sequences are its documents.

    Args:
        prefix: path of both files without ``.bin`` and ``.idx``.
        verify: whether to read the whole index (``IndexedTokens.verify``); if not, only its header and its
            last document are looked at.

    Raises:
        DataError: a file is missing, is not of the format, its size contradicts the index, or documents
            are empty or do not follow each other without gaps.
    """
    bin_path, idx_path = _bin_path(prefix), _idx_path(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise DataError(f"{path}: missing")
    index_size = idx_path.stat().st_size
    with open(idx_path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{idx_path}: not an index of Megatron's format (it does not begin with MMIDIDX)")
    _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
    if version != _VERSION or code not in _DTYPE_BY_CODE:
        raise DataError(f"{idx_path}: version {version}, dtype code {code}; readable are version 1 and integer dtypes")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_borders
    if index_size != expected:
        raise DataError(f"{idx_path}: {index_size} bytes, its header speaks of {expected}; it is cut off or damaged")
    if num_borders != num_sequences + 1:
        raise DataError(f"{idx_path}: {num_sequences} sequences in {num_borders - 1} documents; must be one each")

    dtype = _DTYPE_BY_CODE[code]
    if num_sequences == 0:
        return IndexedTokens(idx_path, np.zeros(0, dtype), np.zeros(0, "<i4"), np.zeros(0, "<i8"))
    # asarray drops numpy's memmap subclass, whose indexing is slow; the pages stay mapped.
    index = np.asarray(np.memmap(idx_path, mode="r"))
    lengths_D = np.frombuffer(index, "<i4", num_sequences, _HEADER.size)
    pointers_D = np.frombuffer(index, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    if verify:
        _verify_index(idx_path, lengths_D, pointers_D, dtype.itemsize)
    size = bin_path.stat().st_size
    expected = int(pointers_D[-1]) + int(lengths_D[-1]) * dtype.itemsize
    if size != expected or size == 0:
        raise DataError(f"{bin_path}: {size} bytes, but the index speaks of {expected}")
    return IndexedTokens(idx_path, np.asarray(np.memmap(bin_path, dtype=dtype, mode="r")), lengths_D, pointers_D)


def _verify_index(path: Path, lengths_D: np.ndarray, pointers_D: np.ndarray, itemsize: int) -> None:
    end = 0
    for start in range(0, lengths_D.size, _VERIFIED_AT_ONCE):
        part = slice(start, start + _VERIFIED_AT_ONCE)
        ends_D = end + np.cumsum(lengths_D[part], dtype=np.int64)
        starts_D = ends_D - lengths_D[part]
        if lengths_D[part].min() < 1 or not np.array_equal(pointers_D[part], starts_D * itemsize):
            raise DataError(f"{path}: damaged: its documents are not laid end to end")
        end = int(ends_D[-1])


def _bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def _idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
