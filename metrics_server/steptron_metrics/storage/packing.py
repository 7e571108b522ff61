"""Rows of the levels as Arrow tables, to and from arrays; what they hold is laid down in ``migrations/``.

Two things are left out, because whole columns are then empty in practice:

- A count that all items share is a list of one.
- A statistic is NULL where it is what the mean says already, as when each item has one sample only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from steptron_metrics.results import STATISTICS, Aggregate, Derived
from steptron_metrics.storage.rollup import Planes, fold

AGGREGATE, DERIVED = 0, 1
"""Kinds of series."""
PLANES = ("value", "low", "high")
MAX_COUNT = 2**31 - 1
_GROUP_BYTES = 32 << 20

_OF_BUCKETS = {"min_value": "mean_low", "max_value": "mean_high", "p99_value": "mean_high"}


def column_of(statistic: str, plane: str, factor: int) -> str:
    """Which column of a level holds a plane of a statistic."""
    if factor == 1 or (statistic, plane) in (("min", "low"), ("max", "high")):
        plane = "value"
    return f"{statistic}_{plane}"


def columns_of(factor: int) -> list[str]:
    """All such columns of a level."""
    return list(dict.fromkeys(column_of(name, plane, factor) for name in STATISTICS for plane in PLANES))


def stand_in(column: str, factor: int) -> str:
    """The column that says what another one does not where it is NULL."""
    if factor > 1 and column in _OF_BUCKETS:
        return _OF_BUCKETS[column]
    return f"mean_{column.rpartition('_')[2]}"


def pack(
    factor: int,
    series: np.ndarray,
    iteration: np.ndarray,
    columns: dict[str, np.ndarray],
    iterations: np.ndarray | None = None,
    which: np.ndarray | None = None,
) -> pa.Table:
    """Rows of a level.

    Args:
        series, iteration: int [R].
        columns: by name, [R, items]; count_* integers, the others float32. Those not given are NULL.
        iterations: int [R], of buckets how many iterations of the series each has.
        which: int32 [R, items] of derived figures.
    """
    width = columns["mean_value"].shape[1]
    arrays: dict[str, pa.Array] = {
        "series": pa.array(series, pa.int32()),
        "iteration": pa.array(iteration, pa.int64()),
        "width": pa.array(np.full(len(series), width), pa.int32()),
    }
    if iterations is not None:
        arrays["iterations"] = pa.array(iterations, pa.int32())
    for name in columns_of(factor):
        if name not in columns:
            arrays[name] = pa.nulls(len(series), pa.list_(pa.float32()))
        elif name.startswith("count_"):
            arrays[name] = _counts(columns[name])
        else:
            mean = stand_in(name, factor)
            arrays[name] = _floats(columns[name], None if mean == name else columns[mean])
    if factor == 1:
        arrays["which"] = (
            pa.nulls(len(series), pa.list_(pa.int32()))
            if which is None
            else _lists(which.ravel(), np.full(len(which), width))
        )
    return pa.table(arrays)


def _counts(counts: np.ndarray) -> pa.Array:
    kept = np.repeat((counts != counts[:, :1]).any(axis=1)[:, None], counts.shape[1], axis=1)
    kept[:, 0] = True
    return _lists(counts.astype(np.int32, copy=False)[kept], kept.sum(axis=1))


def _floats(values: np.ndarray, mean: np.ndarray | None) -> pa.Array:
    if mean is None:
        return _lists(values.ravel(), np.full(len(values), values.shape[1]))
    kept = (values.view(np.uint32) != mean.view(np.uint32)).any(axis=1)
    if kept.all():
        return _floats(values, None)
    return _lists(values[kept].ravel(), np.where(kept, values.shape[1], 0), ~kept)


def _lists(flat: np.ndarray, lengths: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = None if null is None else pa.array(null)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=mask)


def rows_of(entries: Sequence[tuple[int, int, Aggregate | Derived]]) -> Iterator[pa.Table]:
    """Rows of level 1 of (series, iteration, what was found)."""
    groups: dict[tuple[bool, int], list[tuple[int, int, Aggregate | Derived]]] = {}
    for entry in entries:
        derived, width = isinstance(entry[2], Derived), width_of(entry[2])
        group = groups.setdefault((derived, width), [])
        group.append(entry)
        if len(group) * width * 4 * len(STATISTICS) >= _GROUP_BYTES:
            yield _rows(groups.pop((derived, width)))
    for group in groups.values():
        yield _rows(group)


def width_of(found: Aggregate | Derived) -> int:
    """How many items its row has."""
    return found.values.shape[1] if isinstance(found, Aggregate) else int(found.layers.max(initial=-2)) + 2


def _rows(group: Sequence[tuple[int, int, Aggregate | Derived]]) -> pa.Table:
    series = np.array([one[0] for one in group])
    iteration = np.array([one[1] for one in group])
    width = width_of(group[0][2])
    figures = [one[2] for one in group if isinstance(one[2], Derived)]
    if figures:
        count = np.zeros((len(figures), width), np.int32)
        values = np.full((len(figures), width), np.nan, np.float32)
        which = np.full((len(figures), width), -1, np.int32)
        for row, figure in enumerate(figures):
            slots = figure.layers.astype(np.int64) + 1
            count[row, slots], values[row, slots], which[row, slots] = 1, figure.values, figure.items
        return pack(1, series, iteration, {"count_value": count, "mean_value": values}, which=which)
    stacked = np.stack([one[2].values for one in group], axis=1).astype(np.float32, copy=False)  # [7, rows, items]
    unknown = np.isnan(stacked)
    if unknown.any():
        stacked[unknown] = np.nan  # one NaN of the many, so that equal ones are found to be
    columns = {
        column_of(name, "value", 1): as_counts(plane) if name == "count" else plane
        for name, plane in zip(STATISTICS, stacked, strict=True)
    }
    return pack(1, series, iteration, columns)


def as_counts(values: np.ndarray) -> np.ndarray:
    """Counts as int32; what is none, such as a negative number, becomes the nearest."""
    if ((values >= 0) & (values < MAX_COUNT)).all():
        return np.rint(values).astype(np.int32)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(np.rint(values.astype(np.float64))), 0, MAX_COUNT).astype(np.int32)


class _Column:
    """A column of lists."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        self.null: np.ndarray = array.is_null().to_numpy(zero_copy_only=False)
        self._offsets: np.ndarray = array.offsets.to_numpy()
        self._values: np.ndarray = array.values.to_numpy(zero_copy_only=False)

    def lengths(self) -> np.ndarray:
        return np.where(self.null, 0, np.diff(self._offsets))

    def dense(self, rows: np.ndarray, width: int, fill: float) -> np.ndarray:
        """[rows, width], with ``fill`` after the end of shorter lists."""
        starts, lengths = self._offsets[rows].astype(np.int64), self.lengths()[rows]
        if len(rows) and (lengths == width).all() and (np.diff(starts) == width).all():
            return self._values[starts[0] : starts[0] + len(rows) * width].reshape(len(rows), width)
        result = np.full((len(rows), width), fill, self._values.dtype)
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length)
            result[alike, :length] = self._values[starts[alike][:, None] + np.arange(length)]
        return result


