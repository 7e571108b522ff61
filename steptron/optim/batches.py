"""Which matrices Muon orthogonalises together. Plain data, no torch: the planner reads it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptron.config.schema import MuonConfig
from steptron.model.parameter_shards import MatrixPlace

_FIXED_BATCH = 8
"""Matrices of a batch in deterministic mode: never one, and whatever a rank owns."""


@dataclass(frozen=True)
class Batch:
    """Matrices with equal sides, cut alike by tensor parallelism.

    Attributes:
        indices: which of the matrices.
        size: their number, with the matrices of zeros that fill the batch up.
        short, long: sides of a whole matrix.
        parts: tensor-parallel ranks that each matrix is gathered from; 1 where it is whole.
    """

    indices: tuple[int, ...]
    size: int
    short: int
    long: int
    parts: int


def batches_of(matrices: Sequence[MatrixPlace], config: MuonConfig, deterministic: bool) -> list[Batch]:
    """Batches of at most ``batch_elements`` elements, one matrix at least.

    Args:
        matrices: what a rank owns.
        config: Muon's settings.
        deterministic: all batches of a shape have one size, which does not depend on what the rank owns: batched
            products of other sizes may round otherwise.
    """
    alike: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for index, place in enumerate(matrices):
        short, long = sorted(place.whole_shape)
        # Where a matrix is cut is part of the shape of the part that a rank has.
        held = place.shape if not place.is_whole else (short, long)
        alike.setdefault(((short, long), held), []).append(index)
    batches = []
    for ((short, long), _), indices in alike.items():
        most = max(1, config.batch_elements // (short * long))
        if deterministic:
            most = max(2, min(most, _FIXED_BATCH))
        first = matrices[indices[0]]
        parts = 1 if first.is_whole else first.part.count
        for start in range(0, len(indices), most):
            own = tuple(indices[start : start + most])
            batches.append(Batch(own, most if deterministic else len(own), short, long, parts))
    return batches
