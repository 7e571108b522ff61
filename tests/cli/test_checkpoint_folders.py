"""`steptron checkpoint inspect`, `verify` and `prune` on the checkpoints of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.checkpoint.folder import MANIFEST, list_checkpoints, partial_folders
from steptron.cli.main import app
from steptron.train.run_lock import run_lock
from tests.checkpoint.made import flip, make
from tests.worker_pool import REPOSITORY


def steptron(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four checkpoints, the second of them the best, and what a killed save has left."""
    rule = ("train.checkpoint.keep=2", "train.checkpoint.keep_best=1")
    for step, loss in ((10, 5.0), (20, 3.0), (30, None), (40, 4.0)):
        make(tmp_path / "run", step, loss, rule)
    partial = tmp_path / "run" / "checkpoints" / "step_00000050.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(bytes(123))
    return tmp_path / "run"


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def test_inspect_lists_a_run(run: Path) -> None:
    (step(run, 30) / "__1_0.distcp").unlink()
    result = steptron("inspect", run)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(" ") and "2026" in line]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("10", "5,000", "whole"),
        ("20", "10,000", "whole"),
        ("30", "15,000", "damaged"),
        ("40", "20,000", "whole"),
    ]
    assert (
        rows[1][2] == "3.0000" and "2026-01-02 03:04:20" in " ".join(rows[1]) and "4: PP2 EP2 DP2" in " ".join(rows[1])
    )
    assert "step_00000030: __1_0.distcp is missing" in result.stdout
    assert f"{step(run, 50)}.partial: not a checkpoint" in result.stdout and "(123 bytes)" in result.stdout
    listed = json.loads(steptron("inspect", run / "checkpoints", "--json").stdout)
    assert [one["progress"]["step"] for one in listed["checkpoints"]] == [10, 20, 30, 40]
    assert [one["problems"] for one in listed["checkpoints"]][2] == ["__1_0.distcp is missing"]
    assert [left["bytes"] for left in listed["leftovers"]] == [123]


def test_verify_says_which_file_failed(run: Path) -> None:
    result = steptron("verify", run)
    assert result.exit_code == 0 and "4 of 4 checkpoints whole" in result.stdout
    assert "verify: 100%" in result.stderr
    flip(step(run, 20) / "__0_0.distcp", 9)
    flip(step(run, 40) / MANIFEST, 90)
    (step(run, 10) / "mine.txt").write_text("")
    result = steptron("verify", run, "--threads", "3")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{step(run, 10)}: whole (5 files, ") and "mine.txt is not in the manifest" in lines[1]
    assert lines[2] == f"{step(run, 20)}: DAMAGED" and "__0_0.distcp has other content" in lines[3]
    assert lines[5] == f"{step(run, 40)}: DAMAGED" and MANIFEST in lines[6]
    assert lines[-1] == "2 of 4 checkpoints whole"
    result = steptron("verify", run, "--sizes-only")
    assert "3 of 4 checkpoints whole" in result.stdout and "sizes only" in result.stdout
    assert steptron("verify", step(run, 20)).exit_code == 1
    assert steptron("verify", step(run, 30)).exit_code == 0


def test_a_folder_without_a_manifest_is_damaged(run: Path) -> None:
    (step(run, 30) / MANIFEST).unlink()
    result = steptron("verify", run)
    assert result.exit_code == 1 and f"{step(run, 30)}: DAMAGED" in result.stdout
    assert "is not a complete checkpoint: steptron.json" in steptron("verify", step(run, 30)).stderr


def test_prune_goes_by_the_run_s_own_rule_unless_told_otherwise(run: Path) -> None:
    before = list_checkpoints(run)
    result = steptron("prune", run, "--dry-run")
    assert result.exit_code == 0, result.output
    size = sum(file.stat().st_size for file in step(run, 10).iterdir())
    assert result.stdout.splitlines() == [
        "kept: the newest 2, the best 1 by validation loss",
        f"would delete {step(run, 10)}, {size:,} bytes",
        f"would delete {step(run, 50)}.partial, 123 bytes (left by a save or deletion that did not end)",
        f"{size + 123:,} bytes would be freed; 3 checkpoints kept",
    ]
    assert list_checkpoints(run) == before
    result = steptron("prune", run)
    assert f"{size + 123:,} bytes freed; 3 checkpoints kept" in result.stdout
    assert list_checkpoints(run) == before[1:] and partial_folders(run / "checkpoints") == []
    result = steptron("prune", run, "--keep", "1", "--keep-every", "30", "--keep-best", "0")
    assert "kept: the newest 1, multiples of 30 steps\n" in result.stdout
    assert list_checkpoints(run) == before[2:]


def test_prune_keeps_away_from_a_run_that_goes_on(run: Path) -> None:
    with run_lock(run):
        result = steptron("prune", run, "--keep", "1")
        assert result.exit_code == 2 and f"a run writes to {run}" in result.stderr
        assert len(list_checkpoints(run)) == 4
        assert steptron("prune", run, "--keep", "1", "--dry-run").exit_code == 0


def test_prune_never_deletes_the_last_whole_checkpoint(run: Path) -> None:
    flip(step(run, 40) / "__0_0.distcp", 5)
    (step(run, 30) / MANIFEST).unlink()
    options = ("--keep", "1", "--keep-every", "0", "--keep-best", "0")
    for dry_run in (["--dry-run"], []):
        result = steptron("prune", run, *options, *dry_run)
        assert result.exit_code == 0, result.output
        assert f"damaged, not counted: {step(run, 40)}: __0_0.distcp has other content" in result.stdout
        assert f"damaged, not counted: {step(run, 30)}: {MANIFEST} cannot be read" in result.stdout
        assert f"{step(run, 10)}, " in result.stdout and f"{step(run, 20)}, " not in result.stdout
    assert list_checkpoints(run) == [step(run, 20), step(run, 30), step(run, 40)]
    # A flipped bit does not show by sizes.
    assert steptron("prune", run, *options, "--sizes-only").exit_code == 0
    assert list_checkpoints(run) == [step(run, 40)]


def test_without_a_whole_one_prune_deletes_nothing(run: Path) -> None:
    for folder in list_checkpoints(run):
        (folder / "__1_0.distcp").unlink()
    result = steptron("prune", run, "--keep", "1", "--keep-every", "0", "--keep-best", "0")
    assert result.exit_code == 2 and "no checkpoint is whole" in result.stderr
    assert result.stderr.count("__1_0.distcp is missing") == 4 and len(list_checkpoints(run)) == 4


@pytest.mark.parametrize("command", ["inspect", "verify", "prune"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "released").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "released" / name).write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "fresh" / "checkpoints").mkdir(parents=True)
    for name, message in {
        "nowhere": "nowhere does not exist",
        "file": "file is a file",
        "released": "is a released model, which has neither manifest nor checksums",
        "fresh": "has no checkpoint yet",
        ".": "is not a checkpoint: expected a folder with steptron.json",
    }.items():
        result = steptron(command, tmp_path / name)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert len(result.stderr.splitlines()) == 1


def test_looking_at_checkpoints_does_not_load_torch() -> None:
    modules = ", ".join(
        f"steptron.{name}"
        for name in (
            *("checkpoint.found", "checkpoint.verification", "checkpoint.retention", "checkpoint.relayout"),
            *("cli.checkpoint", "train.run_lock"),
        )
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
    assert done.stdout == "False\n", done.stderr
