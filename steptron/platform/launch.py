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

__all__ = ["LISTEN_FD", "Workers", "joined_size", "run_local", "under_launcher"]

LISTEN_FD = "STEPTRON_LISTEN_FD"
"""Environment variable of rank 0: file descriptor of the socket that already listens at MASTER_PORT."""

ORDERLY_EXIT_CODES = (0, os.EX_TEMPFAIL)
"""Exit codes after which the other workers go on: done, and stopped as asked."""

_LASTING_EXIT_CODES = (*ORDERLY_EXIT_CODES, UserError.exit_code)
"""Exit codes after which it would be no use to start again: those, and what the user has to mend."""

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
    stop_grace_seconds: float = 300.0,
    failure_grace_seconds: float = 10.0,
) -> int:
    """Runs ``python -m MODULE ARGUMENTS`` in local processes and waits for their end.

    Should a worker die or fail by anything that the user cannot mend (exit code 2), all are started again.

    The first Ctrl-C, a SIGTERM and a SIGHUP are passed on as SIGTERM: workers may write a checkpoint
    and end by themselves within ``stop_grace_seconds``; a second Ctrl-C kills them at once. SIGUSR1 is
    passed on. When a worker fails, the others are asked to end and are killed after
    ``failure_grace_seconds``.

    Args:
        nproc: number of processes.
        arguments: command line of each.
        module: module to run.
        max_restarts: how often the processes are started again.
        restart_arguments: command line of each when they are started again; ``arguments`` by default.
        stop_grace_seconds: time to end after a request to stop.
        failure_grace_seconds: time for the others to end once one has failed.

    Returns:
        Exit code of the worker that failed first (128 + n if signal n ended it); without a failure,
        the first code that is not 0 (75: stopped as asked), or 0.
    """
    for restart in range(max_restarts + 1):
        given = arguments if restart == 0 or restart_arguments is None else restart_arguments
        code, asked_to_stop = _run_once(nproc, given, module, stop_grace_seconds, failure_grace_seconds)
        if code in _LASTING_EXIT_CODES or asked_to_stop or restart == max_restarts:
            break
        _say(f"starting all {nproc} processes again (restart {restart + 1} of {max_restarts})")
    return code


def _run_once(
    nproc: int, arguments: Sequence[str], module: str, stop_grace_seconds: float, failure_grace_seconds: float
) -> tuple[int, bool]:
    """Starts the workers and looks after them to their end; the exit code, and whether they were asked to stop."""
    workers = Workers(nproc, arguments, module)
    requests: list[int] = []
    first_failed: int | None = None
    deadline: float | None = None
    stopping = False
    try:
        with _collecting_signals(requests):
            while workers.running:
                while requests:
                    number = requests.pop(0)
                    if number == signal.SIGUSR1:
                        workers.send(number)
                    elif not stopping:
                        stopping = True
                        deadline = time.monotonic() + stop_grace_seconds
                        _say(
                            f"{signal.Signals(number).name}: asked {nproc} processes to stop; they have "
                            f"{stop_grace_seconds:g} s to write a checkpoint (Ctrl-C once more kills them)"
                        )
                        workers.send(signal.SIGTERM)
                    elif number == signal.SIGINT:
                        _say("second Ctrl-C: killing the processes")
                        workers.kill()
                for rank in workers.poll():
                    if workers.exit_codes[rank] in ORDERLY_EXIT_CODES or first_failed is not None:
                        continue
                    first_failed = rank
                    deadline = min(deadline or math.inf, time.monotonic() + failure_grace_seconds)
                    workers.send(signal.SIGTERM)
                if workers.running and deadline is not None and time.monotonic() > deadline:
                    names = ", ".join(map(str, workers.running))
                    grace = stop_grace_seconds if first_failed is None else failure_grace_seconds
                    _say(f"killing rank(s) {names}: still running {grace:g} s after they were asked to end")
                    workers.kill()
                time.sleep(_POLL_SECONDS)
    finally:
        workers.kill()
    return _conclude(workers, first_failed), stopping


def _conclude(workers: Workers, first_failed: int | None) -> int:
    """Reports failed workers; returns the exit code of the whole."""
    failed = [rank for rank, code in sorted(workers.exit_codes.items()) if code not in ORDERLY_EXIT_CODES]
    if first_failed is not None:
        failed = [first_failed, *(rank for rank in failed if rank != first_failed)]
    for rank in failed:
        then = "then " if rank != failed[0] else ""
        _say(f"{then}rank {rank} of {len(workers.exit_codes)} {_describe(workers.exit_codes[rank])}")
    # What follows on the first failure are its consequences; rank 0 has already written to the terminal.
    for rank in failed[:1]:
        if tail := workers.tail(rank):
            _say(f"last output of rank {rank}:\n{tail}")
    if failed:
        if any(path.stat().st_size for path in workers.folder.iterdir()):
            _say(f"output of all ranks but 0: {workers.folder}")
        return workers.exit_codes[failed[0]]
    workers.remove_logs()
    return next((code for code in workers.exit_codes.values() if code), 0)


def _describe(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _say(text: str) -> None:
    print(f"steptron: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _collecting_signals(requests: list[int]) -> Iterator[None]:
    """Appends the signals that ask for something to a list instead of acting on them."""

    def collect(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_libc = ctypes.CDLL(None)


def _stop_with_parent() -> None:
    """In the worker, before it becomes Python: a launcher that is killed takes its workers along."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
