"""The store, on any database of :mod:`steptron_metrics.storage.database`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import cast

import numpy as np
import pyarrow as pa

from steptron_metrics.catalogue import Statistic
from steptron_metrics.results import FINISHED, STATISTICS, Aggregate, Alert, Derived, Iteration, MetricInfo, Points, Run
from steptron_metrics.storage.base import Unstorable
from steptron_metrics.storage.database import Database, Transaction
from steptron_metrics.storage.export_rows import aggregate_batches
from steptron_metrics.storage.packing import (
    AGGREGATE,
    DERIVED,
    PLANES,
    Rows,
    column_of,
    columns_of,
    roll_up,
    rows_of,
    stand_in,
    width_of,
)
from steptron_metrics.storage.rollup import FACTORS, Piece, Planes, factor_of, fold, plan, start_of

MAX_MISSING = 100
LAST = 2**63 - 1
_ROWS_AT_ONCE = 16 << 20
_RUNS_CACHED = 16
_OF_RUN = "series IN (SELECT id FROM series WHERE run = $1)"
_RUN = [field.name for field in fields(Run) if field.name not in ("name", "open_alerts", "finished")]
_ALERT = [field.name for field in fields(Alert)]

SeriesKey = tuple[int, str, int]


class SqlStore:
    """See :class:`steptron_metrics.storage.base.Store`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writing = threading.Lock()
        self._series: dict[int, dict[SeriesKey, list[int]]] = {}
        self._cached = True

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, iterations: Sequence[Iteration]) -> None:
        by_run: dict[str, list[Iteration]] = {}
        for iteration in iterations:
            _check(iteration)
            by_run.setdefault(iteration.run, []).append(iteration)
        if not by_run:
            return

        def work(transaction: Transaction) -> None:
            if not self._cached:  # what an attempt before this one found out may have been undone
                self._series.clear()
            self._cached = False
            for run, batch in by_run.items():
                _Batch(transaction, self._database, self._series, run).put(batch)

        with self._writing:
            self._database.write(work)
            self._cached = True
            while len(self._series) > _RUNS_CACHED:
                self._series.pop(next(iter(self._series)))
            self._database.tidy(thoroughly=False)

    def put_alerts(self, alerts: Sequence[Alert]) -> None:
        if not alerts:
            return
        names = ", ".join(_ALERT)
        places = ", ".join(f"${place}" for place in range(1, len(_ALERT) + 1))
        new = ", ".join(f"{name} = excluded.{name}" for name in _ALERT if name not in ("run", "number"))
        sql = f"INSERT INTO alerts ({names}) VALUES ({places}) ON CONFLICT (run, number) DO UPDATE SET {new}"
        # Of an alert that is given twice the later one counts.
        latest = {(alert.run, alert.number): [_plain(getattr(alert, name)) for name in _ALERT] for alert in alerts}
        rows = list(latest.values())
        with self._writing:
            self._database.write(lambda transaction: transaction.execute_many(sql, rows))

    def delete(self, run: str) -> None:
        def work(transaction: Transaction) -> None:
            self._series.clear()
            transaction.execute("DELETE FROM alerts WHERE run = $1", [run])
            for (number,) in transaction.execute("SELECT id FROM runs WHERE name = $1", [run]):
                for factor in FACTORS:
                    for part in self._database.parts(factor):
                        transaction.execute(f"DELETE FROM {part} WHERE {_OF_RUN}", [number])
                for table in ("series", "events", "iterations", "sessions"):
                    transaction.execute(f"DELETE FROM {table} WHERE run = $1", [number])
                transaction.execute("DELETE FROM runs WHERE id = $1", [number])

        with self._writing:
            self._database.write(work)
            self._database.tidy(thoroughly=True)

    # ------------------------------------------------------------------------------------------------------- reading

    def stored(self, run: str) -> dict[tuple[int, int], int]:
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT session_ns, iteration, num_ranks FROM iterations "
                "WHERE run = (SELECT id FROM runs WHERE name = $1)",
                [run],
            )
        return {(session_ns, iteration): num_ranks for session_ns, iteration, num_ranks in rows}

    def runs(self) -> list[Run]:
        columns = ", ".join(_RUN)
        with self._database.read() as transaction:
            rows = transaction.execute(
                f"SELECT name, {columns}, "
                "(SELECT count(*) FROM alerts WHERE alerts.run = runs.name AND ended_iteration IS NULL), "
                "EXISTS (SELECT 1 FROM events WHERE events.run = runs.id AND iteration = last_iteration AND kind = $1) "
                "FROM runs ORDER BY last_ended_ns DESC, name",
                [FINISHED],
            )
        return [Run(row[0], **dict(zip([*_RUN, "open_alerts", "finished"], row[1:], strict=True))) for row in rows]

    def metrics(self, run: str) -> list[MetricInfo]:
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT name, layer, width FROM series WHERE run = $1 AND kind = $2 ORDER BY name, layer",
                [_find(transaction, run)[0], AGGREGATE],
            )
        layers: dict[str, list[int]] = {}
        items: dict[str, int] = {}
        for name, layer, width in rows:
            layers.setdefault(name, []).append(layer)
            items[name] = max(items.get(name, 0), width)
        return [MetricInfo(name, tuple(layers[name]), items[name]) for name in layers]

    def derived_names(self, run: str) -> list[str]:
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT name FROM series WHERE run = $1 AND kind = $2 ORDER BY name",
                [_find(transaction, run)[0], DERIVED],
            )
        return [name for (name,) in rows]

    def iterations(self, run: str, first: int, last: int) -> pa.Table:
        with self._database.read() as transaction:
            return transaction.table(
                "SELECT iteration, session_ns, world_size, num_ranks, missing, ended_ns, seconds, consumed_tokens, "
                "dropped FROM iterations WHERE run = $1 AND iteration BETWEEN $2 AND $3 ORDER BY iteration",
                [_find(transaction, run)[0], *_range(first, last)],
            )

    def numbers(self, run: str, first: int, last: int, most: int) -> list[int]:
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT iteration FROM iterations WHERE run = $1 AND iteration BETWEEN $2 AND $3 "
                f"ORDER BY iteration LIMIT {int(most)}",
                [_find(transaction, run)[0], *_range(first, last)],
            )
        return [number for (number,) in rows]

    def events(self, run: str, first: int, last: int) -> pa.Table:
        with self._database.read() as transaction:
            return transaction.table(
                "SELECT iteration, kind, detail FROM events "
                "WHERE run = $1 AND iteration BETWEEN $2 AND $3 ORDER BY iteration, number",
                [_find(transaction, run)[0], *_range(first, last)],
            )

    def points(
        self, run: str, metric: str, layer: int, statistic: Statistic, first: int, last: int, max_points: int
    ) -> Points:
        return self._points(run, (AGGREGATE, metric, layer), statistic, first, last, max_points)[0]

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        points, there = self._points(run, (DERIVED, name, -1), "mean", first, last, max_points)
        return Points(
            points.first,
            points.last,
            points.values[:, there],
            points.low[:, there],
            points.high[:, there],
            (np.flatnonzero(there) - 1).astype(np.int32),
        )

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        with self._database.read() as transaction:
            _find(transaction, run)
        return aggregate_batches(self._database, run, metrics, *_range(first, last))

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        conditions = ["run = $1"] if run is not None else []
        conditions += ["ended_iteration IS NULL"] if open_only else []
        where = "WHERE " + " AND ".join(conditions) if conditions else ""
        with self._database.read() as transaction:
            rows = transaction.execute(
                f"SELECT {', '.join(_ALERT)} FROM alerts {where} ORDER BY since_ns DESC, number DESC",
                [] if run is None else [run],
            )
            if run is not None and not rows:
                _find(transaction, run)
        return [Alert(**dict(zip(_ALERT, row, strict=True))) for row in rows]

    def refuses(self, error: Exception) -> bool:
        # Those of Python come of making rows from it.
        return isinstance(
            error, (*self._database.refusals, Unstorable, ValueError, TypeError, ArithmeticError, LookupError)
        )

    def size_bytes(self) -> int:
        return self._database.size_bytes()

    def close(self) -> None:
        with self._writing:
            self._database.close()

    def _points(
        self, run: str, key: SeriesKey, statistic: str, first: int, last: int, max_points: int
    ) -> tuple[Points, np.ndarray]:
        """Points, and bool [items] which items have samples in any of them."""
        if statistic not in STATISTICS:
            raise ValueError(f"statistic {statistic!r} is none of {', '.join(STATISTICS)}")
        if max_points < 1:
            raise ValueError(f"max_points {max_points}: expected at least 1")
        with self._database.read() as transaction:
            number, stored_first, stored_last = _find(transaction, run)
            found = transaction.execute(
                "SELECT id, width FROM series WHERE run = $1 AND kind = $2 AND name = $3 AND layer = $4", [number, *key]
            )
            first, last = max(first, stored_first), min(last, stored_last)
            if not found or first > last:
                return _empty(found[0][1] if found else 0)
            series, width = found[0]
            factor = factor_of(first, last, max_points)
            step = max(_ROWS_AT_ONCE // (width * min(factor, FACTORS[1])), 1) * factor
            parts = []
            begin = first
            while begin <= last:
                end = min(start_of(begin, factor) + step - 1, last)
                pieces = plan(begin, end, stored_last, factor)
                parts.append(_read(transaction, series, width, statistic, pieces, factor, key[0] == DERIVED))
                begin = end + 1
        bucket = np.concatenate([part[0] for part in parts])
        value, low, high = (np.concatenate([getattr(part[1], plane) for part in parts]) for plane in PLANES)
        there = np.any([part[2] for part in parts], axis=0)
        points = Points(np.maximum(bucket, first), np.minimum(bucket + factor - 1, last), value, low, high)
        return points, there


class _Batch:
    """Iterations of one run on their way into the database."""

    def __init__(
        self, transaction: Transaction, database: Database, series: dict[int, dict[SeriesKey, list[int]]], run: str
    ) -> None:
        self._transaction = transaction
        self._database = database
        self._name = run
        found = transaction.execute(
            "SELECT id, first_iteration, last_iteration, iterations, partial FROM runs WHERE name = $1", [run]
        )
        self._new = not found
        if found:
            self._run, self._old_first, self._old_last, self._number, self._partial = found[0]
        else:
            self._run = transaction.execute("SELECT coalesce(max(id), 0) + 1 FROM runs")[0][0]
            self._old_first, self._old_last, self._number, self._partial = LAST, 0, 0, 0
        self._sessions: dict[int, int] = dict(
            cast(
                "list[tuple[int, int]]",
                transaction.execute("SELECT session_ns, first_iteration FROM sessions WHERE run = $1", [self._run]),
            )
        )
        self._cache = series
        self._waiting: dict[int, Iteration] = {}
        self._touched: set[int] = set()
        self._removed = False

    def put(self, batch: Sequence[Iteration]) -> None:
        for iteration in batch:
            self._put(iteration)
        if not self._waiting:
            return
        for table in self._rows():
            self._transaction.append(self._database.parts(1)[0], table)
        last = self._summarise()
        self._roll_up(last)

    def _put(self, new: Iteration) -> None:
        later = [first for session, first in self._sessions.items() if session > new.session_ns]
        if later and new.iteration >= min(later):
            return
        stored = self._transaction.execute(
            "SELECT session_ns, num_ranks FROM iterations WHERE run = $1 AND iteration = $2", [self._run, new.iteration]
        )
        if stored and stored[0][0] == new.session_ns:
            if stored[0][1] >= new.num_ranks:
                return
            self._remove(new.iteration, new.iteration)
        if new.iteration < self._sessions.get(new.session_ns, LAST):
            # What earlier sessions have from here on ends where this session, or a later one, begins.
            end = min([first for session, first in self._sessions.items() if session >= new.session_ns], default=LAST)
            self._remove(new.iteration, end - 1)
            self._begin_session(new)
        self._transaction.execute(
            "INSERT INTO iterations VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            [
                self._run,
                new.iteration,
                new.session_ns,
                new.world_size,
                new.num_ranks,
                [int(rank) for rank in new.missing[:MAX_MISSING]],
                new.ended_ns,
                float(new.seconds),
                new.consumed_tokens,
                new.dropped,
            ],
        )
        if new.events:
            self._transaction.execute_many(
                "INSERT INTO events VALUES ($1, $2, $3, $4, $5)",
                [
                    [self._run, new.iteration, number, _text(event.kind), _text(event.detail)]
                    for number, event in enumerate(new.events)
                ],
            )
        self._waiting[new.iteration] = new
        self._touched.add(start_of(new.iteration, FACTORS[1]))

    def _begin_session(self, new: Iteration) -> None:
        if new.session_ns in self._sessions:
            self._transaction.execute(
                "UPDATE sessions SET first_iteration = $3 WHERE run = $1 AND session_ns = $2",
                [self._run, new.session_ns, new.iteration],
            )
        else:
            self._transaction.execute(
                "INSERT INTO sessions VALUES ($1, $2, $3)", [self._run, new.session_ns, new.iteration]
            )
        self._sessions[new.session_ns] = new.iteration

    def _remove(self, first: int, last: int) -> None:
        removed = self._transaction.execute(
            "SELECT count(*) FROM iterations WHERE run = $1 AND iteration BETWEEN $2 AND $3", [self._run, first, last]
        )[0][0]
        if not removed:
            return
        for table in ("iterations", "events"):
            self._transaction.execute(
                f"DELETE FROM {table} WHERE run = $1 AND iteration BETWEEN $2 AND $3", [self._run, first, last]
            )
        for factor in FACTORS:
            for part in self._database.parts(factor):
                self._transaction.execute(
                    f"DELETE FROM {part} WHERE {_OF_RUN} AND iteration BETWEEN $2 AND $3",
                    [self._run, start_of(first, factor), last],
                )
        self._waiting = {number: new for number, new in self._waiting.items() if not first <= number <= last}
        self._touched |= {start_of(first, FACTORS[1]), start_of(last, FACTORS[1])}
        self._removed = True

    def _rows(self) -> Iterator[pa.Table]:
        known = self._known_series()
        entries: list[tuple[SeriesKey, int, Aggregate | Derived]] = []
        widths: dict[SeriesKey, int] = {}
        for iteration in self._waiting.values():
            everything: list[Aggregate | Derived] = [*iteration.aggregates, *iteration.derived]
            for found in everything:
                key = (
                    (AGGREGATE, found.metric, found.layer)
                    if isinstance(found, Aggregate)
                    else (DERIVED, found.name, -1)
                )
                width = width_of(found)
                if width:
                    entries.append((key, iteration.iteration, found))
                    widths[key] = max(widths.get(key, 0), width)
        new = [key for key in widths if key not in known]
        if new:
            last = self._transaction.execute("SELECT coalesce(max(id), 0) FROM series")[0][0]
            for number, key in enumerate(new, last + 1):
                known[key] = [number, widths[key]]
            self._transaction.execute_many(
                "INSERT INTO series VALUES ($1, $2, $3, $4, $5, $6)",
                [[known[key][0], self._run, *key, widths[key]] for key in new],
            )
        for key, width in widths.items():
            if width > known[key][1]:
                known[key][1] = width
                self._transaction.execute("UPDATE series SET width = $2 WHERE id = $1", [known[key][0], width])
        return rows_of([(known[key][0], iteration, found) for key, iteration, found in entries])

    def _known_series(self) -> dict[SeriesKey, list[int]]:
        if self._run not in self._cache:
            self._cache[self._run] = {
                (kind, name, layer): [number, width]
                for number, kind, name, layer, width in self._transaction.execute(
                    "SELECT id, kind, name, layer, width FROM series WHERE run = $1", [self._run]
                )
            }
        return self._cache[self._run]

    def _summarise(self) -> int:
        """Brings the run's row up to date; the run's last iteration."""
        if self._removed:
            first, last, number, partial = self._transaction.execute(
                "SELECT min(iteration), max(iteration), count(*), count(*) FILTER (WHERE num_ranks < world_size) "
                "FROM iterations WHERE run = $1",
                [self._run],
            )[0]
        else:
            first, last = min(self._old_first, *self._waiting), max(self._old_last, *self._waiting)
            number = self._number + len(self._waiting)
            partial = self._partial + sum(new.num_ranks < new.world_size for new in self._waiting.values())
        world_size, consumed_tokens, ended_ns = self._transaction.execute(
            "SELECT world_size, consumed_tokens, ended_ns FROM iterations WHERE run = $1 AND iteration = $2",
            [self._run, last],
        )[0]
        row = {
            "first_iteration": first,
            "last_iteration": last,
            "iterations": number,
            "partial": partial,
            "world_size": world_size,
            "consumed_tokens": consumed_tokens,
            "started_ns": min(self._sessions),
            "last_ended_ns": ended_ns,
        }
        if self._new:
            names = ", ".join(row)
            places = ", ".join(f"${place}" for place in range(3, len(row) + 3))
            self._transaction.execute(
                f"INSERT INTO runs (id, name, {names}) VALUES ($1, $2, {places})",
                [self._run, self._name, *row.values()],
            )
        else:
            new = ", ".join(f"{name} = ${place}" for place, name in enumerate(row, 2))
            self._transaction.execute(f"UPDATE runs SET {new} WHERE id = $1", [self._run, *row.values()])
        return int(last)

    def _roll_up(self, last: int) -> None:
        """Each bucket is rolled up that ends with the run's last iteration or before it, and no other."""
        touched = self._touched | ({start_of(self._old_last, FACTORS[1])} if self._old_last else set())
        for finer, coarser in itertools.pairwise(FACTORS):
            touched = {start_of(first, coarser) for first in touched}
            if self._old_last:
                touched.add(start_of(self._old_last, coarser))
            for first in sorted(touched):
                end = first + coarser - 1
                if end <= self._old_last:
                    for part in self._database.parts(coarser):
                        self._transaction.execute(
                            f"DELETE FROM {part} WHERE {_OF_RUN} AND iteration = $2", [self._run, first]
                        )
                if end > last:
                    continue
                names = ["series", "iteration", "width", *columns_of(finer), *(["iterations"] if finer > 1 else [])]
                table = self._transaction.table(
                    f"SELECT {', '.join(names)} FROM level_{finer} WHERE {_OF_RUN} AND iteration BETWEEN $2 AND $3",
                    [self._run, first, end],
                )
                if len(table):
                    for rows in roll_up(table, finer, coarser, first):
                        self._transaction.append(self._database.parts(coarser)[0], rows)


