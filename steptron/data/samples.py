"""Numbered samples of a blend of datasets as micro-batches: what all ways of filling rows have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.batch import MicroBatch
from steptron.data.blend import Blend
from steptron.data.dataset import Segments, Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.index_cache import OrderFile
from steptron.data.spans import Span

# Validation data are the same for every training seed, so that runs can be compared.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Row:
    """A sample without its padding: N inputs and their targets, at most as many as a sequence has tokens.

    Attributes:
        tokens_N: int64, inputs.
        labels_N: int64, the token that follows each.
        counts_N: bool, whether predicting it counts.
        positions_N: int64.
        documents_N: int64, number of the document within the row.
    """

    tokens_N: np.ndarray
    labels_N: np.ndarray
    counts_N: np.ndarray
    positions_N: np.ndarray
    documents_N: np.ndarray


class Samples(ABC):
    """Samples of S inputs and their targets, numbered from 0.

    Sample n is a pure function of (datasets, data.seed, n). Which dataset it comes from is dealt by ``Blend``, whose
    weights are shares of samples; how a dataset fills its samples is the subclass's: its training samples are endless,
    and those of the validation split are used at most once, in an order that does not depend on ``data.seed``.
    """

    def __init__(
        self,
        datasets: list[DatasetConfig],
        split: Split,
        data: DataConfig,
        spans: Sequence[Span] | None = None,
        *,
        verify: bool = True,
    ) -> None:
        """Opens the datasets.

        Args:
            datasets: what to blend.
            split: ``train`` (endless) or ``validation``.
            data: sequence length and seed; its own lists of datasets are not read.
            spans: what a stage reads of each dataset; everything from its beginning on by default.
            verify: whether to read each dataset's whole index.

        Raises:
            DataError: a dataset that cannot be opened, tokenizers that differ, or no metadata to leave out of the loss.
        """
        if not datasets:
            raise DataError(f"no dataset for the {split} split")
        self._split = split
        self._sequence_length = data.sequence_length
        counts = data.metadata == "in_loss"
        until = data.metadata_in_loss_tokens if split == "train" else None
        # Samples before this one have metadata in the loss.
        self._metadata_until = None if until is None else -(-until // data.sequence_length)
        self._datasets = [
            TokenDataset.open(dataset.path, split, verify=verify, metadata_counts=counts) for dataset in datasets
        ]
        if split == "train" and not (counts or any(d.has_metadata for d in self._datasets)):
            raise DataError(
                f"data.metadata is {data.metadata}, but no training dataset has metadata: build them with "
                "`steptron data build --metadata-fields`, or leave data.metadata out"
            )
        for other in self._datasets[1:]:
            _check_same_tokenizer(self._datasets[0], other)
        seed = data.seed if split == "train" else _VALIDATION_SEED
        # The number of the dataset is part of the seed: one that is named twice has two orders.
        numbers = range(len(datasets)) if spans is None else [span.number for span in spans]
        self._seeds = [seed + (number << 64) for number in numbers]
        self._weights = [dataset.weight / sum(d.weight for d in datasets) for dataset in datasets]
        self._blend = Blend([dataset.weight for dataset in datasets])

    @abstractmethod
    def order_files(self, start: int, stop: int) -> Iterator[OrderFile]:
        """The orders that samples [start, stop) are taken by, as files of an index cache.

        Raises:
            DataError: these samples are not taken by such orders.
        """

    @abstractmethod
    def missing_order_files(self, start: int, stop: int) -> list[OrderFile]:
        """Those of ``order_files`` that are not in the index cache yet; none without an index cache."""

    @abstractmethod
    def _row(self, number: int, sample: int, metadata_counts: bool | None) -> Row:
        """A sample of one dataset of the blend.

        Args:
            number: which dataset.
            sample: number of the sample within the dataset.
            metadata_counts: whether tokens of metadata count in the loss; as ``data.metadata`` says when None.
        """

    @abstractmethod
    def _samples_of(self, number: int) -> int:
        """Samples of one pass over a dataset of the blend, partial ones included."""

    def _token_shares(self) -> list[float]:
        """Each dataset's share of the blend's tokens."""
        return self._weights

    @property
    def eod_id(self) -> int:
        """Id of the end-of-document token, common to all datasets."""
        return self._datasets[0].manifest.eod_id

    @property
    def vocabulary_size(self) -> int:
        """Largest token id of the datasets' common tokenizer plus one."""
        return self._datasets[0].manifest.vocabulary_size

    @property
    def datasets(self) -> list[TokenDataset]:
        """The opened datasets, in the order of the blend."""
        return self._datasets

    @cached_property
    def num_samples(self) -> int | None:
        """Samples without repetition: None for training, which is endless.

        For validation, the longest prefix of the blend in which no dataset runs past its data; so the
        weights hold, and where one dataset is short, the rest of the others is left unused.
        """
        if self._split == "train":
            return None
        return self._blend.prefix_within([self._samples_of(number) for number in range(len(self._datasets))])

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over each of the datasets, all together, whatever their weights."""
        return sum(self._samples_of(number) for number in range(len(self._datasets)))

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, mean over the blend's tokens; None where it is unknown of a dataset."""
        return weighted_mean(self._token_shares(), [dataset.bytes_per_token for dataset in self._datasets])

    @property
    def unigram_entropy(self) -> float:
        """Nats per token that a model without context reaches when it knows each dataset's own token
        frequencies, mean over the blend's tokens."""
        records = [dataset.manifest.split(self._split) for dataset in self._datasets]
        shares = self._token_shares()
        return sum(share * record.unigram_entropy for share, record in zip(shares, records, strict=True))

    def check_same_tokenizer(self, other: Samples) -> None:
        """Checks that two sources mean the same text by the same ids.

        Raises:
            DataError: they were built with different tokenizers.
        """
        _check_same_tokenizer(self._datasets[0], other.datasets[0])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that a model with ``vocab_size`` embedding rows can read every token.

        Raises:
            DataError: it cannot.
        """
        if self.vocabulary_size > vocab_size:
            raise DataError(
                f"{self._datasets[0].path}: its tokenizer has ids up to {self.vocabulary_size - 1}, but "
                f"model.vocab_size is {vocab_size}; set model.vocab_size to at least {self.vocabulary_size}"
            )

    def micro_batch(self, first: int, count: int) -> MicroBatch:
        """Samples first, ..., first + count - 1.

        What a row has no input for is padding, as are rows beyond ``num_samples`` of the validation split: documents
        -1, positions 0, tokens and labels the end-of-document token, nothing in the loss.

        Raises:
            DataError: a token is outside the dataset's vocabulary, or a file that an order is read from is damaged.
        """
        shape = count, self._sequence_length
        tokens_BS = np.full(shape, self.eod_id, np.int64)
        labels_BS = np.full(shape, self.eod_id, np.int64)
        counts_BS = np.zeros(shape, np.bool_)
        positions_BS = np.zeros(shape, np.int64)
        documents_BS = np.full(shape, -1, np.int64)
        limit = self.num_samples
        usable = count if limit is None else max(0, min(count, limit - first))
        datasets_B, samples_B = self._blend.locate(first, usable)
        for b, (number, sample) in enumerate(zip(datasets_B.tolist(), samples_B.tolist(), strict=True)):
            in_loss = self._metadata_until is None or first + b < self._metadata_until
            row = self._row(number, sample, None if in_loss else False)
            size = row.tokens_N.size
            tokens_BS[b, :size] = row.tokens_N
            labels_BS[b, :size] = row.labels_N
            counts_BS[b, :size] = row.counts_N
            positions_BS[b, :size] = row.positions_N
            documents_BS[b, :size] = row.documents_N
        return MicroBatch(*map(torch.from_numpy, (tokens_BS, labels_BS, counts_BS, positions_BS, documents_BS)))

    def _read(self, number: int, segments: Segments, metadata_counts: bool | None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int64 [T], of pieces of a dataset's documents, joined, and whether each counts in the loss, bool [T].

        Raises:
            DataError: a token is outside the vocabulary.
        """
        dataset = self._datasets[number]
        tokens_T, counts_T = dataset.gather(segments, metadata_counts)
        # A damaged file must not become an index error inside a model, or training on other tokens.
        vocabulary_size = dataset.manifest.vocabulary_size
        wrong_T = tokens_T[(tokens_T < 0) | (tokens_T >= vocabulary_size)]
        if wrong_T.size:
            raise DataError(
                f"{dataset.path}: {dataset.split}.bin is damaged: it holds the token id {int(wrong_T[0])}, the "
                f"vocabulary has {vocabulary_size}; see `steptron data inspect`, and build the dataset again"
            )
        return tokens_T, counts_T


def numbered_documents(lengths_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions, which restart at each document, and numbers of the documents, int64 [sum of the lengths], of
    documents that follow each other; lengths are int64 [N]."""
    begins_N = np.cumsum(lengths_N) - lengths_N
    documents_T = np.repeat(np.arange(lengths_N.size), lengths_N)
    return np.arange(documents_T.size) - begins_N[documents_T], documents_T


def weighted_mean(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    """With weights that add up to 1; None where a value is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(weight * value for weight, value in zip(weights, known, strict=True))


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """A cross entropy in nats per token in bits per byte of text; None where the bytes are unknown."""
    return None if bytes_per_token is None else loss / math.log(2) / bytes_per_token


def _check_same_tokenizer(first: TokenDataset, other: TokenDataset) -> None:
    ours, theirs = first.manifest, other.manifest
    if (ours.tokenizer_hash, ours.eod_id) != (theirs.tokenizer_hash, theirs.eod_id):
        raise DataError(
            f"{first.path} and {other.path} were built with different tokenizers; build one of them again with "
            f"--tokenizer {first.path / 'tokenizer.json'}"
        )
