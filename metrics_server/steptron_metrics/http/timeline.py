"""What is known of iterations themselves, rolled up over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steptron_metrics.results import Points
from steptron_metrics.storage.base import Store

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("seconds", "missing_ranks", "dropped", "consumed_tokens", "ended_ns", "tokens_per_second")
_AT_ONCE = 50_000


def timeline(store: Store, run: str, first: int, last: int, max_points: int) -> Points:
    """The columns over the iterations in [first, last] that are stored, at most ``max_points`` points.

    ``ended_ns`` is in seconds since 1970 minus that of the range's first iteration, for float32 to hold it;
    ``consumed_tokens`` in millions. Tokens per second are an iteration's own tokens over its seconds; NaN of the first.
    """
    columns = _read(store, run, first, last)
    number = columns["iteration"]
    if not len(number):
        empty = np.empty((0, len(COLUMNS)), np.float32)
        return Points(number, number, empty, empty, empty)
    tokens = columns["consumed_tokens"].astype(np.float64)
    seconds = columns["seconds"].astype(np.float64)
    own = np.diff(tokens, prepend=np.nan)
    own[1:][np.diff(number) != 1] = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(own >= 0, own / seconds, np.nan)
    table = np.stack(
        [
            seconds,
            (columns["world_size"] - columns["num_ranks"]).astype(np.float64),
            columns["dropped"].astype(np.float64),
            tokens / 1e6,
            (columns["ended_ns"] - columns["ended_ns"][0]) / 1e9,
            rate,
        ],
        axis=1,
    )
    stride = -(-len(number) // max_points)
    starts = np.arange(0, len(number), stride)
    ends = np.minimum(starts + stride, len(number)) - 1
    there = ~np.isnan(table)
    count = np.add.reduceat(there, starts, axis=0, dtype=np.int64)
    total = np.add.reduceat(np.where(there, table, 0.0), starts, axis=0)
    with np.errstate(invalid="ignore"):
        mean = total / count
    low, high = np.fmin.reduceat(table, starts, axis=0), np.fmax.reduceat(table, starts, axis=0)
    return Points(number[starts], number[ends], *(part.astype(np.float32) for part in (mean, low, high)))


def _read(store: Store, run: str, first: int, last: int) -> dict[str, np.ndarray]:
    """Columns of numbers of all iterations, read a part of the range at a time so that the lists of missing ranks of a
    long run are not in memory together."""
    names = ("iteration", "world_size", "num_ranks", "ended_ns", "seconds", "consumed_tokens", "dropped")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    start, span = first, _AT_ONCE
    while start <= last:
        end = min(last, start + span - 1)
        table: pa.Table = store.iterations(run, start, end)
        for name in names:
            parts[name].append(table.column(name).to_numpy())
        start = end + 1
        # Numbers of iterations may lie far apart: a part is about as many rows, not as wide a range.
        if len(table) < _AT_ONCE // 2:
            span *= 2
    return {name: np.concatenate(part) if part else np.empty(0, np.int64) for name, part in parts.items()}
