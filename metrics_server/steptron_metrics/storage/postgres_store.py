"""The store in a PostgreSQL database, in a schema of its own."""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import ByteaBinaryLoader

from steptron_metrics.errors import MetricsError
from steptron_metrics.storage import migrate
from steptron_metrics.storage.database import Result
from steptron_metrics.storage.rollup import FACTORS
from steptron_metrics.storage.sql_store import SqlStore

SCHEMA = "steptron_metrics"
READERS = 8
CONNECT_SECONDS = 5
READER_WAIT_SECONDS = 60.0
ATTEMPTS = 3
PATIENCE_SECONDS = 5.0
LOCK_WAIT_SECONDS = 15.0

# Of the advisory lock that the one server holds which writes: "metrics" in ASCII.
_LOCK = int.from_bytes(b"metrics", "big")
_INT4_ARRAY, _FLOAT4_ARRAY = 1007, 1021
_ELEMENTS = {_INT4_ARRAY: (23, ">i4"), _FLOAT4_ARRAY: (700, ">f4")}
_ARROW = {16: pa.bool_(), 20: pa.int64(), 23: pa.int32(), 25: pa.string(), 700: pa.float32(), 701: pa.float64()}
_LISTS = {_INT4_ARRAY: pa.int32(), _FLOAT4_ARRAY: pa.float32()}
_ARRAY_HEADER = struct.Struct(">5i")  # dimensions, has NULLs, type of elements, length, lower bound
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = struct.pack(">h", -1)


class _Transaction:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        with psycopg.RawCursor(self._connection) as cursor:
            cursor.execute(sql.encode(), list(parameters))
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        with psycopg.RawCursor(self._connection) as cursor:
            cursor.executemany(sql.encode(), [list(row) for row in parameters])

    def table(self, sql: str, parameters: Sequence[object] = ()) -> pa.Table:
        with psycopg.RawCursor(self._connection) as cursor:
            # Arrays as the bytes that come, to be made an array of all rows together.
            for kind in _LISTS:
                cursor.adapters.register_loader(kind, ByteaBinaryLoader)
            cursor.execute(sql.encode(), list(parameters), binary=True)
            about = cursor.description or []
            columns = list(zip(*cursor.fetchall(), strict=True)) or [()] * len(about)
        return pa.table(
            {
                column.name: _lists(values, column.type_code)
                if column.type_code in _LISTS
                else pa.array(values, _ARROW[column.type_code])
                for column, values in zip(about, columns, strict=True)
            }
        )

    def append(self, table: str, rows: pa.Table) -> None:
        if not len(rows):
            return
        names = ", ".join(rows.column_names)
        with (
            self._connection.cursor() as cursor,
            cursor.copy(f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)".encode()) as copy,
        ):
            copy.write(_COPY_HEADER)
            for content in _copy_rows(rows):
                copy.write(content)
            copy.write(_COPY_END)

    def script(self, text: str) -> None:
        self._connection.execute(text.encode())


def _lists(values: Sequence[bytes | None], kind: int) -> pa.Array:
    """A column of arrays in PostgreSQL's binary form."""
    _, element = _ELEMENTS[kind]
    null = np.array([value is None for value in values], bool)
    sizes = np.array([0 if value is None else len(value) for value in values], np.int64)
    # Each element has its length in front of it. An empty array has no dimension, and a shorter header.
    lengths = np.maximum(sizes - _ARRAY_HEADER.size, 0) // 8
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.empty(int(offsets[-1]), element[1:])
    for size in np.unique(sizes[lengths > 0]):
        rows = np.flatnonzero(sizes == size)
        content = np.frombuffer(b"".join(values[row] or b"" for row in rows.tolist()), np.uint8).reshape(
            len(rows), size
        )
        elements = np.ascontiguousarray(content[:, _ARRAY_HEADER.size :]).view(element).reshape(len(rows), -1, 2)
        flat[offsets[rows][:, None] + np.arange(elements.shape[1])] = elements[:, :, 1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, _LISTS[kind]), mask=pa.array(null))


