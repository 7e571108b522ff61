"""Kills processes of a metrics server at random moments under load, and looks whether anything is lost or doubled.

Simulated ranks (4,096 over 512 connections by default, as in ``benchmarks/metrics_server.py``) send values that are a
known function of rank, iteration and item. Again and again a receiver, a reducer or the processor, which writes the
database, is killed by SIGKILL after a random time. When all is over every frame that the server has acknowledged must
be in the database once: all seven statistics of each metric, layer and item are compared to a direct computation.

    python -m tools.metrics_kill_storm [--kills 15] [--iterations 160] [--processes 2] [--replicas 64] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.metrics_server import EXPERT_RANKS, RANKS_PER_CONNECTION, STAGES, series_of
from steptron_metrics.client import MetricsClient
from steptron_metrics.results import STATISTICS, Event
from steptron_metrics.server import status
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store

RUN, SESSION = "storm", 1_700_000_000_000_000_000
KINDS = ("receiver", "reducer", "processor")
TABLE = 1_000_003
"""Values that those of all ranks and iterations are taken from; a prime number, so that they seldom coincide."""
RESTART_SECONDS = 90.0
SETTLE_SECONDS = 300.0


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        replicas: ranks of each pipeline stage and expert-parallel rank.
        values: of each rank and iteration.
        iterations: of each rank.
        rate: iterations a second at most.
        processes: of clients.
    """

    replicas: int
    values: int
    iterations: int
    rate: float
    processes: int

    @property
    def world_size(self) -> int:
        return STAGES * EXPERT_RANKS * self.replicas


def table(values: int) -> np.ndarray:
    """float32 [TABLE + values]."""
    return np.random.default_rng(0).lognormal(1.0, 0.5, TABLE + values).astype(np.float32)


def begin(rank: int, iteration: int) -> int:
    """Where the values of a rank's iteration begin in the table."""
    return (rank * 7919 + iteration * 104_729) % TABLE


def event(iteration: int) -> Event:
    return Event("storm", f"of {iteration}")


# ------------------------------------------------------------------------------------------ clients


