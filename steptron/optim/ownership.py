"""ZeRO-1 ownership: where gradients lie in a flat buffer, and which rank updates which run of it. Plain data, no torch.

A buffer holds units (a rank's parts of stored parameters) without a break in any of them, in the order in which a
backward pass completes them, and is cut into spans that are reduced at once. Under ``reduce_scatter`` a span is made
of as many equal cells as there are ranks, rank-major: one reduce-scatter brings cell r, complete, to rank r, in place,
and one all-gather of the same cells returns the updated parameters. What Muon orthogonalises may not be cut, so that
its matrices must fill cells: equal matrices (the routed experts) do, with padding in the last span alone; others are
packed, which pads each cell up to the fullest, and with more ranks than matrices explodes. Then gradients are reduced
to all ranks (``all_reduce``) without padding, and ownership is a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from steptron.optim.buckets import bucket_runs


class Reduction(StrEnum):
    """How a buffer's gradients are added up."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


ALIGNMENT = 64
"""Elements that cells which cut parameters anywhere are a multiple of, so that no number of ranks puts what follows
them at odd addresses: products on GPUs want multiples of 16 bytes."""


@dataclass(frozen=True)
class MatrixRun:
    """A matrix inside a unit that one rank must own whole: elements [start, stop), and what its update costs."""

    start: int
    stop: int
    cost: float


@dataclass(frozen=True)
class Unit:
    """What lies unbroken in a buffer.

    Attributes:
        size: elements.
        matrices: what may not be cut, in ascending order; empty where a unit may be cut anywhere.
    """

    size: int
    matrices: tuple[MatrixRun, ...] = ()

    @property
    def cost(self) -> float:
        return sum(matrix.cost for matrix in self.matrices)


@dataclass(frozen=True)
class OwnedRun:
    """Elements [start, stop) of a unit, and the rank (its cell) that updates them."""

    unit: int
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a buffer that are reduced at once."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BufferLayout:
    """A buffer's layout over ``ranks`` ranks.

    Attributes:
        ranks: number of ranks that share the parameters.
        reduction: how gradients are added up.
        offsets: where each unit starts.
        length: elements, padding included.
        spans: what is reduced at once, in order; they tile the buffer.
        has_cells: every span consists of ``ranks`` equal cells, owned in order.
        runs: who owns what, ascending by unit and start; they tile the units.
        scattered_padding: padding that reduce-scattering has or would have, over the elements of the units.
    """

    ranks: int
    reduction: Reduction
    offsets: tuple[int, ...]
    length: int
    spans: tuple[Span, ...]
    has_cells: bool
    runs: tuple[OwnedRun, ...]
    scattered_padding: float

    @property
    def padding(self) -> int:
        """Elements that stand for no parameter."""
        return self.length - sum(run.stop - run.start for run in self.runs)


def lay_out(
    units: Sequence[Unit],
    ranks: int,
    reduction: Literal["auto", "reduce_scatter", "all_reduce"] = "auto",
    max_padding: float = 0.15,
) -> BufferLayout:
    """Lays a buffer out and decides how it is reduced.

    Units that may be cut anywhere are shared equally, with a few elements of padding for each rank in each span. For
    whole matrices ``auto`` reduce-scatters where that pads by at most ``max_padding``, and reduces to all ranks
    otherwise; either way spans are reduced while the backward runs.

    Args:
        units: in the order in which a backward pass completes them; either all have matrices or none has.
        ranks: number of ranks that share the parameters.
        reduction: as ``optimizer.sharding.reduction``.
        max_padding: as ``optimizer.sharding.max_padding``.

    Raises:
        ValueError: some units have matrices and some have none, or matrices do not tile their unit.
    """
    if not any(unit.matrices for unit in units):
        layout = _cut_anywhere(units, ranks)
        # The same cells, and so the same owners, whether or not gradients go to all.
        return replace(layout, reduction=Reduction.ALL_REDUCE) if reduction == "all_reduce" else layout
    for unit in units:
        _check_tiled(unit)
    if ranks == 1:
        return _owned_by_list(units, ranks, 0.0)
    scattered = _equal_cells(units, ranks) if _has_equal_matrices(units) else _packed(units, ranks)
    fits = scattered.scattered_padding <= max_padding
    if reduction == "reduce_scatter" or (reduction == "auto" and fits):
        return scattered
    return _owned_by_list(units, ranks, scattered.scattered_padding)


def balance(costs: Sequence[float], ranks: int, loads: Sequence[float] = ()) -> list[int]:
    """Owners of items by the longest-processing-time rule: the costliest first, each to the least loaded rank.

    Args:
        costs: of the items.
        ranks: number of owners.
        loads: what each has already; nothing when empty.
    """
    filled = list(loads) or [0.0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(ranks), key=lambda rank: (filled[rank], rank))
        owners[index] = owner
        filled[owner] += costs[index]
    return owners


