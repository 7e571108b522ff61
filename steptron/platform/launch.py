"""Starting local processes and looking after them.

Light on purpose (standard library only), so that the launching process starts its workers at once.
torch's own launcher kills a group 30 seconds after the first signal; here workers get the time that
a checkpoint needs, and the first rank keeps the terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from steptron.errors import UserError
from steptron.platform.world import under_launcher, world

__all__ = ["LISTEN_FD", "STOPPED_BEFORE_IT_BEGAN", "Workers", "joined_size", "run_local", "under_launcher"]

LISTEN_FD = "STEPTRON_LISTEN_FD"
"""Environment variable of rank 0: file descriptor of the socket that already listens at MASTER_PORT."""

STOPPED_BEFORE_IT_BEGAN = "stopped as asked before it began; the same command starts it"

ORDERLY_EXIT_CODES = (0, os.EX_TEMPFAIL)
"""Exit codes after which the other workers go on: done, and stopped as asked."""

_LASTING_EXIT_CODES = (*ORDERLY_EXIT_CODES, UserError.exit_code)
"""Exit codes after which it would be no use to start again: those, and what the user has to mend."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""A worker that one of them has ended was asked to stop, and handles no signals, or not yet."""

_POLL_SECONDS = 0.05
_TAIL_LINES = 40
_PR_SET_PDEATHSIG = 1


def joined_size(nproc: int | None) -> int | None:
    """Processes that torchrun or srun has started, this one among them; None where nobody has.

    Args:
        nproc: processes that the user asked for by --nproc.

    Raises:
        UserError: the launcher has started others than ``nproc``, in all or on this machine.
    """
    if not under_launcher():
        return None
    place = world()
    if nproc not in (None, place.size, place.local_size):
        raise UserError(
            f"--nproc {nproc}, but torchrun or srun has started this process as one of {place.size}: leave --nproc out"
        )
    return place.size


class Workers:
    """Local processes of ``python -m MODULE ARGUMENTS`` with torchrun's environment variables.

    Each is the leader of a session of its own, so that a terminal's Ctrl-C does not reach it. Output
    goes to one file per rank; rank 0 keeps this process's streams unless ``capture`` is set.
    """

    def __init__(self, nproc: int, arguments: Sequence[str], module: str = "steptron", capture: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="steptron-"))
        self.exit_codes: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        # -P: a folder named steptron where the command was given, such as the clone's parent holds, is no package.
        command = [sys.executable, "-P", "-m", module, *arguments]
        try:
            # Rank 0 inherits the listening socket: nobody can take the port in between.
            with socket.create_server(("127.0.0.1", 0), backlog=max(128, nproc)) as server:
                for rank in range(nproc):
                    self._start(rank, nproc, server, command, capture)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, nproc: int, server: socket.socket, command: list[str], capture: bool) -> None:
        environment = {
            # Between processes of one machine; without it gloo resolves the host's name, which need not work.
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.getsockname()[1]),
        }
        descriptors: list[int] = []
        if rank == 0:
            descriptors = [server.fileno()]
            environment[LISTEN_FD] = str(server.fileno())
        output = None if rank == 0 and not capture else self.log(rank).open("wb")
        try:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=descriptors,
                    start_new_session=True,
                    preexec_fn=_stop_with_parent,
                )
            )
        finally:
            if output is not None:
                output.close()

    def log(self, rank: int) -> Path:
        """File with a rank's output."""
        return self.folder / f"rank{rank}.log"

    def tail(self, rank: int) -> str:
        """Last lines of a rank's output, as far as it went to a file."""
        if not self.log(rank).exists():
            return ""
        lines = self.log(rank).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def poll(self) -> list[int]:
        """Ranks that have ended since the last call, those that failed first; see ``exit_codes``."""
        ended = []
        for rank, process in enumerate(self._processes):
            if rank not in self.exit_codes and (code := process.poll()) is not None:
                self.exit_codes[rank] = 128 - code if code < 0 else code
                ended.append(rank)
        return sorted(ended, key=lambda rank: self.exit_codes[rank] in ORDERLY_EXIT_CODES)

    @property
    def running(self) -> list[int]:
        """Ranks that had not ended at the last ``poll``."""
        return [rank for rank in range(len(self._processes)) if rank not in self.exit_codes]

    def send(self, number: int) -> None:
        """Sends a signal to every worker that is running (not to its own children)."""
        for rank in self.running:
            self._processes[rank].send_signal(number)

    def kill(self) -> None:
        """Kills every worker that is running, with its children, and waits for the end."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, signal.SIGKILL)
        for rank in self.running:
            self._processes[rank].wait()
        self.poll()

    def remove_logs(self) -> None:
        """Deletes the files with the workers' output."""
        shutil.rmtree(self.folder, ignore_errors=True)


