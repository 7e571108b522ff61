"""Where the threads of this process are."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path
from typing import Any

STACKS = "stacks"
"""Folder in a run's output with the stacks of the processes of a run that hung."""

_WAITING = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}megatron{os.sep}core{os.sep}")
"""Code in which a process waits for others."""


def write_stacks(folder: Path, rank: int) -> None:
    """Writes the stacks of all threads of this process to ``rank-NNNNN.txt`` in a folder, made where missing.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank:05d}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def location(thread: int) -> dict[str, Any]:
    """Where a thread is, for a message: its innermost line outside the code in which processes wait for each other.

    Args:
        thread: its ``ident``.

    Returns:
        ``waits``: whether it is in such code; ``at``: file, line and function.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    if not stack:
        return {"waits": False, "at": "an unknown place"}
    ours = [entry for entry in stack if not any(part in entry.filename for part in _WAITING)]
    entry = ours[-1] if ours else stack[-1]
    return {
        "waits": any(part in stack[-1].filename for part in _WAITING),
        "at": f"{entry.filename}:{entry.lineno} in {entry.name}",
    }
