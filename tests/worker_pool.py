"""A pool of worker processes that serves every multi-process test of a session.

Starting Python, torch and Megatron-Core takes seconds, joining a gloo group milliseconds. The
workers are therefore forked from one server process that has imported everything (multiprocessing's
``forkserver``), live for the whole session and form a new process group for each task.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LOG_TAIL = 4000  # characters of a worker's output that a failure shows
PEER_GRACE_SECONDS = 5.0  # how long the others may go on once one rank has failed


class WorkerError(AssertionError):
    """A worker raised, died or did not answer; the message names ranks and shows tracebacks."""


@dataclass(frozen=True)
class _Task:
    """What a worker is told to do. ``function_and_args`` is a pickle, read once ``sys_path`` is set."""

    rank: int
    world_size: int
    store: str
    timeout_seconds: float
    sys_path: list[str]
    function_and_args: bytes


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path

    def log_tail(self, start: int = 0) -> str:
        with self.log.open(errors="replace") as stream:
            stream.seek(start)
            return stream.read()[-LOG_TAIL:]


COLLECT_EVERY = 8  # tasks of a worker


class WorkerPool:
    """Runs functions in gloo groups of 1 to ``size`` processes.

    Workers are started at first use and restarted after a failure that leaves them in doubt.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._tasks = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(rank, world_size, *args)`` in every rank of a new gloo default group.

        Args:
            world_size: number of processes, at most ``size``.
            function: function at module scope, in a module that this process could import. It sets up
                Megatron's groups itself; they are destroyed after it has returned.
            args: arguments, the same for all ranks; pickled, like the results.
            timeout: seconds for all ranks to answer, and the timeout of the group's collectives.

        Returns:
            The results by rank.

        Raises:
            WorkerError: a rank raised, died, or did not answer in time.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size is {world_size}; the pool has 1 to {self.size} workers")
        self._start(world_size)
        assert self._folder is not None
        self._tasks += 1
        store = self._folder / f"store-{self._tasks}"
        payload = pickle.dumps((function, args))
        workers = self._workers[:world_size]
        log_starts = [worker.log.stat().st_size for worker in workers]
        for rank, worker in enumerate(workers):
            task = _Task(rank, world_size, str(store), timeout, sys.path, payload)
            worker.connection.send_bytes(pickle.dumps(task))
        answers, late = self._collect(workers, timeout)
        failures = [_describe(rank, answer) for rank, answer in answers.items() if answer[0] != "result"]
        if late and not failures:
            stacks = self._stacks(workers, late)
            self.close()
            raise WorkerError(f"ranks {late} of {world_size} did not answer within {timeout:g} s\n{stacks}")
        if failures:
            for rank in answers:
                if tail := workers[rank].log_tail(log_starts[rank]).strip():
                    failures.append(f"--- output of rank {rank}:\n{tail}")
            if late or any(answer[0] == "death" for answer in answers.values()):
                self.close()
            if late:
                failures.append(f"ranks {late} were still busy {PEER_GRACE_SECONDS:g} s later and were killed")
            raise WorkerError("\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Ends all workers; a later ``run`` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, count: int) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="steptron-pool-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.worker_preload"])
        with _environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])):
            forkserver.ensure_running()
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            log = self._folder / f"worker-{len(self._workers)}.log"
            log.touch()
            # Not a daemon: checkpoint writers start processes of their own.
            process = context.Process(target=_serve, args=(theirs, str(log)), daemon=False)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _collect(self, workers: list[_Worker], timeout: float) -> tuple[dict[int, tuple[str, Any]], list[int]]:
        """Gathers the answers by rank, and the ranks that gave none."""
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    workers[rank].process.join(5)
                    answers[rank] = ("death", workers[rank].process.exitcode)
                if answers[rank][0] != "result":
                    deadline = min(deadline, time.monotonic() + PEER_GRACE_SECONDS)
        return answers, sorted(waiting.values())

    def _stacks(self, workers: list[_Worker], ranks: list[int]) -> str:
        starts = {rank: workers[rank].log.stat().st_size for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank].process.pid or 0, signal.SIGUSR2)
        time.sleep(0.5)
        return "\n".join(f"--- stack of rank {rank}:\n{workers[rank].log_tail(starts[rank])}" for rank in ranks)


def _describe(rank: int, answer: tuple[str, Any]) -> str:
    kind, content = answer
    return f"rank {rank} raised:\n{content}" if kind == "error" else f"rank {rank} died with exit code {content}"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, log: str) -> None:
    """Life of a worker: one task after the other until the pool closes the connection."""
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    faulthandler.enable(file=2)  # a worker that crashes says where
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pool
    import torch

    torch.set_num_threads(1)
    _share_gloo_device()
    gc.collect()
    gc.freeze()  # what is imported stays: the collections after each task pass over it
    for number in itertools.count(1):
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps(("result", _perform(task)))
        except BaseException:
            answer = pickle.dumps(("error", traceback.format_exc()))
        connection.send_bytes(answer)
        if number % COLLECT_EVERY == 0:
            # Groups that cycles still hold keep their threads, and each of gloo's wakes a hundred times a second.
            gc.collect()


def _share_gloo_device() -> None:
    """Lets all gloo groups of this process use one device.

    Each has its own otherwise, with a thread that wakes a hundred times a second: with sixty groups, 5 % of a core.
    """
    from torch.distributed import distributed_c10d

    gloo: type[Any] = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class SharedDevice(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice


def _perform(task: _Task) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    sys.path[:] = task.sys_path
    function, args = pickle.loads(task.function_and_args)
    store = dist.FileStore(task.store, task.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout_seconds),
    )
    dist.barrier()  # a rank that ends at once must not leave while others still connect to it
    try:
        return function(task.rank, task.world_size, *args)
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