def run_local(
    nproc: int,
    arguments: Sequence[str],
    *,
    module: str = "steptron",
    max_restarts: int = 0,
    restart_arguments: Sequence[str] | None = None,
    received: Sequence[int] = (),
    on_stop: str = "end",
    stop_grace_seconds: float = 300.0,
    failure_grace_seconds: float = 10.0,
) -> int:
    """Runs ``python -m MODULE ARGUMENTS`` in local processes and waits for their end.

    Should a worker die or fail by anything that the user cannot mend (exit code 2), all are started again.

    The first SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP is passed on as SIGTERM: workers may write a checkpoint and
    end by themselves within ``stop_grace_seconds``. Those that follow change nothing, but for the second Ctrl-C, which
    kills the workers. SIGHUP stays ignored where it was (nohup). After a request, the signals are ignored when this
    returns, since the process then only has to end; otherwise the handlers are restored. When a worker fails, the
    others are asked to end and are killed after ``failure_grace_seconds``.

    Args:
        nproc: number of processes.
        arguments: command line of each.
        module: module to run.
        max_restarts: how often the processes are started again.
        restart_arguments: command line of each when they are started again; ``arguments`` by default.
        received: those of the signals that this process got before; with one, nothing is started.
        on_stop: what the workers do in ``stop_grace_seconds``, for the message.
        stop_grace_seconds: time to end after a request to stop.
        failure_grace_seconds: time for the others to end once one has failed.

    Returns:
        Exit code of the worker that failed first (128 + n if signal n ended it); without a failure,
        the first code that is not 0, or 0. 75, stopped as asked, also stands for workers that a request
        ended at once, since they do not handle it or not yet, and for a stop before the workers start (again).
    """
    with _collecting_signals() as requests:
        # Not before the handlers are there: what came until then is in ``received``, the rest in ``requests``.
        requests.extend(received)
        for restart in range(max_restarts + 1):
            if requests:
                _say(STOPPED_BEFORE_IT_BEGAN if restart == 0 else "stopped as asked instead of starting again")
                return os.EX_TEMPFAIL
            if restart > 0:
                _say(f"starting all {nproc} processes again (restart {restart} of {max_restarts})")
            given = arguments if restart == 0 or restart_arguments is None else restart_arguments
            run = _Run(Workers(nproc, given, module), requests, on_stop, stop_grace_seconds, failure_grace_seconds)
            code = run.finish()
            if code in _LASTING_EXIT_CODES or run.stopping:
                break
    return code