def _find(transaction: Transaction, run: str) -> tuple[int, int, int]:
    """Number, first and last iteration of a run."""
    found = transaction.execute("SELECT id, first_iteration, last_iteration FROM runs WHERE name = $1", [run])
    if not found:
        raise KeyError(run)
    return cast("tuple[int, int, int]", found[0])


def _range(first: int, last: int) -> tuple[int, int]:
    """What a database takes of any two integers."""
    return min(max(first, 0), LAST), min(max(last, 0), LAST)


def _empty(width: int) -> tuple[Points, np.ndarray]:
    nothing = np.empty((0, width), np.float32)
    none = np.empty(0, np.int64)
    return Points(none, none, nothing, nothing, nothing), np.zeros(width, bool)


def _read(
    transaction: Transaction,
    series: int,
    width: int,
    statistic: str,
    pieces: Sequence[Piece],
    factor: int,
    with_samples: bool,
) -> tuple[np.ndarray, Planes, np.ndarray]:
    """First iterations of buckets, int64 [P], their statistic, and bool [items] which have samples, where asked for."""
    with_samples = with_samples or (factor > 1 and statistic in ("mean", "rms"))
    all_rows = []
    for piece in pieces:
        rows = Rows(piece.factor, _rows_of_piece(transaction, series, statistic, piece, with_samples))
        number = np.arange(len(rows.iteration))
        samples = rows.counts("count_value", number, width) if with_samples else np.empty((len(number), 0), np.int32)
        all_rows.append((rows.iteration, rows.iterations, rows.planes(statistic, number, width), samples))
    iteration = np.concatenate([part[0] for part in all_rows])
    value, low, high = (np.concatenate([getattr(part[2], plane) for part in all_rows]) for plane in PLANES)
    samples = np.concatenate([part[3] for part in all_rows])
    there: np.ndarray = np.any(samples > 0, axis=0) if with_samples else np.ones(width, bool)
    if factor == 1 or not len(iteration):
        return iteration, Planes(value, low, high), there
    bucket = (iteration - 1) // factor * factor + 1
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    iterations = np.concatenate([part[1] for part in all_rows])
    folded = fold(statistic, starts, Planes(value, low, high), iterations, samples if with_samples else None)
    return bucket[starts], folded, there


