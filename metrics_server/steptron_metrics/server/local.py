"""A server of one's own, for tests, benchmarks and other programs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steptron_metrics.errors import MetricsError
from steptron_metrics.server import child, status
from steptron_metrics.settings import Settings

_START_SECONDS = 90.0
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        address: host:port of gRPC.
        http_address: of API and page.
        folder: of the server.
    """

    address: str
    http_address: str
    folder: Path

    @property
    def pids(self) -> dict[str, int]:
        """Processes that run now, by name: "supervisor", "processor", "receiver 0", ..."""
        current = status.read(self.folder)
        return {} if current is None else {"supervisor": current.pid, **current.pids}


@contextlib.contextmanager
def running(settings: Settings, *, allow_unauthenticated: bool = False, niceness: int = 0) -> Iterator[Server]:
    """A server in processes of its own, from when it answers until the end of the block.

    It ends with this process, however that ends.

    Args:
        settings: see there.
        allow_unauthenticated: see :mod:`steptron_metrics.server.checks`.
        niceness: of its processes, added to this one's: more than 0 where a training on the same cores comes first.

    Raises:
        MetricsError: it does not start, and why.
    """
    orders = child.Orders("supervisor", settings, allow_unauthenticated=allow_unauthenticated)
    with tempfile.TemporaryFile() as errors:
        process = child.start(orders, stderr=errors)
        if niceness:  # before it starts others, which inherit it
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                current = status.read(settings.folder)
                if current is not None and current.pid == process.pid and current.ready:
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    errors.seek(0)
                    last = errors.read().decode(errors="replace").splitlines()[-20:]
                    raise MetricsError("\n".join(last) or "the server has not started")
                time.sleep(0.02)
            yield Server(current.address, current.http_address, settings.folder)
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