class _Run:
    """Looks after workers to their end.

    Attributes:
        stopping: whether they, or one of them, were asked to stop before any of them had failed.
    """

    def __init__(
        self,
        workers: Workers,
        requests: Sequence[int],
        on_stop: str,
        stop_grace_seconds: float,
        failure_grace_seconds: float,
    ) -> None:
        self.stopping = False
        self._workers, self._requests, self._on_stop = workers, requests, on_stop
        self._stop_grace, self._failure_grace = stop_grace_seconds, failure_grace_seconds
        self._interrupts = 0  # SIGINTs that were answered
        self._first_failed: int | None = None
        self._cut_short: list[int] = []  # ranks that a request to stop ended at once
        self._deadline = math.inf

    def finish(self) -> int:
        """Waits for the end; the exit code of the whole."""
        try:
            while self._workers.running:
                self._answer_requests()
                for rank in self._workers.poll():
                    self._note_end(rank)
                if self._workers.running and time.monotonic() > self._deadline:
                    self._kill_late_ones()
                time.sleep(_POLL_SECONDS)
        finally:
            self._workers.kill()
        return self._conclude()

    def _answer_requests(self) -> None:
        interrupts = self._requests.count(signal.SIGINT)
        again = " (Ctrl-C once more kills them)" if interrupts else ""
        if self._requests and not self.stopping and self._first_failed is None:
            self.stopping = True
            self._deadline = time.monotonic() + self._stop_grace
            name, count = signal.Signals(self._requests[0]).name, len(self._workers.running)
            _say(f"{name}: asked {count} processes to stop; they have {self._stop_grace:g} s to {self._on_stop}{again}")
            self._workers.send(signal.SIGTERM)
        elif interrupts > self._interrupts and interrupts == 1:
            _say(f"SIGINT: the processes are ending already{again}")
        if interrupts > max(self._interrupts, 1):
            _say("second Ctrl-C: killing the processes")
            self._workers.kill()
        self._interrupts = interrupts

    def _note_end(self, rank: int) -> None:
        code = self._workers.exit_codes[rank]
        if code in ORDERLY_EXIT_CODES or self._first_failed is not None:
            return
        self._deadline = min(self._deadline, time.monotonic() + self._failure_grace)
        if not self.stopping:  # once is enough: a second SIGTERM could disturb what the first has begun
            self._workers.send(signal.SIGTERM)
        # A worker that handles no signals, or not yet; or that unwinds, as Python does at Ctrl-C.
        if code - 128 in _STOP_SIGNALS or (self.stopping and code == 128 + signal.SIGINT):
            self.stopping = True
            self._cut_short.append(rank)
        elif not self._cut_short:
            self._first_failed = rank

    def _kill_late_ones(self) -> None:
        names = _names(self._workers.running)
        if self._cut_short:
            _say(f"killing rank(s) {names}, which cannot go on without rank(s) {_names(self._cut_short)}")
        else:
            grace = self._stop_grace if self._first_failed is None else self._failure_grace
            _say(f"killing rank(s) {names}: still running {grace:g} s after they were asked to end")
        self._workers.kill()

    def _conclude(self) -> int:
        """Reports failed workers; returns the exit code of the whole."""
        workers = self._workers
        if self._cut_short:  # whatever became of the others: they could not go on
            _say(f"stopped as asked; rank(s) {_names(self._cut_short)} ended at once")
            workers.remove_logs()
            return os.EX_TEMPFAIL
        codes = dict(sorted(workers.exit_codes.items()))
        failed = [rank for rank, code in codes.items() if code not in ORDERLY_EXIT_CODES]
        if self._first_failed is not None:
            failed = [self._first_failed, *(rank for rank in failed if rank != self._first_failed)]
        for rank in failed:
            then = "then " if rank != failed[0] else ""
            _say(f"{then}rank {rank} of {len(codes)} {_describe(codes[rank])}")
        # What follows on the first failure are its consequences; rank 0 has already written to the terminal.
        for rank in failed[:1]:
            if tail := workers.tail(rank):
                _say(f"last output of rank {rank}:\n{tail}")
        if failed:
            if any(path.stat().st_size for path in workers.folder.iterdir()):
                _say(f"output of all ranks but 0: {workers.folder}")
            return codes[failed[0]]
        workers.remove_logs()
        return next((code for code in codes.values() if code), 0)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _describe(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _say(text: str) -> None:
    # After a SIGHUP there may be nobody to read it: no reason to leave the workers alone.
    with contextlib.suppress(OSError):
        print(f"steptron: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _collecting_signals() -> Iterator[list[int]]:
    """Appends the signals that ask for a stop to a list instead of acting on them; ignores them afterwards if any
    came."""
    requests: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    numbers = [signal.SIGINT, *_STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if requests else handler)


_libc = ctypes.CDLL(None)


def _stop_with_parent() -> None:
    """In the worker, before it becomes Python: a launcher that is killed takes its workers along."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
