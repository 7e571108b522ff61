"""Samples that hold whole documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.dataset import Segments, Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.index_cache import OrderFile
from steptron.data.packing import PackedStream
from steptron.data.samples import Row, Samples, numbered_documents
from steptron.data.spans import Span


class PackedSource(Samples):
    """Samples that hold whole documents one after the other, then padding.

    Documents of a row are isolated: numbered 0, 1, ..., with positions that restart. A document of L tokens takes L - 1
    slots: all but its last are inputs, and all but its first are targets, each once per epoch. The last, the
    end-of-document token, is no input: it would have no target, and only fill slots and count in the balance of the
    experts.

    Weights of the blend are shares of rows; shares of tokens differ from them as much as the datasets fill their rows.
    Every epoch of a dataset packs all its documents anew (``pack``). Of the validation split every document is in one
    row.
    """

    def __init__(
        self, datasets: list[DatasetConfig], split: Split, data: DataConfig, spans: Sequence[Span] | None = None
    ) -> None:
        """Opens the datasets.

        Args:
            datasets: what to blend.
            split: ``train`` (endless) or ``validation``.
            data: sequence length and seed; its own lists of datasets are not read.
            spans: which stage reads which datasets; each stage packs anew.

        Raises:
            DataError: a dataset that cannot be opened, tokenizers that differ, documents longer than a row, or a
                dataset without a document of two tokens.
        """
        super().__init__(datasets, split, data, spans)
        stages = [0] * len(datasets) if spans is None else [span.stage for span in spans]
        for dataset in self._datasets:
            _check_fit(dataset, data.sequence_length)
        self._streams = [
            PackedStream(dataset.lengths_D - 1, data.sequence_length, seed + (stage << 96))
            for dataset, seed, stage in zip(self._datasets, self._seeds, stages, strict=True)
        ]

    def order_files(self, start: int, stop: int) -> Iterator[OrderFile]:
        """Raises DataError: a packing is held in memory."""
        raise DataError(
            "data.packing best_fit has no orders to be built: each process packs the documents itself; leave "
            "data.index_cache out"
        )

    def missing_order_files(self, start: int, stop: int) -> list[OrderFile]:
        """None."""
        return []

    def _row(self, number: int, sample: int, metadata_counts: bool | None) -> Row:
        documents_N = self._streams[number].row(sample)
        lengths_N = self._datasets[number].lengths_D[documents_N].astype(np.int64)
        tokens_T, counts_T = self._read(
            number, Segments(documents_N, np.zeros_like(documents_N), lengths_N), metadata_counts
        )
        is_last_T = np.zeros(tokens_T.size, np.bool_)
        is_last_T[np.cumsum(lengths_N) - 1] = True
        is_first_T = np.roll(is_last_T, 1)
        positions_T, documents_T = numbered_documents(lengths_N - 1)
        return Row(tokens_T[~is_last_T], tokens_T[~is_first_T], counts_T[~is_first_T], positions_T, documents_T)

    def _samples_of(self, number: int) -> int:
        return self._streams[number].packing(0).rows

    def _token_shares(self) -> list[float]:
        """By the fill of the first epoch's rows."""
        tokens = [
            weight * (dataset.num_tokens - dataset.num_documents) / self._samples_of(number)
            for number, (weight, dataset) in enumerate(zip(self._weights, self._datasets, strict=True))
        ]
        return [own / sum(tokens) for own in tokens]


def _check_fit(dataset: TokenDataset, sequence_length: int) -> None:
    lengths_D = dataset.lengths_D
    longest = int(lengths_D.max())
    if longest > sequence_length + 1:
        raise DataError(
            f"{dataset.path}: {int((lengths_D > sequence_length + 1).sum()):,} of the {lengths_D.size:,} documents of "
            f"its {dataset.split} split do not fit a row of data.sequence_length {sequence_length}, which holds a "
            f"document of {sequence_length + 1} tokens; the longest has {longest}. None is cut with data.packing "
            f"best_fit: set data.sequence_length to at least {longest - 1}, or leave long conversations out with "
            f"`steptron sft build --max-tokens {sequence_length + 1}`"
        )
    if longest < 2:
        raise DataError(f"{dataset.path}: no document of its {dataset.split} split has a token to be predicted")