def _copy_rows(table: pa.Table) -> Iterator[bytes]:
    """Rows in the binary form of COPY; those of the same lengths together, as one structured array."""
    columns = [pa.concat_arrays(column.chunks) for column in table.columns]
    lengths = np.zeros((len(table), len(columns)), np.int64)
    for place, column in enumerate(columns):
        if pa.types.is_list(column.type):
            lengths[:, place] = np.diff(column.offsets.to_numpy())
            lengths[column.is_null().to_numpy(zero_copy_only=False), place] = -1
    shapes, group = np.unique(lengths, axis=0, return_inverse=True)
    group = group.reshape(-1)
    for number, shape in enumerate(shapes):
        rows = np.flatnonzero(group == number)
        parts: list[tuple[str, object]] = [("fields", ">i2")]
        for place, column in enumerate(columns):
            parts.append((f"size{place}", ">i4"))
            if not pa.types.is_list(column.type):
                parts.append((f"value{place}", {pa.int32(): ">i4", pa.int64(): ">i8"}[column.type]))
            elif shape[place] >= 0:
                _, element = _ELEMENTS[_INT4_ARRAY if column.type.value_type == pa.int32() else _FLOAT4_ARRAY]
                parts.append((f"header{place}", (">i4", (5 if shape[place] else 3,))))
                parts.append((f"list{place}", (np.dtype([("size", ">i4"), ("value", element)]), (int(shape[place]),))))
        block = np.zeros(len(rows), np.dtype(parts))
        block["fields"] = len(columns)
        for place, column in enumerate(columns):
            if not pa.types.is_list(column.type):
                block[f"value{place}"] = column.to_numpy()[rows]
                block[f"size{place}"] = column.type.bit_width // 8
            elif shape[place] < 0:
                block[f"size{place}"] = -1
            else:
                length = int(shape[place])
                kind = _INT4_ARRAY if column.type.value_type == pa.int32() else _FLOAT4_ARRAY
                header = (1, 0, _ELEMENTS[kind][0], length, 1) if length else (0, 0, _ELEMENTS[kind][0])
                block[f"header{place}"] = header
                block[f"size{place}"] = 4 * len(header) + 8 * length
                starts = column.offsets.to_numpy()[rows].astype(np.int64)
                values = column.values.to_numpy(zero_copy_only=False)
                block[f"list{place}"]["size"] = 4
                block[f"list{place}"]["value"] = values[starts[:, None] + np.arange(length)]
        yield block.tobytes()


