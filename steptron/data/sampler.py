"""Micro-batches of a blend of datasets, any of them at any time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.batch import MicroBatch
from steptron.data.blend import Blend
from steptron.data.dataset import DocumentStream, SampleOrder, Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.index_cache import CachedOrders, IndexCache, OrderFile
from steptron.data.manifest import read_manifest

# Validation data are the same for every training seed, so that runs can be compared.
_VALIDATION_SEED = 0


class SampleSource:
    """Samples of S tokens and their targets, numbered from 0.

    Sample n is a pure function of (datasets, data.seed, n). Each dataset is an endless stream of its
    documents in shuffled order (``DocumentStream``), cut into samples of tokens [i S, (i+1) S], so
    that neighbours share one token and all tokens of an epoch are inputs exactly once. Training takes
    these samples in shuffled order too (``SampleOrder``). Which dataset a sample comes from is dealt
    by ``Blend``, whose shares of samples are shares of tokens because all samples are equally long.

    With ``document_attention: isolated`` the documents of a row are numbered 0, 1, ..., positions
    restart at each (a document that began in an earlier sample starts at 0 here), and a target that
    belongs to the next document does not count. With ``crossing`` a row is one document and every
    target counts. Under both, tokens of masked spans do not count as targets, and the
    end-of-document token does.

    The validation split is used at most once: ``num_samples`` samples, the last of a dataset padded
    where its data end. Its order does not depend on ``data.seed``.
    """

    def __init__(
        self, datasets: list[DatasetConfig], split: Split, data: DataConfig, wait_seconds: float = 600.0
    ) -> None:
        """Opens the datasets.

        With ``data.index_cache`` the orders are files of that folder, opened or built when a sample first
        needs them; an index of a dataset is then read as a whole only by the process that builds from it.

        Args:
            datasets: what to blend.
            split: ``train`` (endless) or ``validation``.
            data: sequence length, document attention, seed and index cache; its own lists of datasets are not read.
            wait_seconds: longest wait for another process that builds a file of the index cache.

        Raises:
            DataError: a dataset that cannot be opened, tokenizers that differ, or a sequence longer
                than all data.
        """
        if not datasets:
            raise DataError(f"no dataset for the {split} split")
        self._sequence_length = data.sequence_length
        self._isolated = data.document_attention == "isolated"
        self._split = split
        self._cache = cache = None if data.index_cache is None else IndexCache(data.index_cache, wait_seconds)
        self._datasets = [TokenDataset.open(dataset.path, split, verify=cache is None) for dataset in datasets]
        self._check_tokenizers()
        self._check_lengths()
        seed = data.seed if split == "train" else _VALIDATION_SEED
        # The position in the blend is part of the seed: a dataset named twice has two orders.
        self._seeds = [seed + (number << 64) for number in range(len(datasets))]
        orders = [None if cache is None else CachedOrders(cache, dataset) for dataset in self._datasets]
        self._streams = [
            DocumentStream(dataset.lengths_D, seed, own, dataset.num_tokens)
            for dataset, seed, own in zip(self._datasets, self._seeds, orders, strict=True)
        ]
        self._orders = [
            SampleOrder(max(1, dataset.num_tokens // data.sequence_length), seed, own)
            for dataset, seed, own in zip(self._datasets, self._seeds, orders, strict=True)
        ]
        self._weights = [dataset.weight / sum(d.weight for d in datasets) for dataset in datasets]
        self._blend = Blend([dataset.weight for dataset in datasets])

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
        return self._blend.prefix_within([self._samples_of(dataset) for dataset in self._datasets])

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, mean over the blend's tokens."""
        records = [dataset.manifest.split(self._split) for dataset in self._datasets]
        return sum(w * record.bytes / record.tokens for w, record in zip(self._weights, records, strict=True))

    @property
    def unigram_entropy(self) -> float:
        """Nats per token that a model without context reaches when it knows each dataset's own token
        frequencies, mean over the blend's tokens."""
        records = [dataset.manifest.split(self._split) for dataset in self._datasets]
        return sum(w * record.unigram_entropy for w, record in zip(self._weights, records, strict=True))

    def check_same_tokenizer(self, other: SampleSource) -> None:
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

        Rows beyond ``num_samples`` of the validation split are padding: documents -1, positions 0,
        tokens and labels the end-of-document token, nothing in the loss.

        Raises:
            DataError: a token is outside the dataset's vocabulary.
        """
        length = self._sequence_length
        tokens_BS1 = np.full((count, length + 1), self.eod_id, np.int64)
        counts_BS1 = np.zeros((count, length + 1), np.bool_)
        documents_BS1 = np.full((count, length + 1), -1, np.int64)
        positions_BS1 = np.zeros((count, length + 1), np.int64)
        limit = self.num_samples
        usable = count if limit is None else max(0, min(count, limit - first))
        datasets_B, samples_B = self._blend.locate(first, usable)
        for row, (number, sample) in enumerate(zip(datasets_B.tolist(), samples_B.tolist(), strict=True)):
            dataset, stream = self._datasets[number], self._streams[number]
            if limit is None:
                start, size = self._orders[number].place(sample) * length, length + 1
            else:
                start = sample * length
                size = min(length + 1, stream.tokens_per_epoch - start)
            segments = stream.segments(start, size)
            tokens_BS1[row, :size], counts_BS1[row, :size] = dataset.gather(segments)
            _check_ids(dataset, tokens_BS1[row, :size])
            if self._isolated:
                numbers_N = np.arange(segments.lengths_N.size)
                begins_N = np.cumsum(segments.lengths_N) - segments.lengths_N
                documents_BS1[row, :size] = np.repeat(numbers_N, segments.lengths_N)
                positions_BS1[row, :size] = np.arange(size) - np.repeat(begins_N, segments.lengths_N)
            else:
                documents_BS1[row, :size] = 0
                positions_BS1[row, :size] = np.arange(size)
        return self._shifted(tokens_BS1, counts_BS1, documents_BS1, positions_BS1)

    def order_files(self, start: int, stop: int) -> Iterator[OrderFile]:
        """The orders that samples [start, stop) are taken by, as files of an index cache.

        Those of the training split's last block of samples are named as if all of it were taken.
        """
        limit = self.num_samples
        stop = stop if limit is None else min(stop, limit)
        if start >= stop:
            return
        ranges = zip(self._blend.taken(start), self._blend.taken(stop), strict=True)
        for number, (first, end) in enumerate(ranges):
            if first == end:
                continue
            dataset, seed, samples = self._datasets[number], self._seeds[number], self._orders[number]
            if limit is None:
                blocks = range(first // samples.samples_per_block, (end - 1) // samples.samples_per_block + 1)
                yield from (OrderFile.of_samples(samples.samples_per_block, seed, block) for block in blocks)
                first, end = blocks.start * samples.samples_per_block, blocks.stop * samples.samples_per_block
                # The last target of a sample is the first token of the next one.
                epochs = range(
                    first * self._sequence_length // dataset.num_tokens,
                    end * self._sequence_length // dataset.num_tokens + 1,
                )
            else:
                epochs = range(1)
            yield from (OrderFile.of_documents(dataset, seed, epoch) for epoch in epochs)

    def missing_order_files(self, start: int, stop: int) -> list[OrderFile]:
        """Those of ``order_files`` that are not in the index cache yet; none without an index cache."""
        cache = self._cache
        return [] if cache is None else [file for file in self.order_files(start, stop) if not cache.has(file)]

    def _shifted(
        self,
        tokens_BS1: np.ndarray,
        counts_BS1: np.ndarray,
        documents_BS1: np.ndarray,
        positions_BS1: np.ndarray,
    ) -> MicroBatch:
        """Inputs and targets from rows of S + 1 tokens; padding has document -1."""
        # The last token of a padded row is a target only: as an input it has no target.
        is_input_BS = documents_BS1[:, 1:] >= 0
        same_document_BS = documents_BS1[:, 1:] == documents_BS1[:, :-1]

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values))

        return MicroBatch(
            tokens_BS=tensor(np.where(is_input_BS, tokens_BS1[:, :-1], self.eod_id)),
            labels_BS=tensor(tokens_BS1[:, 1:]),
            loss_mask_BS=tensor(counts_BS1[:, 1:] & same_document_BS & is_input_BS),
            positions_BS=tensor(np.where(is_input_BS, positions_BS1[:, :-1], 0)),
            documents_BS=tensor(np.where(is_input_BS, documents_BS1[:, :-1], -1)),
        )

    def _samples_of(self, dataset: TokenDataset) -> int:
        """Samples of one pass over a dataset, the last one partial: its first token is never a target."""
        return -(-(dataset.num_tokens - 1) // self._sequence_length)

    def _check_tokenizers(self) -> None:
        for other in self._datasets[1:]:
            _check_same_tokenizer(self._datasets[0], other)

    def _check_lengths(self) -> None:
        # A validation split that is shorter than a sequence becomes one padded sample.
        needed = self._sequence_length + 1 if self._split == "train" else 2
        for dataset in self._datasets:
            if dataset.num_tokens < needed:
                raise DataError(
                    f"{dataset.path}: its {self._split} split has {dataset.num_tokens} tokens, but a sample of "
                    f"data.sequence_length {self._sequence_length} needs {needed}; shorten the sequences or add data"
                )


def validation_datasets(data: DataConfig) -> list[DatasetConfig]:
    """The datasets to validate on: those that are named, or the training datasets that have a validation split.

    Raises:
        DataError: a training dataset that cannot be opened.
    """
    return data.validation or [item for item in data.train if read_manifest(item.path).validation.documents]


def _check_ids(dataset: TokenDataset, tokens_T: np.ndarray) -> None:
    """A damaged file must not become an index error inside a model, or training on other tokens."""
    vocabulary_size = dataset.manifest.vocabulary_size
    wrong_T = tokens_T[(tokens_T < 0) | (tokens_T >= vocabulary_size)]
    if wrong_T.size:
        raise DataError(
            f"{dataset.path}: {dataset.split}.bin is damaged: it holds the token id {int(wrong_T[0])}, the vocabulary "
            f"has {vocabulary_size}; see `steptron data inspect`, and build the dataset again"
        )


def _check_same_tokenizer(first: TokenDataset, other: TokenDataset) -> None:
    ours, theirs = first.manifest, other.manifest
    if (ours.tokenizer_hash, ours.eod_id) != (theirs.tokenizer_hash, theirs.eod_id):
        raise DataError(
            f"{first.path} and {other.path} were built with different tokenizers; build one of them again with "
            f"--tokenizer {_tokenizer_of(first.path)}"
        )


def _tokenizer_of(folder: Path) -> Path:
    return folder / "tokenizer.json"
