"""What the tests of the launcher start: ``python -m tests.platform.launched MODE FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def _write(file: Path, text: str) -> None:
    """Whoever waits for the file finds all of it."""
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)


def main(mode: str, folder: Path) -> int:
    """Acts as a worker; returns its exit code."""
    rank = int(os.environ["RANK"])
    stop: list[int] = []
    if mode != "late" or rank == 0:  # the others are not yet ready for signals
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    _write(folder / f"pid-{rank}", str(os.getpid()))
    if mode == "environment":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        _write(folder / f"environment-{rank}", " ".join(os.environ[name] for name in names))
        print(f"output of rank {rank}")
        return 0
    if mode in ("fail", "wait", "die") and rank == 1:
        # Not before the others can take the signal that follows.
        while not all((folder / f"pid-{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.01)
    if mode in ("once", "again"):
        (folder / f"{mode}-{rank}").touch()
        return 1 if mode == "once" and rank == 1 else 0
    if mode == "mend" and rank == 0:
        with (folder / "starts").open("a") as file:
            file.write("x")
        return 2
    if mode in ("fail", "wait") and rank == 1:
        print("the reason", file=sys.stderr)
        return 3
    if mode == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if stop and mode not in ("hang", "wait", "late"):
            time.sleep(0.3 * (1 + rank))  # a checkpoint takes its time, and not the same on every rank
            _write(folder / f"saved-{rank}", f"asked {len(stop)} times")
            return os.EX_TEMPFAIL
        time.sleep(0.02)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
