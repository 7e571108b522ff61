"""Names, order and retention of checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.checkpoint.folder import MANIFEST, checkpoint_folder, list_checkpoints, put_back, resolve
from steptron.errors import UserError


def make(output: Path, step: int, complete: bool = True) -> Path:
    folder = checkpoint_folder(output, step)
    folder.mkdir(parents=True)
    if complete:
        (folder / MANIFEST).write_text("{}")
    return folder


def test_folders_with_the_name_of_a_checkpoint_are_listed_oldest_first(tmp_path: Path) -> None:
    """One whose manifest was lost too: it must not look as if there had never been a checkpoint."""
    newest, oldest, lost = make(tmp_path, 1000), make(tmp_path, 20), make(tmp_path, 3000, complete=False)
    (tmp_path / "checkpoints" / "step_00005000").write_text("")
    (tmp_path / "checkpoints" / "step_00004000.partial").mkdir()
    (tmp_path / "checkpoints" / "step_00004000.partial" / MANIFEST).write_text("{}")
    assert list_checkpoints(tmp_path) == [oldest, newest, lost]
    assert resolve(tmp_path) == newest
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_resolve_takes_a_checkpoint_a_run_or_its_checkpoints_folder(tmp_path: Path) -> None:
    older, newest = make(tmp_path, 1), make(tmp_path, 2)
    assert resolve(older) == older
    assert resolve(tmp_path) == newest
    assert resolve(tmp_path / "checkpoints") == newest
    for wrong in (tmp_path / "nowhere", tmp_path / "checkpoints" / "step_00000003"):
        with pytest.raises(UserError, match=f"{wrong} is not a checkpoint"):
            resolve(wrong)


def test_a_checkpoint_that_was_moved_aside_comes_back_unless_its_successor_is_there(tmp_path: Path) -> None:
    """The process may die between the two renames by which a checkpoint is replaced."""
    lost, kept = make(tmp_path, 1), make(tmp_path, 2)
    lost.rename(lost.with_name(".step_00000001.replaced-abc"))
    older = make(tmp_path, 3)
    older.rename(older.with_name(".step_00000002.replaced-def"))
    put_back(tmp_path)
    assert list_checkpoints(tmp_path) == [lost, kept]
