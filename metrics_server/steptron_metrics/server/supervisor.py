"""Starts the processes of a server, and starts them again when they die."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from steptron_metrics.errors import MetricsError
from steptron_metrics.server import child, logs, status
from steptron_metrics.server.checks import check
from steptron_metrics.server.child import USER_ERROR, Orders
from steptron_metrics.server.lock import FolderLock
from steptron_metrics.server.ports import Reserved, written
from steptron_metrics.settings import Settings

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LAST_LINES = 20


@dataclass(frozen=True)
class Patience:
    """How long things may take.

    Attributes:
        start_seconds: until a server answers.
        young_seconds: a process that dies before has died at once.
        most_young: so many in a row by an error of their own end the server.
        first_pause_seconds, longest_pause_seconds: before a process is started again; doubled each time that it dies at
            once.
        end_seconds: a process gets that long to end.
    """

    start_seconds: float = 60.0
    young_seconds: float = 10.0
    most_young: int = 5
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 15.0
    end_seconds: float = 15.0


class Child:
    """A process that is kept running."""

    def __init__(self, orders: Orders, patience: Patience, pass_fds: Sequence[int]) -> None:
        self.name = orders.name
        self.restarts = 0
        self._orders, self._patience, self._pass_fds = orders, patience, pass_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._started = 0.0
        self._start_at = 0.0
        self._young = 0
        self._faults = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._lines.clear()
        self._process = child.start(self._orders, stderr=subprocess.PIPE, pass_fds=self._pass_fds)
        self._reader = threading.Thread(target=self._pass_on, args=(self._process,), daemon=True)
        self._reader.start()
        self._started = time.monotonic()

    def watch(self, is_starting: bool) -> bool:
        """Looks after it; whether anything has changed.

        Args:
            is_starting: the server has not answered yet: an error that a user has to mend ends it.

        Raises:
            MetricsError: there is no use in starting it again; the message has its last lines.
        """
        now = time.monotonic()
        if self._process is None:
            if now < self._start_at:
                return False
            self.restarts += 1
            self.start()
            log.info("%s is started again, process %d", self.name, self.pid)
            return True
        code = self._process.poll()
        if code is None:
            if now - self._started >= self._patience.young_seconds:
                self._young = self._faults = 0
            return False
        self._died(code, now, is_starting)
        return True

    def end(self, kill: bool = False) -> None:
        """Asks it to end, or makes it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def wait(self, deadline: float, hurry: threading.Event) -> None:
        """Waits until it has ended, or kills it at the deadline."""
        if self._process is None:
            return
        while self._process.poll() is None and time.monotonic() < deadline and not hurry.is_set():
            time.sleep(0.02)
        if self._process.poll() is None:
            log.error("%s, process %d, has not ended: it is killed", self.name, self._process.pid)
            self._process.kill()
        self._process.wait()
        self._close()

    def _died(self, code: int, now: float, is_starting: bool) -> None:
        assert self._process is not None
        pid, lived = self._process.pid, now - self._started
        self._close()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        if code == USER_ERROR and is_starting:
            raise MetricsError("\n".join(self._lines) or f"{self.name} has ended {how}")
        log.error("%s, process %d, has died %s after %.1f s", self.name, pid, how, lived)
        self._young = self._young + 1 if lived < self._patience.young_seconds else 0
        # What others do to it (kill -9, the memory killer) is no reason to give up, and neither is what a user can mend
        # meanwhile, such as a database that is away: the server has run with these settings.
        is_fault = code not in (-signal.SIGKILL, -signal.SIGTERM, USER_ERROR)
        self._faults = self._faults + 1 if is_fault and lived < self._patience.young_seconds else 0
        if self._faults >= self._patience.most_young:
            last = "\n".join(f"  {line}" for line in self._lines)
            raise MetricsError(f"{self.name} has died {self._faults} times at once, the last time {how}:\n{last}")
        pause = self._patience.first_pause_seconds * 2 ** max(self._young - 1, 0)
        self._start_at = now + min(pause, self._patience.longest_pause_seconds)

    def _close(self) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stderr is not None
        if self._reader is not None:
            # Grandchildren may hold its stderr a moment longer.
            self._reader.join(2.0)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process = None

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                logs.pass_on(text)


