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
    step = named_step(folder)
    assert step is not None, folder
    return step


def named_step(folder: Path) -> int | None:
    """The step in a folder's name; None where it is not named as the checkpoints of a run are."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def staging(output: Path, step: int) -> Path:
    """Where a checkpoint is built, until it is complete."""
    final = checkpoint_folder(output, step)
    return final.with_name(final.name + _PARTIAL)


def partial_folders(root: Path) -> list[Path]:
    """What killed saves and deletions have left in a run's ``checkpoints`` folder."""
    return sorted([*root.glob(f"*{_PARTIAL}"), *root.glob(".step_*.replaced-*")])


def delete_partial_folders(root: Path) -> None:
    """Deletes what killed saves and deletions have left in a run's ``checkpoints`` folder.

    Raises:
        OSError: a folder cannot be deleted.
    """
    for folder in partial_folders(root):
        shutil.rmtree(folder)


def put_back(output: Path) -> None:
    """Gives a checkpoint its name back that was moved aside for a new one, when the process died in between."""
    for aside in (output / "checkpoints").glob(".step_*.replaced-*"):
        final = aside.with_name(aside.name.partition(".replaced-")[0].removeprefix("."))
        if not final.exists():
            aside.rename(final)


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. They get their names when they are complete: what is missing in one of them,
    the manifest too, has been lost since."""
    root = output / "checkpoints"
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def run_of(path: Path) -> Path:
    """The run's folder that a user means by it or by the folder ``checkpoints`` in it."""
    path = path if path.name not in ("", "..") else path.resolve()
    return path.parent if path.name == "checkpoints" else path


def resolve(path: Path) -> Path:
    """The checkpoint that a user means: a checkpoint folder itself, or the newest one of a run's folder.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    checkpoints = [one for one in list_checkpoints(run_of(path)) if (one / MANIFEST).is_file()]
    if not checkpoints:
        raise UserError(
            f"{path} is not a checkpoint: expected a folder with {MANIFEST}, or a run's folder with checkpoints/step_*"
        )
    return checkpoints[-1]


def delete(checkpoint: Path) -> None:
    """Deletes a checkpoint; at no moment is a part of it taken for a whole one. Of one that is a link to elsewhere the
    link goes, and what it points to stays."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    doomed = checkpoint.with_name(f"{checkpoint.name}.deleted{_PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