class Rows:
    """Rows of a level as they come from a database, as arrays.

    Args:
        factor: of the level.
        table: with ``iteration``, ``width``, of buckets ``iterations``, and the columns that are asked for and those
            that stand in for them.
    """

    def __init__(self, factor: int, table: pa.Table) -> None:
        self.factor = factor
        self._columns = {
            name: _Column(column)
            for name, column in zip(table.column_names, table.columns, strict=True)
            if pa.types.is_list(column.type)
        }
        self.iteration: np.ndarray = table.column("iteration").to_numpy()
        self.width: np.ndarray = table.column("width").to_numpy()
        self.iterations: np.ndarray = (
            np.ones(len(table), np.int64) if factor == 1 else table.column("iterations").to_numpy().astype(np.int64)
        )

    def floats(self, column: str, rows: np.ndarray, width: int) -> np.ndarray:
        """float32 [rows, width], NaN where nothing is known."""
        own = self._columns[column]
        result = own.dense(rows, width, np.nan)
        other = np.flatnonzero(own.null[rows])
        if len(other):
            result = result if result.flags.writeable else result.copy()
            result[other] = self._columns[stand_in(column, self.factor)].dense(rows[other], width, np.nan)
        return result

    def counts(self, column: str, rows: np.ndarray, width: int) -> np.ndarray:
        """int32 [rows, width]."""
        own = self._columns[column]
        lengths, widths = own.lengths()[rows], self.width[rows]
        if (lengths == 1).all():
            first = own.dense(rows, 1, 0)
            return np.where(np.arange(width) < widths[:, None], first, np.int32(0))
        result = own.dense(rows, width, 0)
        result = result if result.flags.writeable else result.copy()
        shared = np.flatnonzero((lengths == 1) & (widths > 1))
        result[shared] = np.where(np.arange(width) < widths[shared][:, None], result[shared, :1], 0)
        return result

    def planes(self, statistic: str, rows: np.ndarray, width: int) -> Planes:
        """A statistic; count as it is in ``fold``, per iteration."""
        read = self.counts if statistic == "count" else self.floats
        arrays: dict[str, np.ndarray] = {}
        planes = []
        for plane in PLANES:
            column = column_of(statistic, plane, self.factor)
            if column not in arrays:
                arrays[column] = read(column, rows, width)
                if column == "count_value":
                    arrays[column] = (arrays[column] / self.iterations[rows][:, None]).astype(np.float32)
                elif statistic == "count":
                    arrays[column] = arrays[column].astype(np.float32)
            planes.append(arrays[column])
        return Planes(*planes)


