"""Which kind of samples a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.dataset import Split
from steptron.data.packed_source import PackedSource
from steptron.data.sampler import SampleSource
from steptron.data.samples import Samples
from steptron.data.spans import Span


def open_source(
    datasets: list[DatasetConfig],
    split: Split,
    data: DataConfig,
    wait_seconds: float = 600.0,
    spans: Sequence[Span] | None = None,
) -> Samples:
    """Opens datasets to be blended, in rows filled as ``data.packing`` says.

    Args:
        datasets: what to blend.
        split: ``train`` (endless) or ``validation``.
        data: how samples are made; its own lists of datasets are not read.
        wait_seconds: longest wait for another process that builds a file of the index cache.
        spans: what a stage reads of each dataset; everything from its beginning on by default.

    Raises:
        DataError: a dataset that cannot be opened or does not suit the sequence length, or tokenizers that differ.
    """
    if data.packing == "best_fit":
        return PackedSource(datasets, split, data, spans)
    return SampleSource(datasets, split, data, wait_seconds, spans)
