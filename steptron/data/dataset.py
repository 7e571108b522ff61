"""Reading a dataset for training: the tokens of a split, and the endless order of its documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from steptron.data.errors import DataError
from steptron.data.indexed import IndexedTokens, open_indexed
from steptron.data.manifest import Manifest, read_manifest

Split = Literal["train", "validation"]


class TokenDataset:
    """One split of a dataset folder, memory-mapped.

    Attributes:
        path: the folder.
        split: ``train`` or ``validation``.
        manifest: content of ``dataset.json``.
        lengths_D: int32, tokens of each document, its end-of-document token included.
    """

    def __init__(
        self, path: Path, split: Split, manifest: Manifest, tokens: IndexedTokens, loss_mask_T: np.ndarray | None
    ) -> None:
        self.path = path
        self.split = split
        self.manifest = manifest
        self.lengths_D = tokens.lengths_D
        self._tokens_T = tokens.tokens_T
        self._starts_D = tokens.starts_D
        self._loss_mask_T = loss_mask_T

    @classmethod
    def open(cls, path: str | Path, split: Split) -> TokenDataset:
        """Opens a split.

        Raises:
            DataError: no dataset, another format version, an empty split, or files that contradict
                each other.
        """
        path = Path(path)
        manifest = read_manifest(path)
        record = manifest.split(split)
        if record.documents == 0:
            raise DataError(
                f"{path}: its {split} split has no documents (it was built with a validation fraction of "
                f"{manifest.validation_fraction:g}); name another dataset, or build it with another fraction"
            )
        tokens = open_indexed(path / split)
        if tokens.lengths_D.size != record.documents or tokens.tokens_T.size != record.tokens:
            raise DataError(
                f"{path / split}.idx: {tokens.lengths_D.size} documents and {tokens.tokens_T.size} tokens, but "
                f"dataset.json speaks of {record.documents} and {record.tokens}; build the dataset again"
            )
        loss_mask_T = None
        if record.loss_mask:
            mask = open_indexed(path / f"{split}.loss_mask")
            if not np.array_equal(mask.lengths_D, tokens.lengths_D):
                raise DataError(f"{path / split}.loss_mask.idx: document lengths differ from those of {split}.idx")
            loss_mask_T = mask.tokens_T
        return cls(path, split, manifest, tokens, loss_mask_T)

    @property
    def num_documents(self) -> int:
        return self.lengths_D.size

    @property
    def num_tokens(self) -> int:
        return self._tokens_T.size

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64, of a document, and whether each counts in the loss, bool."""
        whole = Segments(np.array([number]), np.array([0]), self.lengths_D[[number]].astype(np.int64))
        return self.gather(whole)

    def gather(self, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64 [T], of pieces of documents, joined, and whether each counts in the loss, bool [T]."""
        sources_N = self._starts_D[segments.documents_N] + segments.offsets_N
        targets_N = np.cumsum(segments.lengths_N) - segments.lengths_N
        index_T = np.repeat(sources_N - targets_N, segments.lengths_N)
        index_T += np.arange(index_T.size)
        tokens_T = self._tokens_T[index_T].astype(np.int64)
        if self._loss_mask_T is None:
            return tokens_T, np.ones(tokens_T.size, np.bool_)
        return tokens_T, self._loss_mask_T[index_T] == 1


@dataclass(frozen=True)
class Segments:
    """N pieces of documents, all int64 [N]: piece n is ``lengths_N[n]`` tokens of document
    ``documents_N[n]`` from its token ``offsets_N[n]`` on."""

    documents_N: np.ndarray
    offsets_N: np.ndarray
    lengths_N: np.ndarray


class DocumentStream:
    """All documents of a dataset, one after the other, in an endless shuffled order.

    Every epoch is a permutation of its own, a pure function of (seed, epoch); where an epoch ends the
    next one follows without a gap. Any part of the stream is found by one binary search, so random
    access costs what sequential access costs. The permutation and the cumulated lengths of the two
    epochs used last are kept (16 bytes per document each).
    """

    def __init__(self, lengths_D: np.ndarray, seed: int) -> None:
        """
        Args:
            lengths_D: tokens of each document.
            seed: any whole number from 0 up.
        """
        self._lengths_D = lengths_D
        self._seed = seed
        self.tokens_per_epoch = int(lengths_D.sum(dtype=np.int64))
        self._epoch = lru_cache(maxsize=2)(self._build_epoch)

    def segments(self, start: int, length: int) -> Segments:
        """The pieces of documents that make up tokens [start, start + length) of the stream; length is at least 1."""
        pieces = []
        while length > 0:
            epoch, offset = divmod(start, self.tokens_per_epoch)
            count = min(length, self.tokens_per_epoch - offset)
            pieces.append(self._segments_in_epoch(epoch, offset, count))
            start += count
            length -= count
        if len(pieces) == 1:
            return pieces[0]
        return Segments(
            np.concatenate([piece.documents_N for piece in pieces]),
            np.concatenate([piece.offsets_N for piece in pieces]),
            np.concatenate([piece.lengths_N for piece in pieces]),
        )

    def epoch_order(self, epoch: int) -> np.ndarray:
        """int64 [D]: the documents in the order of an epoch."""
        return self._epoch(epoch)[0]

    def _segments_in_epoch(self, epoch: int, start: int, length: int) -> Segments:
        order_D, ends_D = self._epoch(epoch)
        first = int(np.searchsorted(ends_D, start, side="right"))
        last = int(np.searchsorted(ends_D, start + length, side="left"))
        documents_N = order_D[first : last + 1]
        ends_N = np.minimum(ends_D[first : last + 1], start + length)
        begins_N = ends_D[first : last + 1] - self._lengths_D[documents_N]
        offsets_N = np.maximum(start - begins_N, 0)
        return Segments(documents_N, offsets_N, ends_N - begins_N - offsets_N)

    def _build_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order_D = _permutation(self._lengths_D.size, _mix(self._seed, epoch))
        return order_D, np.cumsum(self._lengths_D[order_D], dtype=np.int64)


class SampleOrder:
    """The order in which the samples of a stream are trained on: blocks, each permuted on its own.

    Neighbouring samples of a stream come from the same long documents; taken in turn they would fill
    whole batches. A block is about an epoch, so every token is still seen once per epoch. A pure
    function of (seed, number); the permutations of the two blocks used last are kept.
    """

    def __init__(self, samples_per_block: int, seed: int) -> None:
        """
        Args:
            samples_per_block: at least 1.
            seed: any whole number from 0 up.
        """
        self._size = samples_per_block
        self._block = lru_cache(maxsize=2)(lambda block: _permutation(samples_per_block, _mix(seed, block, 1)))

    def place(self, number: int) -> int:
        """Which sample of the stream is number ``number`` in training."""
        block, offset = divmod(number, self._size)
        return block * self._size + int(self._block(block)[offset])


def _permutation(size: int, key: int) -> np.ndarray:
    """int64 [size]; sorts hashes rather than use numpy's shuffle, whose result may change between versions."""
    return np.argsort(_splitmix64(np.arange(size, dtype=np.uint64), key), kind="stable")


_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _splitmix64(counters: np.ndarray, key: int) -> np.ndarray:
    """Output number ``counters`` of the SplitMix64 generator of state ``key`` (Steele, Lea, Flood 2014).

    Distinct counters give distinct outputs, so sorting them leaves no ties.
    """
    state = (counters + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _mix(*numbers: int) -> int:
    """Hashes whole numbers to 64 bits."""
    key = 0
    for number in numbers:
        key = int(_splitmix64(np.array([key ^ (number & _MASK)], np.uint64), number >> 64 & _MASK)[0])
    return key
