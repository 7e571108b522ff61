"""Two runs never write into the same folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steptron.errors import UserError
from steptron.train.run_lock import run_lock

HOLD = "import sys, pathlib; from steptron.train.run_lock import run_lock; "
HOLD += "lock = run_lock(pathlib.Path(sys.argv[1])); lock.__enter__(); print('held', flush=True); sys.stdin.read()"


def test_a_folder_is_held_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another run writes to {tmp_path / 'run'}"), run_lock(tmp_path / "run"):
            pass
        with run_lock(tmp_path / "other"):
            pass
    finally:
        holder.kill()
        holder.wait(timeout=20)
    with run_lock(tmp_path / "run"):
        pass


def test_a_folder_is_free_again_where_its_block_ends(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "run"), pytest.raises(UserError), run_lock(tmp_path / "run"):
            pass
