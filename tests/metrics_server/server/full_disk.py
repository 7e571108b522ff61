"""A server on a small disk that becomes full: run by ``test_full_disk`` as a program of its own, in a namespace where
it may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from steptron_metrics.client import MetricsClient
from steptron_metrics.protocol.description import Series
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings
from tests.metrics_server.server.talking import asked, until

DISK, FREE = 200 << 20, 20 << 20
ITEMS = 20_000


class Sender:
    def __init__(self, server: Server, run: str, spool: Path) -> None:
        self.client = MetricsClient(server.address, run, time.time_ns(), 1, spool=spool / run)
        self._layout = self.client.describe([Series("a.values", 0, count=ITEMS)])

    def send(self, iteration: int) -> None:
        values = np.random.default_rng(iteration).random(ITEMS, np.float32)
        now = time.time_ns()
        self.client.send(0, iteration, self._layout, values, ended_ns=now, seconds=1.0, consumed_tokens=iteration)


def runs(server: Server) -> dict[str, int]:
    return {run["name"]: run["iterations"] for run in asked(server, "/api/v1/runs")}


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def fill(file: Path, left: int) -> None:
    """Takes the disk's room, all but so much. The server takes some and frees some meanwhile."""
    with open(file, "ab") as more:
        for _ in range(50):
            if (room := free(file.parent) - left) <= 0:
                break
            with contextlib.suppress(OSError):
                os.posix_fallocate(more.fileno(), file.stat().st_size, room)


def main(disk: Path, spool: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True, timeout=10)
    with running(Settings(disk / "server", port=0, http_port=0, min_free_bytes=FREE)) as server:
        pid = server.pids["processor"]
        one, other = Sender(server, "one", spool), Sender(server, "other", spool)
        for iteration in range(1, 11):
            one.send(iteration)
        other.send(1)
        until(lambda: runs(server) == {"one": 10, "other": 1}, "nothing is stored")

        # Others fill the disk: below what is to stay free nothing is stored, and that is told.
        fill(disk / "others", FREE + (1 << 20))
        for iteration in range(11, 40):
            one.send(iteration)
            other.send(iteration - 9)
        until(lambda: "--min-free-gb" in (asked(server, "/api/v1/server")["trouble"] or ""), "no trouble is told")
        assert asked(server, "/healthz") == {"status": "trouble"}
        assert free(disk) > FREE // 2, "the server has filled the disk"
        # Then to the last byte.
        fill(disk / "others", 0)
        with contextlib.suppress(OSError):
            (disk / "last").write_bytes(bytes(1 << 20))
        assert free(disk) < 1 << 20

        began = time.monotonic()
        request = urllib.request.Request(f"{server.http_address}/api/v1/runs/one?force=true", method="DELETE")
        with urllib.request.urlopen(request, timeout=25) as answer:
            assert answer.status == 204
        assert time.monotonic() - began < 15
        assert "one" not in runs(server) or runs(server)["one"] < 10  # what is sent after it is a new run's

        # Room again: everything goes on, without a restart.
        (disk / "others").unlink()
        (disk / "last").unlink(missing_ok=True)
        until(lambda: other.client.status().stored == 30, "frames are not taken")
        until(lambda: runs(server).get("other") == 30, "nothing is stored after the disk has room")
        until(lambda: asked(server, "/healthz") == {"status": "ok"}, "trouble does not end")
        assert server.pids["processor"] == pid
        one.client.close()
        assert other.client.close().dropped == 0
    print("went on")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except urllib.error.HTTPError as error:
        sys.exit(f"{error}: {error.read(1000)!r}")