class PostgresDatabase:
    """A PostgreSQL database.

    Args:
        url: ``postgresql://user:password@host:port/database``.
        read_only: for reading beside a server that writes, or without one.
        attempts: how often it is tried to reach the server, with growing pauses, a second or two together ...
        patience: ... but no more once so many seconds are over. Who can wait longer tries again.

    Raises:
        MetricsError: it is out of reach, or another metrics server writes to it.
    """

    kind = "postgres"
    refusals: tuple[type[Exception], ...] = (
        psycopg.DataError,
        psycopg.IntegrityError,
        psycopg.errors.ProgramLimitExceeded,
    )

    def __init__(
        self, url: str, *, read_only: bool = False, attempts: int = ATTEMPTS, patience: float = PATIENCE_SECONDS
    ) -> None:
        try:
            parameters = conninfo_to_dict(url)
        except psycopg.Error as error:
            raise MetricsError(
                f"the database's URL is not one of PostgreSQL's, postgresql://user@host/database: {error}"
            ) from error
        host, port = parameters.get("host") or "the local socket", parameters.get("port")
        self.name = f"PostgreSQL database {parameters.get('dbname') or 'of the user'} at {host}" + (
            f":{port}" if port else ""
        )
        defaults: dict[str, str | int] = {
            "connect_timeout": CONNECT_SECONDS,
            "application_name": "steptron-metrics",
            "tcp_user_timeout": 30_000,
            "keepalives_idle": 30,
        }
        self._conninfo = make_conninfo(
            url, **{name: value for name, value in defaults.items() if name not in parameters}
        )
        self._attempts = attempts
        self._patience = patience
        self._read_only = read_only
        self._closed = False
        self._idle: queue.LifoQueue[psycopg.Connection] = queue.LifoQueue()
        self._readers = threading.BoundedSemaphore(READERS)
        self._writer: psycopg.Connection | None = None
        if read_only:
            with self.read():
                pass
        else:
            self._again(self._connected_writer)

    # ------------------------------------------------------------------------------------------------- connections

    def _connect(self) -> psycopg.Connection:
        connection = psycopg.connect(self._conninfo, autocommit=True)
        connection.execute(f"SET search_path TO {SCHEMA}")
        connection.execute("SET lock_timeout = '60s'")
        return connection

    def _connected_writer(self) -> psycopg.Connection:
        if self._writer is not None and not self._writer.closed:
            return self._writer
        self._writer = None
        connection = self._connect()
        try:
            self._take_lock(connection)
            if connection.execute("SELECT to_regnamespace(%s)", [SCHEMA]).fetchone() == (None,):
                connection.execute(f"CREATE SCHEMA {SCHEMA}")
            connection.execute("SET synchronous_commit TO on")
        except BaseException:
            connection.close()
            raise
        self._writer = connection
        return connection

    def _take_lock(self, connection: psycopg.Connection) -> None:
        """One server writes to a database; its lock ends with its connection, soon after a process was killed."""
        end = time.monotonic() + LOCK_WAIT_SECONDS
        while connection.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchone() != (True,):
            if time.monotonic() > end:
                raise MetricsError(
                    f"another metrics server writes to the {self.name}: stop it, or give this one a database of its own"
                )
            time.sleep(0.2)

    def _again(self, action: Callable[[], Result]) -> Result:
        """Does it, and again when the connection is lost."""
        begin = time.monotonic()
        for attempt in range(1, self._attempts + 1):
            try:
                return action()
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if isinstance(error, self.refusals):
                    raise
                if isinstance(error, (psycopg.errors.DiskFull, psycopg.errors.LockNotAvailable)):
                    raise MetricsError(f"{self.name}: {error}") from error
                late = time.monotonic() - begin >= self._patience
                if self._closed or late or attempt == self._attempts:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    raise MetricsError(f"{self.name} cannot be reached, tried {times}: {error}") from error
                time.sleep(min(0.25 * 2**attempt, 10.0))
        raise AssertionError("unreachable")

    # ------------------------------------------------------------------------------------------------ transactions

    @contextlib.contextmanager
    def read(self) -> Iterator[_Transaction]:
        if self._closed:
            raise MetricsError(f"{self.name} is closed")
        if not self._readers.acquire(timeout=READER_WAIT_SECONDS):
            raise MetricsError(f"{self.name}: {READERS} readers were at work for {READER_WAIT_SECONDS:g} s")
        try:
            connection = self._again(self._begin_reading)
            try:
                yield _Transaction(connection)
                connection.execute("COMMIT")
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                connection.close()
                raise MetricsError(f"{self.name} failed while it was read: {error}") from error
            except BaseException:
                connection.close()
                raise
            if self._closed:
                connection.close()
            else:
                self._idle.put(connection)
        finally:
            self._readers.release()

    def _begin_reading(self) -> psycopg.Connection:
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = self._connect()
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except BaseException:
            connection.close()
            self._close_idle()  # those of a server that was restarted are as dead
            raise
        return connection

    def write(self, work: Callable[[_Transaction], Result]) -> Result:
        def attempt() -> Result:
            connection = self._connected_writer()
            try:
                with connection.transaction():
                    return work(_Transaction(connection))
            except (psycopg.OperationalError, psycopg.InterfaceError):
                connection.close()
                raise

        if self._closed:
            raise MetricsError(f"{self.name} is closed")
        if self._read_only:
            raise MetricsError(f"{self.name} is open for reading only")
        return self._again(attempt)

    def parts(self, level: int) -> tuple[str, ...]:
        return (f"level_{level}",)

    def tidy(self, thoroughly: bool) -> None:
        """PostgreSQL's autovacuum does it."""

    def size_bytes(self) -> int:
        tables = [f"level_{factor}" for factor in FACTORS] + [
            "iterations",
            "events",
            "series",
            "alerts",
            "sessions",
            "runs",
        ]
        with self.read() as transaction:
            sizes = ", ".join(f"pg_total_relation_size('{SCHEMA}.{table}')" for table in tables)
            return int(sum(transaction.execute(f"SELECT {sizes}")[0]))

    def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def open_postgres(
    url: str, *, read_only: bool = False, attempts: int = ATTEMPTS, patience: float = PATIENCE_SECONDS
) -> SqlStore:
    """The store in a PostgreSQL database.

    Args:
        url: ``postgresql://user:password@host:port/database``.
        read_only: changes nothing, and may be used beside the server that writes.
        attempts, patience: how often it is tried to reach the server, and for how many seconds.

    Raises:
        MetricsError: it is out of reach, another metrics server writes to it, or its schema is not one that this code
            knows.
    """
    database = PostgresDatabase(url, read_only=read_only, attempts=attempts, patience=patience)
    try:
        if read_only:
            migrate.check(database)
        else:
            migrate.migrate(database)
    except BaseException:
        database.close()
        raise
    return SqlStore(database)
