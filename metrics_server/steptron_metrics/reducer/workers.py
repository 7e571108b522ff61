"""Reducer processes and what they are busy with."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import steptron_metrics
from steptron_metrics.protocol.description import Limits
from steptron_metrics.reducer.job import Job
from steptron_metrics.reducer.worker import Gone, finished, receive, send
from steptron_metrics.results import Event, Iteration

ATTEMPTS = 3
"""A job over which so many processes have died, or were too slow, is given up."""
FAILED = "not reduced"
"""Kind of the event of an iteration that was given up."""
_RESTART_SECONDS = 0.5
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from steptron_metrics.reducer.worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)

_ENVIRONMENT = {
    # One thread each: there are as many processes as cores are meant for this.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc: arrays of a few MB come from memory that is kept, instead of fresh pages that the kernel has to clear
    # each time, which would take longer than the reducing.
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}

_log = logging.getLogger(__name__)


class Vanished(NamedTuple):
    """Key of a job whose values are no longer there: its run has been deleted, or its segment pruned."""

    run: str
    session_ns: int
    iteration: int


class Work(NamedTuple):
    """What a worker has done.

    Attributes:
        pid: of its process; 0 while none runs.
        restarts: how often its process was started again.
        iterations: done.
        busy_seconds: that they took.
    """

    pid: int
    restarts: int
    iterations: int
    busy_seconds: float


class Reducers:
    """Processes that do jobs. When one dies, a new one does its job again.

    A job over which ``ATTEMPTS`` processes die, or that they cannot do, comes back as an iteration without aggregates
    whose event ``FAILED`` says why, so that it is not tried for ever. The processes end with the one that made this
    object, also when that is killed. For one thread.

    Args:
        number: of processes.
        limits: of descriptions, as the receivers have them.
        nice: added to their niceness, so that receivers come first.
        timeout_seconds: for a job.
        queued: jobs beyond those being done that are taken.
    """

    def __init__(
        self,
        number: int,
        limits: Limits | None = None,
        *,
        nice: int = 5,
        timeout_seconds: float = 300.0,
        queued: int = 1,
    ) -> None:
        self._capacity = number + queued
        self._in_flight = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Iteration | Vanished] = queue.SimpleQueue()
        self._workers = [
            _Worker(f"reducer {index}", self._jobs, self._results, limits or Limits(), nice, timeout_seconds)
            for index in range(number)
        ]

    @property
    def room(self) -> int:
        """How many jobs ``submit`` takes."""
        return self._capacity - self._in_flight

    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in (worker.process for worker in self._workers) if process is not None]

    def work(self) -> list[Work]:
        """Of each worker; for any thread."""
        return [
            Work(
                0 if (process := worker.process) is None else process.pid,
                worker.restarts,
                worker.iterations,
                worker.busy_seconds,
            )
            for worker in self._workers
        ]

    def submit(self, job: Job) -> None:
        """Takes a job; at once.

        Raises:
            RuntimeError: there is no room.
        """
        if self.room <= 0:
            raise RuntimeError(f"the reducers have {self._in_flight} jobs already")
        self._in_flight += 1
        self._jobs.put(job)

    def results(self, timeout: float = 0.0) -> list[Iteration | Vanished]:
        """What has been done since the last call; waits for the first at most ``timeout`` seconds."""
        results: list[Iteration | Vanished] = []
        with contextlib.suppress(queue.Empty):
            results.append(self._results.get(timeout=timeout) if timeout > 0 else self._results.get_nowait())
            while True:
                results.append(self._results.get_nowait())
        self._in_flight -= len(results)
        return results

    def close(self, timeout: float = 5.0) -> None:
        """Ends the processes. Jobs that are not done are left: the tracker of the next start finds them again."""
        for worker in self._workers:
            worker.closing.set()
        for _ in self._workers:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.end(max(deadline - time.monotonic(), 0.1))


class _Worker:
    """A process, and the thread that speaks to it."""

    def __init__(
        self,
        name: str,
        jobs: queue.SimpleQueue[Job | None],
        results: queue.SimpleQueue[Iteration | Vanished],
        limits: Limits,
        nice: int,
        timeout_seconds: float,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.closing = threading.Event()
        self.restarts = -1  # the first start is none
        self.iterations = 0
        self.busy_seconds = 0.0
        self._jobs = jobs
        self._results = results
        self._limits = limits
        self._nice = nice
        self._timeout = timeout_seconds
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, timeout: float) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("%s has not ended within %.1f s", self.name, timeout)

    def _run(self) -> None:
        self._start()
        while True:
            job = self._jobs.get()
            if job is None or self.closing.is_set():
                break
            begin = time.monotonic()
            result = self._perform(job)
            self.busy_seconds += time.monotonic() - begin
            self.iterations += isinstance(result, Iteration)
            if result is not None:
                self._results.put(result)
        self._stop()

    def _perform(self, job: Job) -> Iteration | Vanished | None:
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._ask(job)
            except (EOFError, OSError) as error:
                reason = self._stop(error)
                if self.closing.is_set():
                    return None
                _log.error("%s, doing %s, attempt %d of %d: %s", self.name, job, attempt, ATTEMPTS, reason)
                self._start()
                continue
            if isinstance(answer, Iteration):
                return answer
            if isinstance(answer, Gone):
                _log.info("%s: the values of %s are gone: %s", self.name, job, answer)
                return Vanished(*job.key)
            reason = str(answer)
            _log.error("%s cannot do %s: %s", self.name, job, reason)
            break
        return finished(job, [], [], (Event(FAILED, reason[:1000]),))

    def _ask(self, job: Job) -> Any:
        if self.process is None or self.process.poll() is not None:
            self._stop()
            self._start()  # it died idle, which is not the job's fault
        if self._connection is None:
            raise OSError("no process can be started")
        send(self._connection, job)
        return receive(self._connection)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # A process that is stopped or hangs is noticed by this.
        ours.settimeout(self._timeout)
        root = str(Path(steptron_metrics.__file__).resolve().parents[1])
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, root, str(theirs.fileno()), str(self._nice)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | _ENVIRONMENT,
                )
            self._connection = ours
            self.restarts += 1
            send(ours, self._limits)
        except OSError as error:
            _log.error("%s does not start: %s", self.name, error)
            self.closing.wait(_RESTART_SECONDS)

    def _stop(self, error: Exception | None = None) -> str:
        """Ends the process, if it has not ended itself; how it did."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.process is None:
            return str(error)
        if isinstance(error, TimeoutError):
            ended = f"process {self.process.pid} has not answered within {self._timeout:g} s"
        else:
            # Its end of the socket is closed, which ends it; it may take a moment to be seen.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
            ended = f"process {self.process.pid} has ended with status {self.process.poll()}"
        self.process.kill()
        self.process.wait()
        self.process = None
        return ended
