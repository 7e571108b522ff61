from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psycopg
import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.results import Aggregate, Iteration
from steptron_metrics.settings import Settings
from steptron_metrics.storage import migrate, open_store
from steptron_metrics.storage.duckdb_store import open_duckdb
from steptron_metrics.storage.postgres_store import open_postgres
from tests.metrics_server import postgres
from tests.metrics_server.storage.conftest import Place
from tests.metrics_server.storage.made import iteration


def migrations(place: Place, folder: Path, second: str) -> Path:
    """The true first migration and a second one."""
    folder.mkdir()
    shutil.copy(migrate.FOLDER / f"{place.kind}_0001.sql", folder)
    (folder / f"{place.kind}_0002.sql").write_text(second)
    return folder


SECOND = "CREATE TABLE notes (run INTEGER NOT NULL, note VARCHAR(9)); ALTER TABLE runs ADD COLUMN note VARCHAR(9);"


def test_a_database_is_brought_up_to_date_with_what_is_in_it(place: Place, tmp_path: Path) -> None:
    store = place.open()
    store.put([iteration(1)])
    database = store._database
    assert migrate.version_of(database) == 1
    folder = migrations(place, tmp_path / "migrations", SECOND)
    with pytest.raises(MetricsError, match=r"version 1, and this is for version 2"):
        migrate.check(database, folder)
    assert migrate.migrate(database, folder) == 2
    assert migrate.version_of(database) == 2
    assert migrate.migrate(database, folder) == 2
    with database.read() as transaction:
        assert transaction.execute("SELECT name, note FROM runs") == [("run", None)]
        assert transaction.execute("SELECT version FROM schema_version ORDER BY version") == [(1,), (2,)]


def test_a_schema_that_is_newer_is_refused(place: Place, tmp_path: Path) -> None:
    store = place.open()
    migrate.migrate(store._database, migrations(place, tmp_path / "migrations", SECOND))
    store.close()
    for read_only in (False, True):
        with pytest.raises(MetricsError, match=r"schema version 2, .* version(s up to)? 1: install .*newer"):
            place.open(read_only=read_only)


def test_a_migration_that_fails_leaves_everything_as_it_was(place: Place, tmp_path: Path) -> None:
    store = place.open()
    store.put([iteration(1)])
    broken = SECOND + "DELETE FROM runs; SELECT * FROM no_such_table;"
    with pytest.raises(MetricsError, match=r"migration 2 failed and was undone.*no_such_table"):
        migrate.migrate(store._database, migrations(place, tmp_path / "migrations", broken))
    assert migrate.version_of(store._database) == 1
    with store._database.read() as transaction:
        found = transaction.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = 'notes'")
    assert found == [(0,)]
    store.put([iteration(2)])
    assert len(store.stored("run")) == 2


def test_migrations_are_numbered_without_gaps(tmp_path: Path) -> None:
    (tmp_path / "duckdb_0002.sql").write_text("")
    with pytest.raises(MetricsError, match="without gaps"):
        migrate.scripts("duckdb", tmp_path)
    assert len(migrate.scripts("duckdb")) == len(migrate.scripts("postgres"))


OPENS = """
import sys
from pathlib import Path
from steptron_metrics.errors import MetricsError
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store
kind, where, read_only = sys.argv[1:]
settings = Settings(Path(where).parent) if kind == "duckdb" else Settings(Path("."), database=where)
try:
    print(len(open_store(settings, read_only=read_only == "yes").runs()))
except MetricsError as error:
    print("refused:", error)
"""