def _rows_of_piece(transaction: Transaction, series: int, statistic: str, piece: Piece, with_samples: bool) -> pa.Table:
    fixed = ["iteration", "width", *(["iterations"] if piece.factor > 1 else [])]
    wanted = list(dict.fromkeys(column_of(statistic, plane, piece.factor) for plane in PLANES))
    if with_samples and "count_value" not in wanted:
        wanted.append("count_value")

    def select(columns: Sequence[str]) -> pa.Table:
        return transaction.table(
            f"SELECT {', '.join(columns)} FROM level_{piece.factor} "
            "WHERE series = $1 AND iteration BETWEEN $2 AND $3 ORDER BY iteration",
            [series, piece.first, piece.last],
        )

    table = select([*fixed, *wanted])
    missing = {stand_in(name, piece.factor) for name in wanted if table.column(name).null_count} - set(wanted)
    if missing:
        # In the same state of the database, so the rows are the same ones.
        others = select(sorted(missing))
        for name in others.column_names:
            table = table.append_column(name, others.column(name))
    return table


def _plain(value: object) -> object:
    """A value that both databases take."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, np.generic):
        return value.item()
    return value


def _text(text: str) -> str:
    """Text as both databases take it: without NUL and lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _check(new: Iteration) -> None:
    for name in ("session_ns", "iteration", "ended_ns", "consumed_tokens", "dropped"):
        low, high = (1, LAST - 1) if name == "iteration" else (0, LAST)
        value = getattr(new, name)
        if not low <= value <= high:
            raise Unstorable(
                f"run {new.run!r}, iteration {new.iteration}: {name} {value} is not within {low} and {high}"
            )
    for one in new.aggregates:
        if one.values.ndim != 2 or one.values.shape[0] != len(STATISTICS):
            raise Unstorable(
                f"run {new.run!r}, iteration {new.iteration}: {one.metric} of layer {one.layer} has shape "
                f"{one.values.shape}, expected [{len(STATISTICS)}, items]"
            )
    for figure in new.derived:
        if not len(figure.layers) == len(figure.values) == len(figure.items) or (figure.layers < -1).any():
            raise Unstorable(
                f"run {new.run!r}, iteration {new.iteration}: {figure.name} needs as many values and items as layers, "
                "and layers from -1"
            )
