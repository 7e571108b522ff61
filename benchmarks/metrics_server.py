"""The metrics server under the load of 4,096 ranks, and what sending costs the training thread, beside other ways.

    python -m benchmarks.metrics_server                    # everything; four minutes and more
    python -m benchmarks.metrics_server --only load --values 36288 --seconds 60

Ranks are simulated: 8 pipeline stages x 8 expert-parallel ranks x 64 replicas, each with values of its own. Their
frames go through the real client and gRPC over at least 512 connections of several processes. What is told of is what
the server's database holds. Everything runs on this machine, clients included.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from rich.console import Console

from benchmarks.harness import print_result, print_table
from steptron_metrics.client import MetricsClient
from steptron_metrics.protocol.description import Folding, Series
from steptron_metrics.reading.source import open_source
from steptron_metrics.receiver.main import run as run_receiver
from steptron_metrics.results import Run
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings

STAGES, EXPERT_RANKS, REPLICAS = 8, 8, 64
WORLD = STAGES * EXPERT_RANKS * REPLICAS
RANKS_PER_CONNECTION = 8
EXPERTS, TOTAL_LAYERS = 36, 42
METRICS = (
    "tokens",
    "intermediate_norm_rms",
    "intermediate_norm_max",
    "output_norm_rms",
    "output_norm_max",
    "probability",
)
T = TypeVar("T")

RUN = "load"
TARGETS = {
    "iterations_per_second": 1.0,
    "send_wall_p50_ms": 1.0,
    "send_cpu_p99_ms": 1.0,
    "share_of_tiny_step": 0.03,
}


def series_of(stage: int, expert_rank: int, num_values: int) -> list[Series]:
    """What a rank of a stage measures: six statistics of each of its experts in its MoE layers (five or six of 42), one
    value an iteration, or as many as micro-batches fit; matrices' norms fill it up to the number of values."""
    layers = range(3 + stage * TOTAL_LAYERS // STAGES, 3 + (stage + 1) * TOTAL_LAYERS // STAGES)
    size = len(layers) * len(METRICS) * EXPERTS
    micro_batches = num_values // size if num_values >= 2 * size else 0
    first = expert_rank * EXPERTS
    series = [
        Series(f"moe.{metric}", layer, first, EXPERTS, micro_batches, Folding.NONE)
        for layer in layers
        for metric in METRICS
    ]
    rest = num_values - sum(one.size for one in series)
    if rest > 0:
        series.append(Series("weight.norm.expert_up", layers[0], expert_rank * rest, rest))
    return series


# ------------------------------------------------------------------------------------------ load


@dataclass(frozen=True)
class Load:
    """What client processes send.

    Attributes:
        address: of the server.
        values: of each rank and iteration.
        seconds: how long.
        processes: of clients.
        spool: folder.
        started_ns: of the session.
        rate: iterations a second at most.
    """

    address: str
    values: int
    seconds: float
    processes: int
    spool: Path
    started_ns: int
    rate: float


def _send(load: Load, number: int, ready: Connection) -> None:
    """A client process: sends an iteration of all its ranks when it is time and the one before is acknowledged."""
    own = range(number, WORLD // RANKS_PER_CONNECTION, load.processes)
    rng = np.random.default_rng(number)
    clients, layouts = [], []
    for connection in own:
        clients.append(
            MetricsClient(
                load.address, RUN, load.started_ns, WORLD, spool=load.spool / str(connection), queue_bytes=256 << 20
            )
        )
        ranks = range(connection * RANKS_PER_CONNECTION, (connection + 1) * RANKS_PER_CONNECTION)
        # Ranks of a connection are replicas: as Megatron-Core lays ranks out, data parallelism is not the innermost.
        place = connection // (REPLICAS // RANKS_PER_CONNECTION)
        layouts.append(
            (ranks, clients[-1].describe(series_of(place // EXPERT_RANKS, place % EXPERT_RANKS, load.values)))
        )
    values = rng.lognormal(1.0, 0.5, load.values + 64).astype(np.float32)
    ready.send(len(clients))
    ready.recv()
    start, iteration = time.monotonic(), 0
    end = start + load.seconds
    while time.monotonic() < end:
        time.sleep(max(0.0, start + iteration / load.rate - time.monotonic()))
        iteration += 1
        for client, (ranks, layout) in zip(clients, layouts, strict=True):
            for rank in ranks:
                shift = (rank * 7 + iteration) % 64
                client.send(
                    rank,
                    iteration,
                    layout,
                    values[shift : shift + load.values],
                    ended_ns=time.time_ns(),
                    seconds=1.0,
                    consumed_tokens=iteration * 4096,
                )
        while any(client.status().queued for client in clients) and time.monotonic() < end + 60:
            time.sleep(0.002)
    states = [client.close(timeout=0.5) for client in clients]
    ready.send((iteration, sum(s.stored for s in states), sum(s.dropped + s.refused + s.spooled for s in states)))


def run_load(values: int, seconds: float, processes: int, receivers: int, rate: float) -> dict[str, float]:
    """Sustained iterations a second into the database, and memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            folder / "server", port=0, http_port=0, receivers=receivers, reducers=1, journal_bytes=4 << 30
        )
        settings.folder.mkdir()
        with running(settings) as server:
            load = Load(server.address, values, seconds, processes, folder / "spool", time.time_ns(), rate)
            context = multiprocessing.get_context("spawn")
            pipes, workers = [], []
            for number in range(processes):
                own, other = context.Pipe()
                workers.append(context.Process(target=_send, args=(load, number, other)))
                workers[-1].start()
                pipes.append(own)
            connections = sum(_receive(pipe, 120) for pipe in pipes)
            start = time.monotonic()
            for pipe in pipes:
                pipe.send("go")
            memory = _watch_memory(server, start + seconds)
            stored_at_end = _stored(server)
            took = time.monotonic() - start
            results = [_receive(pipe, 180) for pipe in pipes]
            for worker in workers:
                worker.join(30)
            sent = max(iterations for iterations, _, _ in results)
            stored = _settled(server, sent)
            partial = sum(run.partial for run in _runs(server))
    tenths = [statistics.median(part) / 1e9 for part in _tenths(memory)]
    print("memory in each tenth of the time, GB:", " ".join(f"{value:.2f}" for value in tenths))
    early, late = memory[len(memory) // 4 : len(memory) // 2], memory[-len(memory) // 4 :]
    return {
        "connections": connections,
        "iterations_per_second": stored_at_end / took,
        "sent": sent,
        "stored": stored,
        "partial": partial,
        "not_stored_frames": sum(lost for _, _, lost in results),
        "memory_growth": statistics.median(late) / statistics.median(early),
        "memory_gb": max(memory) / 1e9,
    }


def _tenths(values: list[float]) -> list[list[float]]:
    borders = [len(values) * part // 10 for part in range(11)]
    return [values[first:stop] for first, stop in itertools.pairwise(borders) if stop > first]


def _receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a client process has not answered for {seconds:g} s")
    return pipe.recv()


def _runs(server: Server) -> list[Run]:
    """The run of the load, once the server has something of it."""
    return [run for run in open_source(server.http_address).runs() if run.name == RUN]


def _stored(server: Server) -> int:
    return sum(run.iterations for run in _runs(server))


def _settled(server: Server, sent: int) -> int:
    """Stored iterations, once what was sent is there."""
    deadline = time.monotonic() + 60
    while (stored := _stored(server)) < sent and time.monotonic() < deadline:
        time.sleep(0.5)
    return stored


def _watch_memory(server: Server, until: float) -> list[float]:
    """Proportional memory of all processes of the server, every second."""
    memory = []
    while time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(server.pids["supervisor"])
            processes = (supervisor, *supervisor.children(recursive=True))
            memory.append(float(sum(process.memory_full_info().pss for process in processes)))
        time.sleep(1.0)
    return memory


# ------------------------------------------------------------------------------------------ the training thread


def time_sending(server: Server, folder: Path, num_values: int, iterations: int = 400) -> dict[str, float]:
    """Milliseconds of the calling thread for one iteration's frame of one rank, while another thread computes."""
    client = MetricsClient(server.address, "thread", time.time_ns(), 1, spool=folder / "thread")
    layout = client.describe(series_of(0, 0, num_values))
    values = np.random.default_rng(0).random(num_values, np.float32)
    wall, cpu = [], []
    for iteration in range(1, iterations + 1):
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        client.send(0, iteration, layout, values, ended_ns=time.time_ns(), seconds=0.1, consumed_tokens=iteration)
        wall.append(1e3 * (time.perf_counter() - begin))
        cpu.append(1e3 * (time.thread_time() - begin_cpu))
        time.sleep(0.02)
    client.close(10.0)
    return {
        "send_wall_p50_ms": float(np.percentile(wall, 50)),
        "send_wall_p99_ms": float(np.percentile(wall, 99)),
        "send_cpu_p99_ms": float(np.percentile(cpu, 99)),
    }


def time_tensorboard(folder: Path, num_values: int, iterations: int = 20) -> float:
    """Milliseconds for as many scalars by torch's SummaryWriter."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    values = np.random.default_rng(0).random(num_values, np.float32)
    names = [f"moe/layer_{i // 36}/expert_{i % 36}" for i in range(num_values)]
    times = []
    for iteration in range(iterations):
        begin = time.perf_counter()
        for name, value in zip(names, values, strict=True):
            writer.add_scalar(name, float(value), iteration)
        times.append(1e3 * (time.perf_counter() - begin))
    writer.close()
    return statistics.median(times)


def time_message_per_value(server: Server, folder: Path, num_values: int, iterations: int = 5) -> float:
    """Milliseconds until as many frames of one value each have been handed over and acknowledged."""
    client = MetricsClient(server.address, "single", time.time_ns(), num_values, spool=folder / "single")
    layout = client.describe([Series("moe.tokens", 3)])
    values = np.random.default_rng(0).random(num_values, np.float32)
    times = []
    for iteration in range(1, iterations + 1):
        begin = time.perf_counter()
        for rank in range(num_values):
            client.send(
                rank, iteration, layout, values[rank : rank + 1], ended_ns=1, seconds=0.1, consumed_tokens=iteration
            )
        while client.status().queued:
            time.sleep(0.0005)
        times.append(1e3 * (time.perf_counter() - begin))
    client.close(10.0)
    return statistics.median(times)


def _gather(rank: int, world: int, num_values: int, iterations: int, file: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    values = torch.rand(num_values)
    times = []
    for _ in range(iterations):
        gathered = [torch.empty_like(values) for _ in range(world)]
        begin = time.perf_counter()
        dist.all_gather(gathered, values)
        torch.stack(gathered).mean(dim=0)
        times.append(1e3 * (time.perf_counter() - begin))
    if rank == 0:
        pipe.send(statistics.median(times))
    dist.destroy_process_group()


def time_all_gather(folder: Path, num_values: int, world: int = 8, iterations: int = 40) -> float:
    """Milliseconds of a synchronous all-gather in the loop, over as many local processes."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    workers = [
        context.Process(target=_gather, args=(rank, world, num_values, iterations, str(folder / "gather"), other))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    result = float(_receive(own, 120))
    for worker in workers:
        worker.join(30)
    return result


@dataclass
class _Busy:
    """Computes beside, as a trainer does."""

    stopped: bool = False

    def __enter__(self) -> _Busy:
        def work() -> None:
            a = np.random.default_rng(0).random((300, 300))
            while not self.stopped:
                a @ a

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped = True
        self._thread.join()


# ------------------------------------------------------------------------------------------ a step of tiny


@contextlib.contextmanager
def receiver_alone(folder: Path) -> Iterator[str]:
    """Address of a receiver without the rest of a server: on a cluster that is on other machines."""
    settings, port = Settings(folder, port=0, http_port=0), 17_177
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_receiver, args=(settings, 0, port))
    process.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(30)


def share_of_step(address: str, folder: Path, rounds: int) -> dict[str, float]:
    """What probes and client take of a step of the quickstart's training.

    Steps with and without take turns, and each with them is compared with those beside it, since a machine's pace
    changes by more than what is measured here. What the client's threads do after a step falls on the next one, which
    hides it: their CPU time is counted and added, also what of it has been seen already.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.batches import random_batches
    from steptron.config.loader import load
    from steptron.parallel.mesh import build_mesh
    from steptron.platform import megatron_cpu
    from steptron.telemetry.run import Telemetry
    from steptron.telemetry.stopwatch import Stopwatch
    from steptron.train.step import TrainStep

    megatron_cpu.install()
    torch.set_num_threads(os.cpu_count() or 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    overrides = ["parallel.expert=1", f"telemetry.server={address}", f"train.output={folder / 'tiny'}"]
    config = load(Path("configs/pretrain/tiny-quickstart.yaml"), overrides).config
    mesh, device = build_mesh(config.parallel), torch.device("cpu")
    stopwatch = Stopwatch(device)
    step = TrainStep(config, mesh, device, stopwatch=stopwatch)
    batches = random_batches(config, mesh)
    for _ in range(3):
        step.run(batches, 1e-4, 1e-3)
    before = _threads()
    seconds = []
    with Telemetry(config, step, stopwatch, lambda text: None) as telemetry:
        for number in range(2 * rounds + 1):
            begin, looks = time.perf_counter(), number % 2 == 1
            if looks:
                telemetry.begin(number // 2 + 1)
            result = step.run(batches, 1e-4, 1e-3)
            if looks:
                rates = {"train.learning_rate": 1e-4, "train.batch_size": 8}
                telemetry.end(result.observed, result.gradient_norm, 1, rates)
                telemetry.send()
            seconds.append(time.perf_counter() - begin)
        client = sum(cpu for thread, cpu in _threads().items() if thread not in before)
    dist.destroy_process_group()
    ratios = [2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]) - 1 for i in range(1, len(seconds), 2)]
    step_share, client_share = statistics.median(ratios), client / rounds / statistics.median(seconds)
    spread = statistics.stdev(ratios) * 1.25 / len(ratios) ** 0.5
    return {"": step_share + client_share, "_of_which_client_threads": client_share, "_standard_error": spread}


def _cpu_seconds(server: Server) -> float:
    """Of all processes of a server."""
    processes = [psutil.Process(pid) for name, pid in server.pids.items() if name != "supervisor"]
    times = [one.cpu_times() for process in processes for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _threads() -> dict[int, float]:
    """CPU seconds of this process's threads."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """A function's result from a process in which nothing was set up."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# ------------------------------------------------------------------------------------------ the command


def _parts(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    def with_server(work: Callable[[Server], dict[str, float]]) -> dict[str, float]:
        settings = Settings(folder / "small", port=0, http_port=0)
        settings.folder.mkdir(exist_ok=True)
        with running(settings) as server:
            return work(server)

    def thread(server: Server) -> dict[str, float]:
        with _Busy():
            own = time_sending(server, folder, options.thread_values)
        alternatives = {
            "all_gather_ms": time_all_gather(folder, options.thread_values),
            "tensorboard_ms": time_tensorboard(folder, options.thread_values),
            "message_per_value_ms": time_message_per_value(server, folder, options.thread_values),
        }
        ratios = {name.replace("_ms", "_over_send"): ms / own["send_wall_p50_ms"] for name, ms in alternatives.items()}
        return own | alternatives | ratios

    yield "load", lambda: run_load(options.values, options.seconds, options.processes, options.receivers, options.rate)
    yield "thread", lambda: with_server(thread)

    def step() -> dict[str, float]:
        with receiver_alone(folder / "receiver") as address:
            alone = in_own_process(share_of_step, address, folder, options.rounds)
        return {f"share_of_tiny_step{part}": value for part, value in alone.items()} | with_server(beside)

    def beside(server: Server) -> dict[str, float]:
        """What a whole server has to do for a run of tiny, a frame a second or so."""
        rounds = max(1, options.rounds // 5)
        begin = _cpu_seconds(server)
        in_own_process(share_of_step, server.address, folder, rounds)
        return {"server_cpu_seconds_a_tiny_step": (_cpu_seconds(server) - begin) / rounds}

    yield "step", step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["load", "thread", "step"], help="one part instead of all")
    parser.add_argument("--values", type=int, default=1465, help="of each rank and iteration under load (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="of load (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of clients (%(default)s)")
    parser.add_argument("--rate", type=float, default=1.1, help="iterations a second that are sent (%(default)s)")
    parser.add_argument("--receivers", type=int, default=1, help="of the server (%(default)s)")
    parser.add_argument(
        "--thread-values", type=int, default=1465, help="a rank sends in the parts without load (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=100, help="steps of tiny with, and as many without (%(default)s)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for part, run in _parts(options, Path(name)):
            if options.only in (None, part):
                Console(width=100).print(f"{part} ...")
                figures |= run()
    rows = [[name, f"{value:.4g}", f"{TARGETS[name]:g}" if name in TARGETS else ""] for name, value in figures.items()]
    print_table(f"Metrics server, {WORLD:,} ranks x {options.values:,} values", ["figure", "seen", "target"], rows)
    print_result("metrics_server", figures, {name: TARGETS[name] for name in TARGETS if name in figures})


if __name__ == "__main__":
    main()