def _cut_anywhere(units: Sequence[Unit], ranks: int) -> BufferLayout:
    offsets, spans, runs, offset = [], [], [], 0
    for first, stop in bucket_runs([unit.size for unit in units]):
        start, position = offset, offset
        size = sum(unit.size for unit in units[first:stop])
        cell = -(-size // ranks)
        if ranks > 1:  # of one rank nothing is moved
            cell = -(-cell // ALIGNMENT) * ALIGNMENT
        for index in range(first, stop):
            offsets.append(position)
            end = position + units[index].size
            for owner in range((position - start) // cell if cell else 0, ranks):
                low, high = max(position, start + owner * cell), min(end, start + (owner + 1) * cell)
                if low < high:
                    runs.append(OwnedRun(index, low - position, high - position, owner))
                if high == end:
                    break
            position = end
        offset = start + cell * ranks
        spans.append(Span(start, offset))
    return _scattered(units, ranks, offsets, spans, runs)


def _equal_cells(units: Sequence[Unit], ranks: int) -> BufferLayout:
    """Equal matrices in the order in which they lie in memory, some for each cell."""
    size = units[0].matrices[0].stop
    number = sum(len(unit.matrices) for unit in units)
    # As many as make a reduction large, but at the end as few as can be: padding is less than one for each rank.
    (_, usual), *_ = bucket_runs([size * ranks] * number)
    spans, offset, left = [], 0, number
    while left > 0:
        each = usual if left >= usual * ranks else -(-left // ranks)
        spans.append(Span(offset, offset + each * ranks * size))
        offset, left = spans[-1].stop, left - each * ranks
    offsets, runs, position = [], [], 0
    owners = iter(_owners_by_cell(spans, ranks, size))
    for index, unit in enumerate(units):
        offsets.append(position)
        runs += [OwnedRun(index, matrix.start, matrix.stop, next(owners)) for matrix in unit.matrices]
        position += unit.size
    return _scattered(units, ranks, offsets, spans, runs)


def _owners_by_cell(spans: Sequence[Span], ranks: int, size: int) -> list[int]:
    return [owner for span in spans for owner in range(ranks) for _ in range(span.size // ranks // size)]


def _packed(units: Sequence[Unit], ranks: int) -> BufferLayout:
    """Whole units packed into cells, span by span as the backward completes them."""
    offsets, spans, runs, start = [0] * len(units), [], [], 0
    loads = [0.0] * ranks
    sizes = [unit.size for unit in units]
    # Spans in which most cells would be empty pad the most: as large as a cell of the largest unit for every rank.
    for first, stop in bucket_runs(sizes, ranks * max(sizes)):
        owners = balance([unit.cost for unit in units[first:stop]], ranks, loads)
        filled = [0] * ranks
        for index, owner in zip(range(first, stop), owners, strict=True):
            offsets[index] = filled[owner]  # in its cell, until the cells' size is known
            filled[owner] += units[index].size
            loads[owner] += units[index].cost
        cell = max(filled)
        for index, owner in zip(range(first, stop), owners, strict=True):
            offsets[index] += start + owner * cell
            runs += [OwnedRun(index, matrix.start, matrix.stop, owner) for matrix in units[index].matrices]
        spans.append(Span(start, start + ranks * cell))
        start = spans[-1].stop
    return _scattered(units, ranks, offsets, spans, runs)


def _owned_by_list(units: Sequence[Unit], ranks: int, scattered_padding: float) -> BufferLayout:
    """Without padding; every matrix has its owner, wherever it lies."""
    matrices = [(index, matrix) for index, unit in enumerate(units) for matrix in unit.matrices]
    owners = balance([matrix.cost for _, matrix in matrices], ranks)
    offsets, position = [], 0
    for unit in units:
        offsets.append(position)
        position += unit.size
    ends = [*offsets, position]
    return BufferLayout(
        ranks,
        Reduction.ALL_REDUCE,
        tuple(offsets),
        position,
        tuple(Span(ends[first], ends[stop]) for first, stop in bucket_runs([unit.size for unit in units])),
        False,
        tuple(
            OwnedRun(index, matrix.start, matrix.stop, owner)
            for (index, matrix), owner in zip(matrices, owners, strict=True)
        ),
        scattered_padding,
    )


def _scattered(
    units: Sequence[Unit], ranks: int, offsets: Sequence[int], spans: Sequence[Span], runs: Sequence[OwnedRun]
) -> BufferLayout:
    length = spans[-1].stop if spans else 0
    size = sum(unit.size for unit in units)
    return BufferLayout(
        ranks,
        Reduction.REDUCE_SCATTER,
        tuple(offsets),
        length,
        tuple(spans),
        True,
        tuple(runs),
        (length - size) / size if size else 0.0,
    )


def _has_equal_matrices(units: Sequence[Unit]) -> bool:
    return len({matrix.stop - matrix.start for unit in units for matrix in unit.matrices}) == 1


def _check_tiled(unit: Unit) -> None:
    borders = [0, *(matrix.stop for matrix in unit.matrices)]
    starts = [*(matrix.start for matrix in unit.matrices), unit.size]
    if not unit.matrices or borders != starts:
        raise ValueError(
            f"matrices {[(matrix.start, matrix.stop) for matrix in unit.matrices]} do not tile the {unit.size} "
            "elements of their parameter"
        )
