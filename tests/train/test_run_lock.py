"""Two runs never write into the same folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steptron.errors import UserError
from steptron.train.run_lock import RunLock

HOLD = "import sys, pathlib; from steptron.train.run_lock import RunLock; "
HOLD += "lock = RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_folder_is_held_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another run writes to {tmp_path / 'run'}"):
            RunLock(tmp_path / "run")
        RunLock(tmp_path / "other")
    finally:
        holder.kill()
        holder.wait(timeout=20)
    RunLock(tmp_path / "run")
