"""A supervised run whose processes are killed again and again ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steptron.checkpoint.folder import list_checkpoints, partial_folders
from steptron.checkpoint.verification import problems
from steptron.platform.launch import run_local
from tests.checkpoint.test_save_load import stored
from tests.end_to_end import faulty
from tests.end_to_end.runs import REPOSITORY, pretrain_arguments
from tests.end_to_end.test_pretrain import steps_of

STEPS, EVERY = 12, 2
KILLS = ["after_rename-0", "load-3", "step-2", "write-1", "before_rename-0", "deletion-0"]


def run(data: Path, output: Path, *more: str) -> list[str]:
    layout = ("parallel.pipeline=2", "parallel.expert=2", f"train.checkpoint.every_steps={EVERY}")
    return pretrain_arguments(data, output, STEPS, *layout, "train.faults.dead_after_seconds=20", *more)


@pytest.mark.timeout(900)
def test_six_kills_change_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a rename, during loading, in the middle of a step, of writing, before a rename, during a deletion."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv(faulty.FOLDER, str(tmp_path / "kills"))
    (tmp_path / "kills").mkdir()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_local(4, run(data, whole)) == 0
    for number, kill in enumerate(KILLS):
        (tmp_path / "kills" / f"{number}-{kill}").touch()
    module = "tests.end_to_end.faulty"
    assert run_local(4, run(data, killed), module=module, max_restarts=len(KILLS)) == 0
    assert list((tmp_path / "kills").iterdir()) == []
    printed = capfd.readouterr()
    for kill in KILLS:
        assert f"rank {kill.rpartition('-')[2]} of 4 was ended by SIGKILL" in printed.err
    assert f"restart {len(KILLS)} of {len(KILLS)}" in printed.err
    assert steps_of(killed) == steps_of(whole)
    folders = list_checkpoints(killed)
    assert [folder.name for folder in folders] == [folder.name for folder in list_checkpoints(whole)]
    assert [problems(folder) for folder in folders] == [[], []]
    assert partial_folders(killed / "checkpoints") == []
    expected, found = (stored(output / "checkpoints" / f"step_{STEPS:08d}") for output in (whole, killed))
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
