"""Checkpoint folders of a run: names, and which are complete."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from steptron.errors import UserError

_NAME = re.compile(r"step_(\d{8,})")
_PARTIAL = ".partial"
MANIFEST = "steptron.json"


def checkpoint_folder(output: Path, step: int) -> Path:
    """``<output>/checkpoints/step_00000100``"""
    return output / "checkpoints" / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def staging(output: Path, step: int) -> Path:
    """Where a checkpoint is built, until it is complete."""
    final = checkpoint_folder(output, step)
    return final.with_name(final.name + _PARTIAL)


def partial_folders(root: Path) -> list[Path]:
    """What killed saves and deletions have left in a run's ``checkpoints`` folder."""
    return sorted([*root.glob(f"*{_PARTIAL}"), *root.glob(".step_*.replaced-*")])


def list_checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first: those whose manifest, written last, is there."""
    root = output / "checkpoints"
    if not root.is_dir():
        return []
    found = (path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file())
    return sorted(found, key=step_of)


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


def delete(checkpoint: Path) -> None:
    """Deletes a checkpoint; at no moment is a part of it taken for a whole one."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleted{_PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
