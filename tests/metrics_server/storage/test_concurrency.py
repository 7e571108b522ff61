from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.storage.postgres_store import open_postgres
from tests.metrics_server import postgres
from tests.metrics_server.storage.conftest import Place
from tests.metrics_server.storage.made import iteration

ROOT = Path(__file__).parents[3]
LAST = 2**62


def test_readers_see_whole_iterations_only(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptron_metrics.storage.duckdb_store._RECENT_BYTES", 30_000)
    store = place.open()
    store.put([iteration(1)])
    stop = threading.Event()
    failures: list[BaseException] = []
    looked = [0, 0, 0]

    def watch(which: int, look: object) -> None:
        try:
            while not stop.is_set():
                look()  # type: ignore[operator]
                looked[which] += 1
        except BaseException as error:
            failures.append(error)

    def rolled() -> None:
        run = store.runs()[0]
        points = store.points("run", "moe.tokens", 44, "count", 1, LAST, 7)
        assert points.last[-1] >= run.last_iteration
        np.testing.assert_array_equal(points.first[1:], points.last[:-1] + 1)

    def whole() -> None:
        last = store.runs()[0].last_iteration
        found = pa.Table.from_batches(store.table("run", None, last, last))
        wanted = {(one.metric, one.layer) for one in iteration(last).aggregates if one.values[0].any()}
        assert set(zip(found["metric"].to_pylist(), found["layer"].to_pylist(), strict=True)) == wanted

    def together() -> None:
        points = store.points("run", "train.loss", -1, "mean", 1, LAST, 10**6)
        np.testing.assert_array_equal(points.first, np.arange(1, len(points.first) + 1))
        assert len(store.stored("run")) >= len(points.first)

    threads = [threading.Thread(target=watch, args=one) for one in enumerate((rolled, whole, together))]
    for thread in threads:
        thread.start()
    try:
        for number in range(2, 80):
            store.put([iteration(number)])
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures[0]
    assert min(looked) > 3


PUTS = """
import sys
from pathlib import Path
from steptron_metrics.storage import duckdb_store
from tests.metrics_server.storage.made import iteration
duckdb_store._RECENT_BYTES = 40_000
if sys.argv[1] == "duckdb":
    store = duckdb_store.open_duckdb(Path(sys.argv[2]))
else:
    from steptron_metrics.storage.postgres_store import open_postgres
    store = open_postgres(sys.argv[2])
begin = max([number for _, number in store.stored("run")], default=0) + 1
print("begin", begin, flush=True)
for number in range(begin, begin + 100_000):
    store.put([iteration(number), iteration(number, run="other")])
    print(number, flush=True)
"""


def test_what_put_returned_for_is_there_after_kill_9(place: Place) -> None:
    """A writer is killed at random moments, three times one after the other on the same database."""
    generator = np.random.default_rng(os.getpid())
    acknowledged = 0
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", PUTS, place.kind, place.where],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'metrics_server'}"},
        )
        assert writer.stdout is not None
        begin = writer.stdout.readline().split()
        assert begin and begin[0] == "begin", "the writer did not start"
        assert int(begin[1]) > acknowledged
        lines = [writer.stdout.readline()]
        time.sleep(generator.uniform(0.0, 0.5))
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().split("\n")[:-1]
        writer.wait(20)
        acknowledged = max([int(line) for line in lines], default=acknowledged)
    store = place.open()
    for run in ("run", "other"):
        stored = sorted(number for _, number in store.stored(run))
        assert stored in (list(range(1, acknowledged + 1)), list(range(1, acknowledged + 2)))
        for layer in (3, 44):
            points = store.points(run, "moe.tokens", layer, "p99", 1, LAST, 10**6)
            assert points.first.tolist() == stored
            expected = [iteration(number, run=run).aggregates[(3, 44).index(layer)].values[6] for number in stored]
            np.testing.assert_array_equal(points.values, np.stack(expected))
        rolled = store.points(run, "moe.tokens", 3, "max", 1, LAST, 3)
        values = store.points(run, "moe.tokens", 3, "max", 1, LAST, 10**6).values
        starts = rolled.first - 1
        np.testing.assert_array_equal(rolled.values, np.fmax.reduceat(values, starts, axis=0))


def test_a_reader_waits_for_a_place_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptron_metrics.storage.postgres_store.READERS", 1)
    monkeypatch.setattr("steptron_metrics.storage.postgres_store.READER_WAIT_SECONDS", 0.1)
    store = open_postgres(postgres.new_database())
    with store._database.read(), pytest.raises(MetricsError, match="readers were at work"):
        store.runs()
    assert store.runs() == []
    store.close()
