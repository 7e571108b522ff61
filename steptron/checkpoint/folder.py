"""Checkpoint folders of a run: names, the newest one, retention."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from steptron.errors import UserError

_NAME = re.compile(r"step_(\d{8})")
MANIFEST = "steptron.json"


def checkpoint_folder(output: Path, step: int) -> Path:
    """``<output>/checkpoints/step_00000100``"""
    return output / "checkpoints" / f"step_{step:08d}"


def list_checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first: those whose manifest, written last, is there."""
    root = output / "checkpoints"
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file())


def resolve(path: Path) -> Path:
    """The checkpoint that a user means: a checkpoint folder itself, or the newest one of a run's folder.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    checkpoints = list_checkpoints(path) or list_checkpoints(path.parent)
    if not path.is_dir() or not checkpoints:
        raise UserError(
            f"{path} is not a checkpoint: expected a folder with {MANIFEST}, or a run's folder with checkpoints/step_*"
        )
    return checkpoints[-1]


def prune(output: Path, keep: int) -> None:
    """Deletes all but the newest ``keep`` checkpoints."""
    for path in list_checkpoints(output)[:-keep]:
        shutil.rmtree(path)