def roll_up(table: pa.Table, finer: int, coarser: int, first: int) -> Iterator[pa.Table]:
    """Rows of a bucket from those of all its parts.

    Args:
        table: all columns of the level of factor ``finer``, rows in any order.
        coarser: factor of the level that the bucket is of.
        first: its first iteration.
    """
    rows = Rows(finer, table)
    series = table.column("series").to_numpy()
    known, place = np.unique(series, return_inverse=True)
    widest = np.zeros(len(known), np.int64)
    np.maximum.at(widest, place, rows.width)
    order = np.lexsort((rows.iteration, series))
    for width in np.unique(widest):
        alike = order[widest[place[order]] == width]
        for part in _in_parts(alike, series, int(width)):
            yield _bucket(rows, part, series, int(width), coarser, first)


def _in_parts(ordered: np.ndarray, series: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Rows of whole series, not too many at a time."""
    starts = np.flatnonzero(np.diff(series[ordered], prepend=-1))
    limit = max(_GROUP_BYTES // (4 * width), 1)
    begin = 0
    for start, end in itertools.pairwise([*starts.tolist(), len(ordered)]):
        if end - begin > limit and start > begin:
            yield ordered[begin:start]
            begin = start
    yield ordered[begin:]


def _bucket(rows: Rows, part: np.ndarray, series: np.ndarray, width: int, coarser: int, first: int) -> pa.Table:
    starts = np.flatnonzero(np.diff(series[part], prepend=-1))
    iterations = rows.iterations[part]
    samples = rows.counts("count_value", part, width)
    columns: dict[str, np.ndarray] = {}
    for name in STATISTICS:
        folded = fold(name, starts, rows.planes(name, part, width), iterations, samples)
        for plane in PLANES:
            columns[column_of(name, plane, coarser)] = getattr(folded, plane)
    total = np.add.reduceat(samples.astype(np.int64), starts, axis=0)
    columns["count_value"] = np.minimum(total, MAX_COUNT).astype(np.int32)
    columns["count_low"], columns["count_high"] = as_counts(columns["count_low"]), as_counts(columns["count_high"])
    named = {name: columns[name] for name in columns_of(coarser)}
    buckets = np.full(len(starts), first)
    return pack(coarser, series[part][starts], buckets, named, iterations=np.add.reduceat(iterations, starts))
