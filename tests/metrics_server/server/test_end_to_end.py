"""A real server and real clients, whose processes are killed."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from steptron_metrics.client import MetricsClient
from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol.description import Combination, Series
from steptron_metrics.results import STATISTICS, Event
from steptron_metrics.server import status
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store
from tests.metrics_server.server.children import kill, wait_until_gone
from tests.metrics_server.server.talking import asked, until

RANKS, ITERATIONS, EXPERTS = 8, 20, 6
SESSION = 1_700_000_000_000_000_000
SERIES = (
    Series("moe.output_norm_max", layer=3, count=EXPERTS, micro_batches=2),
    Series("train.loss", combination=Combination.SUM),
)


def value(rank: int, iteration: int) -> np.ndarray:
    """float32 [2 micro-batches x experts, and a part of the loss], whole numbers: sums are exact."""
    norms = 1 + (np.arange(2 * EXPERTS) * 7 + rank * 3 + iteration) % 64
    return np.append(norms, rank + iteration).astype(np.float32)


def reducer_of(processor: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == processor and b"reducer" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
    raise AssertionError("no reducer runs")


@pytest.mark.py312
def test_killed_processes_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "server", port=0, http_port=0, receivers=2, min_free_bytes=0)
    with running(settings) as server:
        first = server.pids
        clients = [
            MetricsClient(server.address, "run", SESSION, RANKS, spool=tmp_path / f"spool{rank}")
            for rank in range(RANKS)
        ]
        layouts = [client.describe(SERIES) for client in clients]
        for number in range(1, ITERATIONS + 1):
            for rank, client in enumerate(clients):
                client.send(
                    rank,
                    number,
                    layouts[rank],
                    value(rank, number),
                    ended_ns=SESSION + number * 10**9,
                    seconds=1.0 + rank,
                    consumed_tokens=number * 100,
                    events=[Event("stage", f"of {number}")] if rank == 0 else (),
                )
            if number == 5:
                kill(server.pids["receiver 0"])
            elif number == 9:
                kill(reducer_of(server.pids["processor"]))
            elif number == 13:
                kill(server.pids["processor"])
            elif number == 15:
                kill(server.pids["receiver 1"])
            time.sleep(0.03)
        until(lambda: all(client.status().stored == ITERATIONS for client in clients), "frames are not stored")
        until(lambda: [run["iterations"] for run in asked(server, "/api/v1/runs")] == [ITERATIONS], "not all reduced")
        assert all(client.close().dropped == 0 for client in clients)
        until(lambda: status.read(settings.folder).restarts.get("receiver 1") == 1, "no restart")  # type: ignore[union-attr]
        assert set(server.pids) == set(first) and server.pids["processor"] != first["processor"]
        last = server.pids
        current = status.read(settings.folder)
        assert current is not None
        restarts = current.restarts
    for pid in {**first, **last}.values():
        wait_until_gone(pid)
    assert status.read(settings.folder) is None
    log = (settings.folder / "server.log").read_text()
    assert f"processor, process {first['processor']}, has died by signal SIGKILL" in log
    # Nothing died but what was killed: an exception that nobody catches is one more restart. A reducer that answers
    # when its processor is killed may write a traceback of its broken pipe to stderr; it ends all the same.
    assert restarts == {"processor": 1, "receiver 0": 1, "receiver 1": 1}
    expected = re.compile(r"supervisor: .* has died by signal SIGKILL|processor: reducer \d+, doing .* status -9")
    unexpected = [line for line in log.splitlines() if " ERROR " in line and not expected.search(line)]
    assert unexpected == []

    store = open_store(settings)
    assert store.stored("run") == {(SESSION, number): RANKS for number in range(1, ITERATIONS + 1)}
    assert store.alerts() == []
    table = store.iterations("run", 1, ITERATIONS).to_pydict()
    assert table["iteration"] == list(range(1, ITERATIONS + 1)) and set(table["seconds"]) == {float(RANKS)}
    assert store.events("run", 1, 99).to_pydict()["detail"] == [f"of {number}" for number in range(1, ITERATIONS + 1)]
    for statistic in STATISTICS:
        points = store.points("run", "moe.output_norm_max", 3, statistic, 1, ITERATIONS, ITERATIONS)  # type: ignore[arg-type]
        for index, number in enumerate(range(1, ITERATIONS + 1)):
            samples = np.stack([value(rank, number)[:-1].reshape(2, EXPERTS) for rank in range(RANKS)])
            samples = samples.reshape(-1, EXPERTS).astype(np.float64)
            expected = {
                "count": np.full(EXPERTS, 2 * RANKS),
                "mean": samples.mean(0),
                "rms": np.sqrt((samples**2).mean(0)),
                "min": samples.min(0),
                "median": np.median(samples, axis=0),
                "max": samples.max(0),
                "p99": np.quantile(samples, 0.99, axis=0),
            }[statistic]
            np.testing.assert_allclose(points.values[index], expected, rtol=1e-6, err_msg=f"{statistic}, {number}")
    losses = store.points("run", "train.loss", -1, "mean", 1, ITERATIONS, ITERATIONS).values[:, 0]
    assert losses.tolist() == [sum(rank + number for rank in range(RANKS)) for number in range(1, ITERATIONS + 1)]
    store.close()


def test_a_killed_supervisor_takes_its_children_along_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """The next one is also asked to delete a run, which may come again."""
    settings = Settings(tmp_path / "server", port=0, http_port=0, min_free_bytes=0)
    with running(settings) as server:
        message = f"a server runs in it already \\(process {server.pids['supervisor']}, rec"
        with pytest.raises(MetricsError, match=message), running(settings):
            raise AssertionError("two servers in one folder")
        pids = server.pids
        os.kill(pids["supervisor"], 9)
        with running(settings) as following:
            assert following.pids["supervisor"] != pids["supervisor"]
            assert asked(following, "/api/v1/runs") == []
            for pid in pids.values():
                wait_until_gone(pid)
            for tokens in (1, 2):
                with_client(following, tmp_path, tokens)
                until(lambda tokens=tokens: consumed(following) == [tokens], "the iteration is not stored")  # type: ignore[misc]
                if tokens == 1:
                    delete(following, "run")
                    assert asked(following, "/api/v1/runs") == [] and not list((settings.journal / "run").glob("*"))
            # However small an iteration is, its reducer counts it.
            (reducer,) = asked(following, "/api/v1/server")["reducers"]
            assert reducer["iterations"] == 2 and reducer["busy_seconds"] > 0


def consumed(server: Server) -> list[int]:
    return [run["consumed_tokens"] for run in asked(server, "/api/v1/runs")]


def delete(server: Server, run: str) -> None:
    request = urllib.request.Request(f"{server.http_address}/api/v1/runs/{run}?force=true", method="DELETE")
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status in (200, 204)


def with_client(server: Server, folder: Path, tokens: int) -> None:
    client = MetricsClient(server.address, "run", SESSION, 1, spool=folder / "spool")
    layout = client.describe(SERIES)
    client.send(0, 1, layout, value(0, 1), ended_ns=SESSION, seconds=1.0, consumed_tokens=tokens)
    assert client.close(20).stored == 1


def test_a_run_that_falls_silent_names_the_ranks_it_waits_for(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "server", port=0, http_port=0, stale_after_seconds=3)
    settings.folder.mkdir()
    with running(settings, niceness=1) as server:
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in server.pids.values()} == {os.getpriority(0, 0) + 1}
        client = MetricsClient(server.address, "run", SESSION, 3, spool=tmp_path / "spool")
        layout = client.describe(SERIES)
        for iteration, ranks in ((1, (0, 1, 2)), (2, (1,))):
            for rank in ranks:
                client.send(
                    rank, iteration, layout, value(rank, 1), ended_ns=SESSION, seconds=1.0, consumed_tokens=iteration
                )
        until(lambda: asked(server, "/api/v1/alerts"), 20)
        (alert,) = asked(server, "/api/v1/alerts")
        assert alert["rule"] == "stale_run"
        assert "Of iteration 2 1 of 3 ranks have sent, not 0, 2." in alert["saw"]
        client.close()
