"""The store in a file of the server's folder, by DuckDB."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from steptron_metrics.errors import MetricsError
from steptron_metrics.storage import migrate
from steptron_metrics.storage.base import Invalidated
from steptron_metrics.storage.database import Result
from steptron_metrics.storage.rollup import FACTORS
from steptron_metrics.storage.sql_store import SqlStore

FILE = "metrics.duckdb"

# A vector of rows is what DuckDB reads at least, a row group what it writes at least: with rows of hundreds of floats
# its default of 60 vectors in a group would be a gigabyte to write anew at each checkpoint.
_ROW_GROUP = 2048
_CHECKPOINT_BYTES = 64 << 20
_RECENT_BYTES = 128 << 20
_MEMORY_BYTES = 1 << 30
"""DuckDB fills what it may have with what it has read and written, whether that helps or not."""
_SLACK_BYTES = 32 << 20
"""Beside what it writes anew, a checkpoint or a sorting takes up about this at most."""
_CLOSE_SECONDS = 30.0


class _Transaction:
    def __init__(self, connection: Any, appended: Callable[[str, int], None]) -> None:
        self._connection = connection
        self._appended = appended

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        rows: list[tuple] = self._connection.execute(sql, list(parameters)).fetchall()
        return rows

    def execute_many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        self._connection.executemany(sql, [list(row) for row in parameters])

    def table(self, sql: str, parameters: Sequence[object] = ()) -> pa.Table:
        return self._connection.sql(sql, params=list(parameters)).to_arrow_table()

    def append(self, table: str, rows: pa.Table) -> None:
        self._connection.register("incoming", rows)
        try:
            self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")
        finally:
            self._connection.unregister("incoming")
        self._appended(table, rows.nbytes)

    def script(self, text: str) -> None:
        self._connection.execute(text)


class DuckDatabase:
    """A DuckDB file.

    Args:
        path: of the file; made where there is none, unless it is only to be read.
        memory_bytes, threads: what DuckDB may use.
        read_only: for reading when no server runs on it.

    Raises:
        MetricsError: another process has it open, or it is no DuckDB file.
    """

    kind = "duckdb"
    # Also what takes more memory than it may have, which would do so again.
    refusals: tuple[type[Exception], ...] = (duckdb.DataError, duckdb.IntegrityError, duckdb.OutOfMemoryException)

    def __init__(
        self, path: Path, *, memory_bytes: int = _MEMORY_BYTES, threads: int = 2, read_only: bool = False
    ) -> None:
        self.name = str(path)
        self._path = path
        self._read_only = read_only
        self._changed = threading.Condition()
        self._readers = 0
        self._closed = False
        if read_only and not path.is_file():
            raise MetricsError(f"{path}: there is no such database")
        self._connection = duckdb.connect(
            config={
                "memory_limit": f"{memory_bytes >> 20}MiB",
                "threads": threads,
                "temp_directory": f"{path}.tmp",
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "preserve_insertion_order": True,
            }
        )
        quoted = str(path).replace("'", "''")
        options = "READ_ONLY" if read_only else f"ROW_GROUP_SIZE {_ROW_GROUP}"
        try:
            self._connection.execute(f"ATTACH '{quoted}' AS metrics ({options})")
        except duckdb.Error as error:
            self._connection.close()
            raise MetricsError(_cannot_open(path, str(error))) from error
        self._connection.execute("USE metrics")
        self._connection.execute(f"SET checkpoint_threshold = '{_CHECKPOINT_BYTES >> 20}MiB'")
        self._checkpoints = True
        self._recent: dict[int, int] = dict.fromkeys(FACTORS, 0)

    @contextlib.contextmanager
    def read(self) -> Iterator[_Transaction]:
        with self._changed:
            if self._closed:
                raise MetricsError(f"{self.name} is closed")
            cursor = self._connection.cursor()
            self._readers += 1
        try:
            with self._telling():
                cursor.execute("USE metrics")
                cursor.begin()
                try:
                    yield _Transaction(cursor, _nothing)
                finally:
                    cursor.rollback()
        finally:
            cursor.close()
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def write(self, work: Callable[[_Transaction], Result]) -> Result:
        if self._closed:
            raise MetricsError(f"{self.name} is closed")
        if self._read_only:
            raise MetricsError(f"{self.name} is open for reading only")
        with self._telling():
            self._let_checkpoint(self._has_room(self._wal_bytes()))
            self._connection.begin()
            try:
                result = work(_Transaction(self._connection, self._note))
                self._connection.commit()
            except BaseException:
                # After some errors, of a full disk for one, DuckDB has undone it already.
                with contextlib.suppress(duckdb.Error):
                    self._connection.rollback()
                raise
        return result

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """DuckDB's errors of the disk as those of the store."""
        try:
            yield
        except duckdb.Error as error:
            # Also of a checkpoint that failed, which is no fatal error of DuckDB's.
            if isinstance(error, duckdb.FatalException) or "has been invalidated" in str(error):
                raise Invalidated(f"{self.name}: {error}") from error
            if isinstance(error, duckdb.IOException) or "Failed to commit: Could not write" in str(error):
                raise MetricsError(f"{self.name} cannot be written: {error}") from error
            raise

    def _has_room(self, num_bytes: int) -> bool:
        """Whether its disk takes so much more, about."""
        status = os.statvfs(self._path.parent)
        return status.f_bavail * status.f_frsize >= num_bytes + _SLACK_BYTES

    def _wal_bytes(self) -> int:
        try:
            return self._path.with_name(self._path.name + ".wal").stat().st_size
        except FileNotFoundError:
            return 0

    def _let_checkpoint(self, allowed: bool) -> None:
        """A checkpoint writes the log once more before it deletes it. One that the disk has no room for would leave
        the database unusable, where a deletion, which adds little to the log, is still possible."""
        if allowed != self._checkpoints:
            size = f"{_CHECKPOINT_BYTES >> 20}MiB" if allowed else "1TiB"
            self._connection.execute(f"SET checkpoint_threshold = '{size}'")
            self._checkpoints = allowed

    def parts(self, level: int) -> tuple[str, ...]:
        return f"level_{level}_recent", f"level_{level}_history"

    def count_recent(self) -> None:
        """To be called when the tables are there: how much waits for being sorted."""
        for factor in FACTORS:
            with self.read() as transaction:
                items = transaction.execute(f"SELECT coalesce(sum(len(mean_value)), 0) FROM level_{factor}_recent")[0][
                    0
                ]
            self._recent[factor] = int(items) * 4 * (7 if factor == 1 else 19)

    def _note(self, table: str, size: int) -> None:
        for factor in FACTORS:
            if table == self.parts(factor)[0]:
                self._recent[factor] += size

    def tidy(self, thoroughly: bool) -> None:
        for factor, size in self._recent.items():
            if size >= _RECENT_BYTES and self._has_room(2 * size + self._wal_bytes()):
                self._sort(factor)
        if thoroughly and self._has_room(self._wal_bytes()):
            # Gives back what deleted rows took up. With readers at work there is another time.
            with self._telling(), contextlib.suppress(duckdb.TransactionException):
                self._connection.execute("CHECKPOINT metrics")

    def _sort(self, factor: int) -> None:
        recent, history = self.parts(factor)
        self.write(
            lambda transaction: transaction.script(
                f"INSERT INTO {history} SELECT * FROM {recent} ORDER BY series, iteration; DELETE FROM {recent}"
            )
        )
        self._recent[factor] = 0

    def size_bytes(self) -> int:
        size = self._wal_bytes()
        with contextlib.suppress(FileNotFoundError):
            size += self._path.stat().st_size
        return size

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                # Closing ends queries that are at work in the middle: they are let through, for a while.
                self._changed.wait_for(lambda: not self._readers, timeout=_CLOSE_SECONDS)
                if not self._read_only and not self._has_room(self._wal_bytes()):
                    with contextlib.suppress(duckdb.Error):
                        self._connection.execute("PRAGMA disable_checkpoint_on_shutdown")
                self._connection.close()


def open_duckdb(
    path: Path, *, memory_bytes: int = _MEMORY_BYTES, threads: int = 2, read_only: bool = False
) -> SqlStore:
    """The store in a file.

    Args:
        path: made where there is none, unless it is only to be read.
        memory_bytes, threads: what DuckDB may use.
        read_only: changes nothing; for reading when no server runs on it.

    Raises:
        MetricsError: another process has it open, it is no DuckDB file, or its schema is not one that this code knows.
    """
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
    database = DuckDatabase(path, memory_bytes=memory_bytes, threads=threads, read_only=read_only)
    try:
        if read_only:
            migrate.check(database)
        else:
            migrate.migrate(database)
            database.count_recent()
    except BaseException:
        database.close()
        raise
    return SqlStore(database)


def _cannot_open(path: Path, reason: str) -> str:
    if "lock" in reason.lower():
        return (
            f"{path} is in use by another process, a running metrics server for one: read through its address, "
            f"or stop it first ({reason})"
        )
    return f"{path} cannot be opened: {reason}"


def _nothing(table: str, size: int) -> None:
    """Readers append nothing."""
    raise MetricsError(f"{table} is open for reading only")
