"""One server per folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from steptron_metrics.errors import MetricsError
from steptron_metrics.server import status

FILE = "server.lock"


class FolderLock:
    """Holds a server's folder, until it is closed and all processes that inherited it have ended.

    Args:
        folder: of the server.
        patience_seconds: how long the children of a server that was killed are waited for.

    Raises:
        MetricsError: another server holds the folder; the message names its process and addresses.

    Attributes:
        fd: for children to inherit, so that no other server begins while one of them still writes.
    """

    def __init__(self, folder: Path, patience_seconds: float = 15.0) -> None:
        self.fd = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pid = os.pread(self.fd, 32, 0).decode(errors="replace").strip()
                if _runs(pid) or time.monotonic() > deadline:
                    os.close(self.fd)
                    raise MetricsError(_taken(folder, pid)) from None
                time.sleep(0.1)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self.fd)


def _runs(pid: str) -> bool:
    if not pid.isdigit():
        return True  # it has only just begun
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # dead, though its parent has not asked


def _taken(folder: Path, pid: str) -> str:
    other = status.read(folder)
    where = f", receiving on {other.address}, page on {other.http_address}/" if other is not None else ""
    who = f"a server runs in it already (process {pid}{where})"
    if not _runs(pid):
        who = f"processes of a server that was killed (process {pid}) still run in it"
    return f"{folder}: {who}: stop it, or give this one another folder"
