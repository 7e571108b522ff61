"""``steptron`` in which chosen processes kill themselves at chosen moments: ``python -m tests.end_to_end.faulty …``.

``STEPTRON_TEST_KILLS`` names a folder with a file per kill, ``<number>-<point>-<rank>``. The process that comes to the
point of the lowest number removes the file and dies by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "STEPTRON_TEST_KILLS"


def die_at(point: str) -> None:
    """Kills this process if its death is the next one, and due here."""
    left = sorted(Path(os.environ[FOLDER]).iterdir(), key=lambda file: int(file.name.partition("-")[0]))
    if left and left[0].name.split("-", 1)[1] == f"{point}-{os.environ['RANK']}":
        left[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def before(module: Any, name: str, point: str) -> None:
    """Makes a function a point."""
    function: Callable[..., Any] = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        die_at(point)
        return function(*args, **kwargs)

    setattr(module, name, wrapped)


def after(module: Any, name: str, point: str) -> None:
    """Makes the end of a function a point."""
    function: Callable[..., Any] = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        die_at(point)
        return result

    setattr(module, name, wrapped)


def main() -> None:
    from steptron.platform import distributed

    start = distributed.start

    def start_with_faults(*args: Any) -> Any:
        joined = start(*args)
        from steptron.checkpoint import folder, loading, saving
        from steptron.train import step

        before(step.TrainStep, "_observe", "step")
        after(saving, "write_tensor_file", "write")
        before(saving, "publish", "before_rename")
        after(saving, "publish", "after_rename")
        before(loading, "set_random_states", "load")
        before(folder.shutil, "rmtree", "deletion")
        return joined

    distributed.start = start_with_faults
    from steptron.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
