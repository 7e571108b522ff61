"""A process of a run under ``Watch``: ``python -m tests.platform.watched MODE FOLDER``, with torchrun's environment."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from steptron.errors import UserError
from steptron.platform import distributed
from steptron.platform.watch import Watch

DEAD_AFTER = 3.0


def wait_for_others() -> None:
    """Stands for a collective that never ends."""
    time.sleep(60)


def work_on() -> None:
    """Stands for a step that never ends."""
    time.sleep(60)


def run(mode: str, folder: Path) -> int:
    place = distributed.world()
    store = distributed.meet(place, timedelta(seconds=60))
    victim = 0 if mode in ("kill-first", "stop-first") else 1
    hang_after = 1.0 if mode == "hang" else None
    try:
        with Watch(store, place.rank, place.size, DEAD_AFTER, hang_after, folder) as watch:
            watch.progress("step 7")
            store.add("ready", 1)
            while store.add("ready", 0) < place.size:
                time.sleep(0.05)
            # Where the store stops, it must not keep the main thread of anybody else.
            store.add("past the store", int(place.rank != victim))
            while place.rank == victim and store.add("past the store", 0) < place.size - 1:
                time.sleep(0.05)
            if place.rank == victim:
                act(mode)
            elif mode == "broken":
                while not (folder / "broken").exists():
                    time.sleep(0.05)
                time.sleep(0.5)
                raise RuntimeError("Connection closed by peer")
            elif mode == "stop-first" and place.rank == 2:
                time.sleep(0.5)
                raise RuntimeError("Connection closed by peer")
            elif mode in ("done", "stop-last"):
                time.sleep(1.0)
            else:
                wait_for_others()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def act(mode: str) -> None:
    if mode.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "broken":
        Path(sys.argv[2], "broken").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_others()
    elif mode == "error":
        raise ValueError("the seventh sample is empty")
    elif mode == "hang":
        work_on()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], Path(sys.argv[2])))
