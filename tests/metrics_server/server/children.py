"""Small processes for a supervisor to look after; each is a function that ``child`` calls with its orders."""

from __future__ import annotations

import os
import signal
import sys
import time

from steptron_metrics.errors import MetricsError
from steptron_metrics.server.child import Orders


def steady(orders: Orders) -> None:
    """Ends when it is told to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)


def deaf(orders: Orders) -> None:
    """Does not end when it is told to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.05)


def broken(orders: Orders) -> None:
    print("the reason why", file=sys.stderr, flush=True)
    sys.exit(7)


def wrong(orders: Orders) -> None:
    time.sleep(0.6)  # the supervisor looks every now and then whether the server answers
    raise MetricsError("database postgresql://nowhere: cannot be reached")


def parent(orders: Orders) -> None:
    """Has a steady child of its own, whose pid it writes to the folder."""
    from steptron_metrics.server import child

    process = child.start(Orders(f"{__name__}:steady", orders.settings))
    (orders.settings.folder / "grandchild").write_text(f"{process.pid}")
    while True:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs (is no zombie either)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.02)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