def opened_elsewhere(place: Place, read_only: bool) -> str:
    command = [sys.executable, "-c", OPENS, place.kind, place.where, "yes" if read_only else "no"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_second_server_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    store.put([iteration(1)])
    if place.kind == "duckdb":
        refused = opened_elsewhere(place, read_only=False)
        assert refused.startswith("refused: ") and f"{place.where} is in use by another process" in refused
        assert "in use by another process" in opened_elsewhere(place, read_only=True)
    else:
        monkeypatch.setattr("steptron_metrics.storage.postgres_store.LOCK_WAIT_SECONDS", 0.3)
        with pytest.raises(
            MetricsError, match=r"another metrics server writes to the PostgreSQL database test\d+ at /"
        ):
            place.open()
        assert opened_elsewhere(place, read_only=True) == "1\n"
    store.close()
    assert opened_elsewhere(place, read_only=False) == "1\n"


def test_read_only_changes_nothing(place: Place) -> None:
    with pytest.raises(MetricsError, match=r"no such database|never written"):
        place.open(read_only=True)
    place.open().close()
    store = place.open(read_only=True)
    with pytest.raises(MetricsError, match="open for reading only"):
        store.put([iteration(1)])
    assert store.runs() == []


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.duckdb").write_bytes(os.urandom(5000))
    with pytest.raises(MetricsError, match=r"metrics\.duckdb cannot be opened"):
        open_store(Settings(tmp_path))
    with pytest.raises(MetricsError, match="URL"):
        open_postgres("http://127.0.0.1:1/x")


def test_a_server_out_of_reach_is_named_and_the_password_is_not(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match=r"at 127\.0\.0\.1:9 cannot be reached, tried 2 times") as caught:
        open_postgres("postgresql://me:secret@127.0.0.1:9/metrics", attempts=2)
    assert "secret" not in str(caught.value)


def test_postgres_lost_for_a_moment_is_reached_again(tmp_path: Path) -> None:
    url = postgres.new_database()
    store = open_postgres(url)
    try:
        store.put([iteration(1)])
        assert len(store.runs()) == 1
        with psycopg.connect(postgres.server(), autocommit=True) as other:
            cut = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s"
            assert len(other.execute(cut, ["steptron-metrics"]).fetchall()) == 2  # writer and a reader
        store.put([iteration(1), iteration(2)])
        assert store.stored("run") == {(1000, 1): 4, (1000, 2): 4}
        # The lock is held again.
        with psycopg.connect(url) as other:
            assert other.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (1,)
    finally:
        store.close()


def test_a_put_that_is_cut_off_in_the_middle_is_done_again(tmp_path: Path) -> None:
    """The series that its first attempt had numbered are numbered anew."""
    store = open_postgres(postgres.new_database())
    try:
        connection = store._database._connected_writer()  # type: ignore[attr-defined]
        tried = []
        true_parts = store._database.parts

        def parts(level: int) -> tuple[str, ...]:
            if not tried:
                tried.append(level)
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            return true_parts(level)

        store._database.parts = parts  # type: ignore[method-assign]
        store.put([iteration(1)])
        assert tried and store.points("run", "moe.tokens", 3, "max", 1, 1, 1).values.shape == (1, 5)
        assert [one.metric for one in store.metrics("run")] == ["moe.tokens", "train.loss"]
    finally:
        store.close()


def test_closing_while_others_read(place: Place) -> None:
    store = place.open()
    store.put([iteration(1)])
    errors: list[BaseException] = []
    begun = threading.Event()

    def read() -> None:
        try:
            while True:
                store.runs()
                begun.set()
        except MetricsError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(20)
    store.close()
    store.close()
    thread.join(20)
    assert not thread.is_alive() and "closed" in str(errors[0])


def test_deleted_rows_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptron_metrics.storage.duckdb_store._RECENT_BYTES", 500_000)
    store = open_duckdb(tmp_path / "metrics.duckdb", memory_bytes=256 << 20, threads=1)
    generator = np.random.default_rng(0)
    sizes = []
    for turn in range(4):
        given = []
        for number in range(1, 33):
            big = Aggregate("moe.tokens", 3, generator.lognormal(size=(7, 10_000)).astype(np.float32))
            given.append(Iteration(f"run{turn}", 5, number, 1, (), 1, 1.0, 1, aggregates=(big,)))
        store.put(given)
        sizes.append(store.size_bytes())
        store.delete(f"run{turn}")
    store.close()
    assert sizes[0] > 6_000_000
    assert max(sizes) < 2.5 * sizes[0], sizes
