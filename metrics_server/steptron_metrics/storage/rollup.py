"""Rolling up iterations: what is kept of a bucket of them, and which levels answer a question.

A level of factor F has one row for each bucket of F iterations, ``k F + 1`` to ``(k + 1) F``. A statistic of a bucket
is, item by item:

- count: the mean over the iterations that have the metric;
- mean, rms: of all samples, exactly, that is weighted by the iterations' counts;
- min, max: the least and the largest, exactly;
- median: the median of the medians one level finer, an approximation;
- p99: the largest p99, an upper bound of the true one.

Beside each stand the least and the largest of the iterations' values, exactly. An item that nothing was measured of
counts nowhere. Figures that are derived from aggregates are rolled up by their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptron_metrics.results import STATISTICS

FACTORS = (1, 16, 256)
"""Of the levels; the first are the iterations themselves."""


def start_of(iteration: int, factor: int) -> int:
    """First iteration of the bucket."""
    return (iteration - 1) // factor * factor + 1


@dataclass(frozen=True)
class Planes:
    """A statistic of rows, which are iterations or buckets.

    Attributes:
        value, low, high: float32 [R, items]; of iterations three times the same.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def fold(
    statistic: str,
    starts: np.ndarray,
    planes: Planes,
    iterations: np.ndarray,
    samples: np.ndarray | None,
) -> Planes:
    """Rows to fewer rows.

    Args:
        statistic: one of ``STATISTICS``.
        starts: int [G] ascending, where in the rows each group begins.
        planes: of the rows.
        iterations: int [R], for how many iterations each row stands.
        samples: [R, items], how many samples each item of a row has, over all its iterations; needed of mean and rms.
            Of count, ``planes.value`` is taken to be per iteration.

    Returns:
        the statistic of the groups, [G, items].
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic {statistic!r} is none of {', '.join(STATISTICS)}")
    low = _reduce(np.fmin, planes.low, starts)
    high = _reduce(np.fmax, planes.high, starts)
    if statistic == "count":
        total = _reduce(np.add, planes.value * iterations[:, None].astype(np.float64), starts)
        value = total / np.add.reduceat(iterations, starts)[:, None]
    elif statistic in ("mean", "rms"):
        if samples is None:
            raise ValueError(f"{statistic} is weighted by samples, and there are none")
        value = _weighted(planes.value, samples, starts, square=statistic == "rms")
    elif statistic == "min":
        value = _reduce(np.fmin, planes.value, starts)
    elif statistic == "median":
        value = _median(planes.value, starts)
    else:
        value = _reduce(np.fmax, planes.value, starts)
    value = value.astype(np.float32)
    value[np.isnan(value)] = np.nan  # 0 / 0 has another sign
    return Planes(value, low, high)


def _reduce(ufunc: np.ufunc, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[G, items] of [R, items]."""
    size, rest = divmod(len(values), len(starts))
    if not rest and np.array_equal(starts, np.arange(len(starts)) * size):
        # Groups of the same size, the usual case: ten times as fast.
        return np.asarray(ufunc.reduce(values.reshape(len(starts), size, values.shape[1]), axis=1))
    return np.asarray(ufunc.reduceat(values, starts, axis=0))


def _weighted(values: np.ndarray, samples: np.ndarray, starts: np.ndarray, square: bool) -> np.ndarray:
    there = ~np.isnan(values)
    weight = np.where(there, samples, 0).astype(np.float64)
    wide = np.where(there, values, 0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        # An infinite value without a sample would make NaN of the sum.
        part = np.where(weight > 0, weight * (wide * wide if square else wide), 0.0)
        mean = _reduce(np.add, part, starts) / _reduce(np.add, weight, starts)
    return np.asarray(np.sqrt(mean) if square else mean)


def _median(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    sizes = np.diff(starts, append=len(values))
    result = np.empty((len(starts), values.shape[1]), np.float32)
    for size in np.unique(sizes):
        groups = np.flatnonzero(sizes == size)
        stacked = values[starts[groups][:, None] + np.arange(size)]  # [groups, size, items]
        ordered = np.sort(stacked, axis=1)  # NaN last
        there = size - np.isnan(ordered).sum(axis=1)
        low = np.take_along_axis(ordered, np.maximum(there - 1, 0)[:, None] // 2, axis=1)[:, 0]
        high = np.take_along_axis(ordered, np.minimum(there // 2, size - 1)[:, None], axis=1)[:, 0]
        # Where both are the same infinity, their mean would be right too, of opposite ones it is NaN.
        with np.errstate(invalid="ignore"):
            result[groups] = np.where(low == high, low, low * np.float32(0.5) + high * np.float32(0.5))
        result[groups] = np.where(there == 0, np.nan, result[groups])
    return result


@dataclass(frozen=True)
class Piece:
    """Iterations [first, last] that are to be read from the level of a factor; whole buckets of it."""

    factor: int
    first: int
    last: int


def factor_of(first: int, last: int, max_points: int) -> int:
    """The least power of two whose buckets cut [first, last] into at most ``max_points`` parts."""
    if max_points < 1:
        raise ValueError(f"max_points {max_points}: expected at least 1")
    factor = 1
    while (last - 1) // factor - (first - 1) // factor + 1 > max_points:
        factor *= 2
    return factor


def plan(first: int, last: int, stored_last: int, factor: int) -> list[Piece]:
    """From which levels the iterations in [first, last] are read to make buckets of ``factor`` of them, ascending.

    Args:
        stored_last: last iteration of the run; buckets that end after it are not rolled up yet.
        factor: levels coarser than it are of no use.
    """
    return _plan(first, last, stored_last, [level for level in FACTORS if level <= factor])


def _plan(first: int, last: int, stored_last: int, levels: list[int]) -> list[Piece]:
    if first > last:
        return []
    level = levels[-1]
    if level == 1:
        return [Piece(1, first, last)]
    inner_first = start_of(first + level - 1, level)
    inner_last = min(last, stored_last) // level * level
    if inner_first > inner_last:
        return _plan(first, last, stored_last, levels[:-1])
    return [
        *_plan(first, inner_first - 1, stored_last, levels[:-1]),
        Piece(level, inner_first, inner_last),
        *_plan(inner_last + 1, last, stored_last, levels[:-1]),
    ]
