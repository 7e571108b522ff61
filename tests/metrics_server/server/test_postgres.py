"""A real server on a real PostgreSQL server that goes away and comes back, refuses a row, or is not there."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psycopg
import pytest

from steptron_metrics.client import MetricsClient
from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol.description import Series
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store
from steptron_metrics.storage.postgres_store import open_postgres
from tests.metrics_server import postgres
from tests.metrics_server.server.children import kill
from tests.metrics_server.server.talking import asked, until

SESSION = 1_700_000_000_000_000_000
SERIES = (Series("train.loss"),)


@pytest.fixture
def database() -> Iterator[tuple[Path, str]]:
    """A server of its own: its folder and URL."""
    folder = Path(tempfile.mkdtemp(prefix="steptron-pg-"))
    folder.chmod(0o755)
    try:
        yield folder / "server", postgres.start(folder / "server")
    finally:
        postgres.stop(folder / "server")
        shutil.rmtree(folder)


class Sender:
    """One rank of a run; the loss of an iteration is its number."""

    def __init__(self, server: Server, run: str, spool: Path) -> None:
        self.client = MetricsClient(server.address, run, SESSION, 1, spool=spool / run)
        self._layout = self.client.describe(SERIES)

    def send(self, *iterations: int) -> None:
        for number in iterations:
            values = np.array([number], np.float32)
            self.client.send(
                0, number, self._layout, values, ended_ns=SESSION + number, seconds=1.0, consumed_tokens=number
            )


def iterations(server: Server) -> dict[str, int]:
    return {run["name"]: run["iterations"] for run in asked(server, "/api/v1/runs")}


def trouble(server: Server) -> str:
    return asked(server, "/api/v1/server")["trouble"] or ""


def test_a_database_that_goes_away_comes_back_and_refuses_a_row(tmp_path: Path, database: tuple[Path, str]) -> None:
    folder, url = database
    settings = Settings(tmp_path / "server", database=url, port=0, http_port=0, min_free_bytes=0)
    with running(settings) as server:
        one, other = Sender(server, "one", tmp_path), Sender(server, "other", tmp_path)
        one.send(1, 2)
        until(lambda: iterations(server) == {"one": 2}, "the first iterations are not stored")

        # Away, also for a run that is new and for a processor that is new.
        postgres.halt(folder)
        one.send(3, 4)
        other.send(1)
        until(lambda: "cannot be reached" in trouble(server), "the server does not tell that its database is away")
        assert asked(server, "/healthz") == {"status": "trouble"}
        until(lambda: one.client.status().stored == 4 and other.client.status().stored == 1, "frames are not taken")
        processor = server.pids["processor"]
        kill(processor)
        until(lambda: server.pids.get("processor", processor) != processor, "the processor is not started again")
        postgres.resume(folder)
        until(
            lambda: iterations(server) == {"one": 4, "other": 1},
            "iterations are not stored after the database came back",
        )
        until(lambda: trouble(server) == "" and asked(server, "/healthz") == {"status": "ok"}, "trouble does not end")

        # A row that is never taken keeps nobody else's back.
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER TABLE steptron_metrics.iterations ADD CHECK (consumed_tokens <> 5)")
        one.send(5, 6)
        other.send(2)
        until(lambda: iterations(server) == {"one": 5, "other": 2}, "one bad row keeps the others back")
        assert asked(server, "/api/v1/server")["set_aside"] == 1
        for sender in (one, other):
            assert sender.client.close().dropped == 0
    log = (settings.folder / "server.log").read_text()
    assert "iteration 5 of run one is not in the database, which refuses it (CheckViolation" in log
    assert [file.name for file in (settings.folder / "set_aside").iterdir()] == [f"one-{SESSION}-5.npz"]
    store = open_store(settings, read_only=True)
    assert store.stored("one") == {(SESSION, number): 1 for number in (1, 2, 3, 4, 6)}
    points = store.points("one", "train.loss", -1, "mean", 1, 6, 6)
    assert points.first.tolist() == points.values[:, 0].tolist() == [1, 2, 3, 4, 6]
    store.close()


def test_a_database_out_of_reach_is_told_at_once(tmp_path: Path) -> None:
    url = "postgresql://me:secret@127.0.0.1:9/metrics"
    settings = Settings(tmp_path / "server", database=url, port=0, http_port=0, min_free_bytes=0)
    reason = r"PostgreSQL database metrics at 127\.0\.0\.1:9 cannot be reached, tried (once|[23] times): "
    with pytest.raises(MetricsError, match=reason) as caught, running(settings):
        raise AssertionError("a server without its database")
    assert "secret" not in str(caught.value)


def test_a_database_that_does_not_answer_is_told_within_seconds() -> None:
    with socket.socket() as silent:  # takes connections and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(MetricsError, match=r"cannot be reached, tried once: .*timeout"):
            open_postgres(
                f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/metrics?connect_timeout=2", patience=1.0
            )
        assert time.monotonic() - began < 8
