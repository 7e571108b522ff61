"""Samples cut out of endless streams of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.dataset import DocumentStream, SampleOrder, Split
from steptron.data.errors import DataError
from steptron.data.index_cache import CachedOrders, IndexCache, OrderFile
from steptron.data.manifest import read_manifest
from steptron.data.samples import Row, Samples, numbered_documents
from steptron.data.spans import Span


class SampleSource(Samples):
    """Samples that leave no slot unused, and cut documents at their borders.

    Each dataset is an endless stream of its documents in shuffled order (``DocumentStream``), cut into
    samples of tokens [i S, (i+1) S], so that neighbours share one token and all tokens of an epoch are
    inputs exactly once. Training takes these samples in shuffled order too (``SampleOrder``). Shares of
    samples are shares of tokens because all samples are equally long.

    With ``document_attention: isolated`` the documents of a row are numbered 0, 1, ..., positions
    restart at each (a document that began in an earlier sample starts at 0 here), and a target that
    belongs to the next document does not count. With ``crossing`` a row is one document and every
    target counts. Under both, tokens of masked spans do not count as targets, and the
    end-of-document token does.

    Of the validation split the last sample of a dataset is padded where its data end.
    """

    def __init__(
        self,
        datasets: list[DatasetConfig],
        split: Split,
        data: DataConfig,
        wait_seconds: float = 600.0,
        spans: Sequence[Span] | None = None,
    ) -> None:
        """Opens the datasets.

        With ``data.index_cache`` the orders are files of that folder, opened or built when a sample first
        needs them; an index of a dataset is then read as a whole only by the process that builds from it.

        Args:
            datasets: what to blend.
            split: ``train`` (endless) or ``validation``.
            data: sequence length, document attention, seed and index cache; its own lists of datasets are not read.
            wait_seconds: longest wait for another process that builds a file of the index cache.
            spans: what a stage reads of each dataset; everything from its beginning on by default.

        Raises:
            DataError: a dataset that cannot be opened, tokenizers that differ, or a sequence longer
                than all data.
        """
        super().__init__(datasets, split, data, spans, verify=data.index_cache is None)
        self._isolated = data.document_attention == "isolated"
        self._cache = cache = None if data.index_cache is None else IndexCache(data.index_cache, wait_seconds)
        self._check_lengths()
        orders = [None if cache is None else CachedOrders(cache, dataset) for dataset in self._datasets]
        self._streams = [
            DocumentStream(dataset.lengths_D, seed, own, dataset.num_tokens)
            for dataset, seed, own in zip(self._datasets, self._seeds, orders, strict=True)
        ]
        limits: Sequence[int | None] = [None] * len(datasets) if spans is None else [span.samples for span in spans]
        stages = [0] * len(datasets) if spans is None else [span.stage for span in spans]
        self._firsts = [0] * len(datasets) if spans is None else [span.first_token for span in spans]
        # Blocks of another stage are other blocks.
        self._order_seeds = [seed + (stage << 96) for seed, stage in zip(self._seeds, stages, strict=True)]
        self._orders = [
            SampleOrder(max(1, dataset.num_tokens // data.sequence_length), seed, own, limit)
            for dataset, seed, own, limit in zip(self._datasets, self._order_seeds, orders, limits, strict=True)
        ]

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
                for block in blocks:
                    if (size := samples.block_size(block)) > 0:
                        yield OrderFile.of_samples(size, self._order_seeds[number], block)
                first = blocks.start * samples.samples_per_block
                end = max(end, (blocks.stop - 1) * samples.samples_per_block + samples.block_size(blocks.stop - 1))
                # The last target of a sample is the first token of the next one.
                first, end = (self._firsts[number] + sample * self._sequence_length for sample in (first, end))
                epochs = range(first // dataset.num_tokens, end // dataset.num_tokens + 1)
            else:
                epochs = range(1)
            yield from (OrderFile.of_documents(dataset, seed, epoch) for epoch in epochs)

    def missing_order_files(self, start: int, stop: int) -> list[OrderFile]:
        """Those of ``order_files`` that are not in the index cache yet; none without an index cache."""
        cache = self._cache
        return [] if cache is None else [file for file in self.order_files(start, stop) if not cache.has(file)]

    def _row(self, number: int, sample: int, metadata_counts: bool | None) -> Row:
        length, stream = self._sequence_length, self._streams[number]
        if self._split == "train":
            start, size = self._firsts[number] + self._orders[number].place(sample) * length, length + 1
        else:
            start = sample * length
            size = min(length + 1, stream.tokens_per_epoch - start)
        segments = stream.segments(start, size)
        tokens_T, counts_T = self._read(number, segments, metadata_counts)
        if self._isolated:
            positions_T, documents_T = numbered_documents(segments.lengths_N)
        else:
            positions_T, documents_T = np.arange(size), np.zeros(size, np.int64)
        return Row(
            tokens_N=tokens_T[:-1],
            labels_N=tokens_T[1:],
            counts_N=counts_T[1:] & (documents_T[1:] == documents_T[:-1]),
            positions_N=positions_T[:-1],
            documents_N=documents_T[:-1],
        )

    def _samples_of(self, number: int) -> int:
        # The first token of a pass is never a target.
        return -(-(self._datasets[number].num_tokens - 1) // self._sequence_length)

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
