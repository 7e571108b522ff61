"""The quickstart's driver, start to end, with a training of a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY, environment


@pytest.mark.py312
@pytest.mark.timeout(280)
def test_quickstart_runs_and_is_reused(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    first = _quickstart(folder)
    for text in (
        "MB of Python source",
        "step 3/3",
        "tokens/s",
        "validation loss:",
        "loss plot:",
        "to go on:",
        "metrics server: http://127.0.0.1",
    ):
        assert text in first
    assert list((folder / "train" / "checkpoints").iterdir()) and (folder / "train" / "loss.png").is_file()
    assert (folder / "train" / "experts.png").read_bytes().startswith(b"\x89PNG")
    second = _quickstart(folder)
    assert second.count("reused, made earlier by") == 5


def _quickstart(folder: Path) -> str:
    command = [sys.executable, "tools/quickstart.py", "--folder", str(folder), "--steps", "3"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