class Supervisor:
    """Keeps children running until it is told to end.

    Args:
        children: in the order in which they are started; they are ended in the opposite one.
        answers: whether the server does.
        changed: called with the pids and restarts by name whenever they are others.
        ready: called when the server answers for the first time.
        patience: see there.
    """

    def __init__(
        self,
        children: Sequence[Child],
        answers: Callable[[], bool],
        changed: Callable[[dict[str, int], dict[str, int]], None],
        ready: Callable[[], None],
        patience: Patience,
    ) -> None:
        self._children, self._answers, self._changed, self._ready = children, answers, changed, ready
        self._patience = patience
        self._stop, self._hurry = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Ends everything in order; a second time: at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def run(self) -> None:
        """Until :meth:`stop`.

        Raises:
            MetricsError: a process cannot be kept running, or the server does not come to answer.
        """
        deadline = time.monotonic() + self._patience.start_seconds
        is_starting = True
        try:
            for one in self._children:
                one.start()
            self._say()
            while not self._stop.wait(_POLL_SECONDS):
                if any([one.watch(is_starting) for one in self._children]):
                    self._say()
                if is_starting and self._answers():
                    is_starting = False
                    self._ready()
                if is_starting and time.monotonic() > deadline:
                    seconds = self._patience.start_seconds
                    raise MetricsError(f"the server does not answer after {seconds:g} s, see its log")
        finally:
            self._end()

    def _say(self) -> None:
        pids = {one.name: one.pid for one in self._children if one.pid is not None}
        self._changed(pids, {one.name: one.restarts for one in self._children})

    def _end(self) -> None:
        deadline = time.monotonic() + self._patience.end_seconds
        for one in reversed(self._children):
            one.end()
            one.wait(deadline, self._hurry)


def serve(settings: Settings, *, allow_unauthenticated: bool = False, patience: Patience = Patience()) -> int:
    """Runs a server until SIGINT or SIGTERM; prints its addresses when it answers.

    Args:
        settings: of the server; ports 0 take free ones.
        allow_unauthenticated: others than this machine may connect without tokens.
        patience: see there.

    Returns:
        0.

    Raises:
        MetricsError: it cannot start, or a process of it dies again and again.
    """
    check(settings, allow_unauthenticated=allow_unauthenticated)
    settings = replace(settings, folder=settings.folder.resolve())
    with contextlib.ExitStack() as stack:
        lock = FolderLock(settings.folder)
        stack.callback(lock.close)
        handlers = logs.set_up(settings.folder, "supervisor")
        stack.callback(logs.take_down, handlers)
        grpc_port = Reserved(settings.host, settings.port, shared=True, what="port")
        stack.callback(grpc_port.close)
        http_port = Reserved(settings.host, settings.http_port, shared=False, what="http_port")
        stack.callback(http_port.close)
        settings = replace(settings, port=grpc_port.port, http_port=http_port.port)
        scheme = "http" if settings.certificate is None else "https"
        current = status.Status(
            pid=os.getpid(),
            address=written(settings.host, settings.port),
            http_address=f"{scheme}://{written(settings.host, settings.http_port)}",
            started_ns=time.time_ns(),
        )
        stack.callback(status.remove, settings.folder)

        def changed(pids: dict[str, int], restarts: dict[str, int]) -> None:
            nonlocal current
            current = replace(current, pids=pids, restarts=restarts)
            status.write(settings.folder, current)

        def ready() -> None:
            nonlocal current
            current = replace(current, ready=True)
            status.write(settings.folder, current)
            line = f"receiving on {current.address}, page on {current.http_address}/"
            log.info("%s", line)
            print(line, flush=True)

        orders = [Orders("processor", settings), *(Orders("receiver", settings, n) for n in range(settings.receivers))]
        children = [Child(one, patience, (lock.fd,)) for one in orders]
        supervisor = Supervisor(children, lambda: answers(settings), changed, ready, patience)
        with _signals(supervisor.stop):
            supervisor.run()
        log.info("the server has ended")
    return 0


def answers(settings: Settings) -> bool:
    """Whether receivers and API do."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    scheme = "http" if settings.certificate is None else "https"
    # Only whether something answers is asked, not who.
    context = ssl._create_unverified_context() if scheme == "https" else None
    url = f"{scheme}://{written(host, settings.http_port)}/healthz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with socket.create_connection((host, settings.port), timeout=1.0):
            pass
        with opener.open(url, timeout=2.0):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM stop it; in another thread than the main one, which alone gets signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {one: signal.signal(one, lambda *_: stop()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)
