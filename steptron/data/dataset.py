"""Reading a dataset for training: the tokens of a split, and the endless order of its documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from steptron.data.errors import DataError
from steptron.data.indexed import IndexedTokens, open_indexed
from steptron.data.loss_mask import COUNTS, METADATA
from steptron.data.manifest import Manifest, read_manifest
from steptron.data.orders import ComputedOrders, Orders

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
        self,
        path: Path,
        split: Split,
        manifest: Manifest,
        tokens: IndexedTokens,
        loss_mask: IndexedTokens | None,
        metadata_counts: bool,
    ) -> None:
        self.path = path
        self.split = split
        self.manifest = manifest
        self.lengths_D = tokens.lengths_D
        self._tokens = tokens
        self._loss_mask = loss_mask
        self._metadata_counts = metadata_counts

    @classmethod
    def open(cls, path: str | Path, split: Split, *, verify: bool = True, metadata_counts: bool = True) -> TokenDataset:
        """Opens a split.

        Args:
            path: the folder.
            split: ``train`` or ``validation``.
            verify: whether to read the whole index (``verify``): 12 bytes per document.
            metadata_counts: whether tokens of metadata count in the loss.

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
        tokens = open_indexed(path / split, verify=verify)
        if tokens.lengths_D.size != record.documents or tokens.tokens_T.size != record.tokens:
            raise DataError(
                f"{path / split}.idx: {tokens.lengths_D.size} documents and {tokens.tokens_T.size} tokens, but "
                f"dataset.json speaks of {record.documents} and {record.tokens}; build the dataset again"
            )
        # The mask's index is compared with that of the tokens, so that it need not be verified itself.
        loss_mask = open_indexed(path / f"{split}.loss_mask", verify=False) if record.loss_mask else None
        dataset = cls(path, split, manifest, tokens, loss_mask, metadata_counts)
        dataset._check_mask(whole=verify)
        return dataset

    def verify(self) -> None:
        """Reads the whole index, as ``open`` does if not told otherwise.

        Raises:
            DataError: its documents do not follow each other without gaps, or have other lengths in the loss mask.
        """
        self._tokens.verify()
        self._check_mask(whole=True)

    def _check_mask(self, whole: bool) -> None:
        if self._loss_mask is None:
            return
        lengths_D = self._loss_mask.lengths_D
        same = lengths_D.size == self.lengths_D.size and self._loss_mask.tokens_T.size == self.num_tokens
        if not same or (whole and not np.array_equal(lengths_D, self.lengths_D)):
            prefix = self.path / self.split
            raise DataError(f"{prefix}.loss_mask.idx: document lengths differ from those of {self.split}.idx")

    @property
    def num_documents(self) -> int:
        return self.lengths_D.size

    @property
    def num_tokens(self) -> int:
        return self._tokens.tokens_T.size

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, of those that count in the loss; metadata that count are text. None where the
        dataset does not say how many bytes the tokens that do not count have."""
        record = self.manifest.split(self.split)
        if record.masked_bytes is None and record.masked_tokens:
            return None
        num_bytes, tokens = record.bytes - (record.masked_bytes or 0), record.tokens - record.masked_tokens
        if self._metadata_counts:
            return (num_bytes + (record.metadata_bytes or 0)) / tokens
        return num_bytes / (tokens - (record.metadata_tokens or 0))

    @property
    def has_metadata(self) -> bool:
        """Whether any document of the split begins with metadata."""
        return self.manifest.split(self.split).metadata_tokens is not None

    def metadata_tokens(self, number: int) -> int:
        """How many tokens of metadata a document begins with."""
        if self._loss_mask is None:
            return 0
        start = self._tokens.starts(np.array([number]))[0]
        return int(np.count_nonzero(self._loss_mask.tokens_T[start : start + self.lengths_D[number]] & METADATA))

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64, of a document, and whether each counts in the loss, bool."""
        whole = Segments(np.array([number]), np.array([0]), self.lengths_D[[number]].astype(np.int64))
        return self.gather(whole)

    def gather(self, segments: Segments, metadata_counts: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64 [T], of pieces of documents, joined, and whether each counts in the loss, bool [T]."""
        sources_N = self._tokens.starts(segments.documents_N) + segments.offsets_N
        targets_N = np.cumsum(segments.lengths_N) - segments.lengths_N
        index_T = np.repeat(sources_N - targets_N, segments.lengths_N)
        index_T += np.arange(index_T.size)
        tokens_T = self._tokens.tokens_T[index_T].astype(np.int64)
        if self._loss_mask is None:
            return tokens_T, np.ones(tokens_T.size, np.bool_)
        counts = self._metadata_counts if metadata_counts is None else metadata_counts
        seen = COUNTS if counts else COUNTS | METADATA
        return tokens_T, self._loss_mask.tokens_T[index_T] & seen == COUNTS


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
    access costs what sequential access costs. The orders of the two epochs used last are kept.
    """

    def __init__(
        self, lengths_D: np.ndarray, seed: int, orders: Orders | None = None, tokens_per_epoch: int | None = None
    ) -> None:
        """
        Args:
            lengths_D: tokens of each document.
            seed: any whole number from 0 up.
            orders: where orders come from; computed in memory by default.
            tokens_per_epoch: sum of the lengths, where it is known.
        """
        self._lengths_D = lengths_D
        self.tokens_per_epoch = int(lengths_D.sum(dtype=np.int64)) if tokens_per_epoch is None else tokens_per_epoch
        source = ComputedOrders() if orders is None else orders
        self._order = lru_cache(maxsize=2)(lambda epoch: source.documents(lengths_D, seed, epoch))

    def segments(self, start: int, length: int) -> Segments:
        """The pieces of documents that make up tokens [start, start + length) of the stream; length is at least 1.

        Raises:
            DataError: a file that the order is read from is damaged.
        """
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
        """[D], uint32 or int64: the documents in the order of an epoch."""
        return self._order(epoch).documents.numbers_N

    def _segments_in_epoch(self, epoch: int, start: int, length: int) -> Segments:
        order = self._order(epoch)
        ends_D = order.ends_D
        first = int(np.searchsorted(ends_D, start, side="right"))
        last = int(np.searchsorted(ends_D, start + length, side="left"))
        documents_N = order.documents.read(first, last + 1)
        ends_N = ends_D[first : last + 1]
        begins_N = ends_N - self._lengths_D[documents_N]
        before_N = ends_D[first - 1 : last] if first > 0 else np.concatenate([[0], ends_D[:last]])
        if not (
            ends_N.size and np.array_equal(begins_N, before_N) and begins_N[0] <= start < start + length <= ends_N[-1]
        ):
            raise DataError(
                f"{order.documents.place}: damaged near entry {first} of {ends_D.size}, or not of this dataset: delete "
                "it, or let `steptron data build-index` replace it"
            )
        offsets_N = np.maximum(start - begins_N, 0)
        return Segments(documents_N, offsets_N, np.minimum(ends_N, start + length) - begins_N - offsets_N)


class SampleOrder:
    """The order in which the samples of a stream are trained on: blocks, each permuted on its own.

    Neighbouring samples of a stream come from the same long documents; taken in turn they would fill
    whole batches. A block is about an epoch, so every token is still seen once per epoch. A pure
    function of (seed, number); the orders of the two blocks used last are kept.
    """

    def __init__(
        self, samples_per_block: int, seed: int, orders: Orders | None = None, samples: int | None = None
    ) -> None:
        """
        Args:
            samples_per_block: at least 1.
            seed: any whole number from 0 up.
            orders: where orders come from; computed in memory by default.
            samples: how many are taken, where what comes after them belongs to others: the last block ends with them,
                and those beyond are in no other order than the stream's.
        """
        self.samples_per_block = samples_per_block
        self._samples = samples
        source = ComputedOrders() if orders is None else orders
        self._order = lru_cache(maxsize=2)(lambda block: source.samples(self.block_size(block), seed, block))

    def block_size(self, block: int) -> int:
        """Samples of a block: 0 where all that are taken come before it."""
        if self._samples is None:
            return self.samples_per_block
        return max(0, min(self.samples_per_block, self._samples - block * self.samples_per_block))

    def place(self, number: int) -> int:
        """Which sample of the stream is number ``number`` in training.

        Raises:
            DataError: a file that the order is read from is damaged.
        """
        block, offset = divmod(number, self.samples_per_block)
        if offset >= self.block_size(block):
            return number
        return block * self.samples_per_block + int(self._order(block).read(offset, offset + 1)[0])
