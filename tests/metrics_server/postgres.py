"""A PostgreSQL server for this pytest process, started by the project's own script when a test first asks for it."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg

SCRIPT = Path(__file__).parents[2] / "tools" / "postgres_for_tests.sh"
_numbers = itertools.count()


def start(folder: Path) -> str:
    """Starts a server in a folder; its URL."""
    done = subprocess.run(
        ["sh", str(SCRIPT), "start", str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def halt(folder: Path) -> None:
    """Stops it as if it were killed."""
    subprocess.run(["sh", str(SCRIPT), "halt", str(folder)], timeout=90, check=True, stderr=subprocess.PIPE)


def resume(folder: Path) -> None:
    """Starts one again that was halted."""
    # To no pipe: the server keeps what it inherits.
    subprocess.run(["sh", str(SCRIPT), "resume", str(folder)], timeout=90, check=True, stderr=subprocess.DEVNULL)


def stop(folder: Path) -> None:
    subprocess.run(["sh", str(SCRIPT), "stop", str(folder)], timeout=90, check=True, stderr=subprocess.PIPE)


@functools.cache
def server() -> str:
    """URL of this process's server."""
    # Not in pytest's folder, which the user who runs the server may not enter.
    folder = Path(tempfile.mkdtemp(prefix="steptron-pg-"))
    folder.chmod(0o755)
    url = start(folder / "server")

    def end() -> None:
        stop(folder / "server")
        shutil.rmtree(folder)

    atexit.register(end)
    return url


def new_database() -> str:
    """URL of a database that is empty."""
    url = server()
    name = f"test{next(_numbers)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return url.replace("/postgres?", f"/{name}?")