def send(load: Load, number: int, address: str, spool: Path, pipe: Connection) -> None:
    """A client process: sends all iterations of its ranks, whatever the server does; waits until they are stored."""
    of_all = table(load.values)
    clients = []
    for connection in range(number, load.world_size // RANKS_PER_CONNECTION, load.processes):
        ranks = range(connection * RANKS_PER_CONNECTION, (connection + 1) * RANKS_PER_CONNECTION)
        place = ranks[0] // load.replicas
        client = MetricsClient(
            address,
            RUN,
            SESSION,
            load.world_size,
            spool=spool / str(connection),
            queue_bytes=256 << 20,
            warn=lambda text: None,  # of hundreds of connections that break
        )
        series = series_of(place // EXPERT_RANKS, place % EXPERT_RANKS, load.values)
        clients.append((client, ranks, client.describe(series)))
    pipe.send(len(clients))
    pipe.recv()
    start = time.monotonic()
    for iteration in range(1, load.iterations + 1):
        time.sleep(max(0.0, start + (iteration - 1) / load.rate - time.monotonic()))
        for client, ranks, layout in clients:
            for rank in ranks:
                first = begin(rank, iteration)
                client.send(
                    rank,
                    iteration,
                    layout,
                    of_all[first : first + load.values],
                    ended_ns=SESSION + iteration * 10**9,
                    seconds=1.0 + rank,
                    consumed_tokens=iteration * 4096,
                    events=[event(iteration)] if rank == 0 else (),
                )
    expected = RANKS_PER_CONNECTION * load.iterations
    deadline = time.monotonic() + SETTLE_SECONDS
    while any(client.status().stored < expected for client, _, _ in clients) and time.monotonic() < deadline:
        time.sleep(0.1)
    states = [client.close(timeout=10.0) for client, _, _ in clients]
    pipe.send({name: sum(getattr(s, name) for s in states) for name in ("stored", "dropped", "refused", "spooled")})


def receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a client process has not answered for {seconds:g} s")
    return pipe.recv()


# ------------------------------------------------------------------------------------------ kills


def storm(server: Server, kills: int, seconds: float, chance: random.Random) -> list[str]:
    """Kills one process after the other, on average one every ``seconds / kills``; what was killed when."""
    start, done = time.monotonic(), []
    # Each kind as often as the others, in any order.
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds, start=1):
        # The rest of the time is shared among the rest of the kills: from at once to twice the mean.
        left = max(start + seconds - time.monotonic(), 0.0)
        time.sleep(chance.uniform(0.0, 2.0 * left / (kills - number + 1)))
        pid, name = victim(server, kind, chance)
        done.append(f"{number}: {name} after {time.monotonic() - start:.1f} s, {stored(server)} iterations stored")
        psutil.Process(pid).kill()
        print(done[-1], flush=True)
    return done


def victim(server: Server, kind: str, chance: random.Random) -> tuple[int, str]:
    """A process of a kind that runs, once one does: it may be starting only."""
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline:
        pids = server.pids
        try:
            if kind == "reducer":
                children = psutil.Process(pids["processor"]).children()
                found = [(child.pid, "reducer") for child in children if "reducer" in " ".join(child.cmdline())]
            else:
                found = [(pid, name) for name, pid in sorted(pids.items()) if name.startswith(kind)]
            found = [(pid, name) for pid, name in found if psutil.pid_exists(pid)]
        except (KeyError, psutil.NoSuchProcess):
            found = []
        if found:
            return chance.choice(found)
        time.sleep(0.02)
    raise RuntimeError(f"no {kind} runs after {RESTART_SECONDS:g} s")


def stored(server: Server) -> str:
    """Iterations in the database, for the report."""
    try:
        with urllib.request.urlopen(f"{server.http_address}/api/v1/runs/{RUN}", timeout=2) as answer:
            return str(json.load(answer)["iterations"])
    except urllib.error.HTTPError:
        return "no"
    except OSError:
        return "(the processor is starting)"


# ------------------------------------------------------------------------------------------ what must be there


def expected_of(load: Load, of_all: np.ndarray, iteration: int) -> Iterator[tuple[str, int, int, np.ndarray]]:
    """Metric, layer, first item and statistics, float64 [7, items], of one iteration, computed directly."""
    for stage in range(STAGES):
        for expert_rank in range(EXPERT_RANKS):
            place = stage * EXPERT_RANKS + expert_rank
            ranks = range(place * load.replicas, (place + 1) * load.replicas)
            frames = np.stack([of_all[begin(rank, iteration) :][: load.values] for rank in ranks])
            offset = 0
            for series in series_of(stage, expert_rank, load.values):
                samples = frames[:, offset : offset + series.size].astype(np.float64).reshape(-1, series.count)
                offset += series.size
                ordered = np.sort(samples, axis=0)
                values = np.empty((len(STATISTICS), series.count))
                values[0], values[1] = len(samples), samples.mean(axis=0)
                values[2] = np.sqrt(np.square(samples).mean(axis=0))
                values[3], values[5] = ordered[0], ordered[-1]
                for row, share in ((4, 0.5), (6, 0.99)):
                    position = share * (len(samples) - 1)
                    low = int(position)
                    high = min(low + 1, len(samples) - 1)
                    values[row] = ordered[low] + (position - low) * (ordered[high] - ordered[low])
                yield series.metric, series.layer, series.first, values


def faults_of_iteration(load: Load, of_all: np.ndarray, iteration: int, batch: Any) -> list[str]:
    """What is wrong with the aggregates of an iteration, rows of ``Store.table``."""
    names = batch.column("metric").dictionary.to_pylist()
    code = batch.column("metric").indices.to_numpy()
    layer, item = batch.column("layer").to_numpy(), batch.column("item").to_numpy()
    found = np.stack([batch.column(name).to_numpy() for name in STATISTICS])
    key = (code.astype(np.int64) << 40) + (layer.astype(np.int64) << 20) + item
    if len(np.unique(key)) != len(key):
        return [f"iteration {iteration}: an item twice"]
    order = np.argsort(key)
    key, found = key[order], found[:, order]
    faults, seen = [], 0
    for metric, of_layer, first, values in expected_of(load, of_all, iteration):
        if metric not in names:
            return [f"iteration {iteration}: no {metric}"]
        low = np.searchsorted(key, (names.index(metric) << 40) + (of_layer << 20) + first)
        there = found[:, low : low + values.shape[1]]
        seen += values.shape[1]
        if there.shape != values.shape or not np.allclose(there, values, rtol=2e-6, atol=0):
            faults.append(f"iteration {iteration}: {metric} of layer {of_layer} from item {first} differs")
    if seen != len(key):
        faults.append(f"iteration {iteration}: {len(key)} items, expected {seen}")
    return faults


def faults_in_store(settings: Settings, load: Load) -> list[str]:
    """What the database has too much, too little, or wrong."""
    store = open_store(settings, read_only=True)
    try:
        numbers = list(range(1, load.iterations + 1))
        faults = []
        if store.stored(RUN) != {(SESSION, number): load.world_size for number in numbers}:
            faults.append("the ledger has not each iteration once, of all ranks")
        rows = store.iterations(RUN, 1, 2 * load.iterations).to_pydict()
        if rows["iteration"] != numbers:
            faults.append(f"iterations {rows['iteration']}")
        for name, wanted in (
            ("num_ranks", {load.world_size}),
            ("dropped", {0}),
            ("seconds", {float(load.world_size)}),
        ):
            if set(rows[name]) != wanted:
                faults.append(f"{name}: {sorted(set(rows[name]))}, expected {sorted(wanted)}")
        if store.events(RUN, 1, 2 * load.iterations).to_pydict()["detail"] != [event(n).detail for n in numbers]:
            faults.append("the events of rank 0 are not there once each")
        of_all = table(load.values)
        for number in numbers:
            batches = list(store.table(RUN, None, number, number))
            if len(batches) != 1:
                faults.append(f"iteration {number}: no aggregates")
                continue
            faults += faults_of_iteration(load, of_all, number, batches[0])
        return faults
    finally:
        store.close()


def faults_in_log(folder: Path, done: Sequence[str], restarts: dict[str, int]) -> list[str]:
    """What has died but was not killed, and other errors."""
    killed = sum(": reducer " not in one for one in done)
    faults = [] if sum(restarts.values()) == killed else [f"{killed} processes were killed, restarted: {restarts}"]
    expected = re.compile(r"supervisor: .* has died by signal SIGKILL|processor: reducer \d+, doing .* status -9")
    lines = (folder / "server.log").read_text(errors="replace").splitlines()
    return faults + [line for line in lines if " ERROR " in line and not expected.search(line)]


# ------------------------------------------------------------------------------------------ the command


def run(load: Load, folder: Path, kills: int, seed: int) -> tuple[list[str], list[str]]:
    """Load and kills; what was killed, and what is wrong in the end."""
    settings = Settings(folder / "server", port=0, http_port=0, receivers=2, journal_bytes=16 << 30)
    context = multiprocessing.get_context("spawn")
    with running(settings) as server:
        pipes, workers = [], []
        for number in range(load.processes):
            own, other = context.Pipe()
            workers.append(context.Process(target=send, args=(load, number, server.address, folder / "spool", other)))
            workers[-1].start()
            pipes.append(own)
        connections = sum(receive(pipe, 120) for pipe in pipes)
        print(f"{load.world_size} ranks over {connections} connections", flush=True)
        for pipe in pipes:
            pipe.send("go")
        done = storm(server, kills, load.iterations / load.rate, random.Random(seed))
        counts = [receive(pipe, load.iterations / load.rate + SETTLE_SECONDS + 60) for pipe in pipes]
        for worker in workers:
            worker.join(30)
        wait_until_stored(server, load.iterations)
        current = status.read(settings.folder)
        assert current is not None
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    faults = []
    sent = load.world_size * load.iterations
    if total != {"stored": sent, "dropped": 0, "refused": 0, "spooled": 0}:
        faults.append(f"of {sent} frames: {total}")
    faults += faults_in_log(settings.folder, done, current.restarts)
    return done, faults + faults_in_store(settings, load)


def wait_until_stored(server: Server, iterations: int) -> None:
    """That it does not come to this is said by what is missing then."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while stored(server) != str(iterations) and time.monotonic() < deadline:
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--rate", type=float, default=0.8, help="iterations a second (%(default)s)")
    parser.add_argument("--values", type=int, default=1465, help="of each rank and iteration (%(default)s)")
    parser.add_argument(
        "--replicas", type=int, default=64, help="64 times as many ranks; a multiple of 8 (%(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="of clients (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for everything, and kept; a temporary one if not given")
    arguments = parser.parse_args()
    if arguments.replicas % RANKS_PER_CONNECTION:
        parser.error(f"--replicas {arguments.replicas}: expected a multiple of {RANKS_PER_CONNECTION}")
    load = Load(arguments.replicas, arguments.values, arguments.iterations, arguments.rate, arguments.processes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if (folder / "server").exists():
            parser.error(f"--folder {folder}: there is a server's folder in it already")
        folder.mkdir(parents=True, exist_ok=True)
        done, found = run(load, folder, arguments.kills, arguments.seed)
    frames = load.world_size * load.iterations
    print("\n".join(found[:50]) or f"{len(done)} kills: each of {frames} frames is in the database, once")
    print(json.dumps({"kills": len(done), "iterations": load.iterations, "frames": frames, "faults": found[:50]}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
