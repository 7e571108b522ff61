"""Aggregates one row an item, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from steptron_metrics.results import STATISTICS
from steptron_metrics.storage.database import Database, Transaction
from steptron_metrics.storage.packing import AGGREGATE, Rows, column_of, columns_of

BYTES_AT_ONCE = 32 << 20
MAX_ITERATIONS_AT_ONCE = 4096


def schema() -> pa.Schema:
    """Of the batches."""
    return pa.schema(
        [
            ("iteration", pa.int64()),
            ("metric", pa.dictionary(pa.int32(), pa.string())),
            ("layer", pa.int32()),
            ("item", pa.int32()),
            *((name, pa.int32() if name == "count" else pa.float32()) for name in STATISTICS),
        ]
    )


def aggregate_batches(
    database: Database, run: str, metrics: Sequence[str] | None, first: int, last: int
) -> Iterator[pa.RecordBatch]:
    """Batches in the order of iteration, metric, layer and item.

    Each is of one state of the database. Iterations that are replaced meanwhile are as they were or as they are.

    Args:
        metrics: which; None: all.
    """
    position = first
    while position <= last:
        with database.read() as transaction:
            series = transaction.execute(
                "SELECT id, name, layer, width FROM series "
                "WHERE kind = $2 AND run = (SELECT id FROM runs WHERE name = $1) ORDER BY name, layer",
                [run, AGGREGATE],
            )
            series = [one for one in series if metrics is None or one[1] in metrics]
            numbers = _next_iterations(transaction, run, position, last, sum(one[3] for one in series))
            if not series or not numbers:
                return
            batch = _batch(transaction, series, numbers[0], numbers[-1])
        if len(batch):
            yield batch
        position = numbers[-1] + 1


def _next_iterations(transaction: Transaction, run: str, first: int, last: int, width: int) -> list[int]:
    limit = min(max(BYTES_AT_ONCE // (4 * len(STATISTICS) * max(width, 1)), 1), MAX_ITERATIONS_AT_ONCE)
    rows = transaction.execute(
        "SELECT iteration FROM iterations WHERE run = (SELECT id FROM runs WHERE name = $1) "
        f"AND iteration BETWEEN $2 AND $3 ORDER BY iteration LIMIT {limit}",
        [run, first, last],
    )
    return [number for (number,) in rows]


def _batch(transaction: Transaction, series: Sequence[tuple], first: int, last: int) -> pa.RecordBatch:
    wanted = {number: place for place, (number, _, _, _) in enumerate(series)}
    low, high = min(wanted), max(wanted)
    table = transaction.table(
        f"SELECT series, iteration, width, {', '.join(columns_of(1))} FROM level_1 "
        "WHERE series BETWEEN $1 AND $2 AND iteration BETWEEN $3 AND $4",
        [low, high, first, last],
    )
    place = np.array([wanted.get(number, -1) for number in table.column("series").to_pylist()], np.int64)
    order = np.lexsort((place, table.column("iteration").to_numpy()))
    order = order[place[order] >= 0]
    rows = Rows(1, table)
    widths = rows.width[order].astype(np.int64)
    total = int(widths.sum())
    columns = {name: np.empty(total, np.int32 if name == "count" else np.float32) for name in STATISTICS}
    begins = np.cumsum(widths) - widths
    for width in np.unique(widths):
        alike = np.flatnonzero(widths == width)
        target = begins[alike][:, None] + np.arange(width)
        for name in STATISTICS:
            read = rows.counts if name == "count" else rows.floats
            columns[name][target] = read(column_of(name, "value", 1), order[alike], int(width))
    names = list(dict.fromkeys(name for _, name, _, _ in series))
    code = np.array([names.index(name) for _, name, _, _ in series], np.int32)[place[order]]
    layer = np.array([layer for _, _, layer, _ in series], np.int32)[place[order]]
    there = columns["count"] > 0
    arrays = [
        pa.array(np.repeat(rows.iteration[order], widths)[there]),
        pa.DictionaryArray.from_arrays(pa.array(np.repeat(code, widths)[there]), pa.array(names, pa.string())),
        pa.array(np.repeat(layer, widths)[there]),
        pa.array((np.arange(total) - np.repeat(begins, widths)).astype(np.int32)[there]),
        *(pa.array(columns[name][there]) for name in STATISTICS),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema())
