"""A disk that is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steptron_metrics.results import Aggregate, Iteration
from steptron_metrics.storage.duckdb_store import DuckDatabase, open_duckdb

ROOT = Path(__file__).parents[3]


def namespace() -> list[str]:
    """The command before another that lets it mount; empty where this user may not."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False).returncode == 0:
                return command
    return []


def made(run: str, number: int) -> Iteration:
    values = np.random.default_rng(number).random((7, 20_000)).astype(np.float32)
    values[0] = 1
    return Iteration(run, 1, number, 1, (), number, 1.0, number, aggregates=(Aggregate("a.b", 0, values),))


def test_a_checkpoint_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for it, one that was made all the same would leave the database unusable."""
    store = open_duckdb(tmp_path / "m.duckdb")
    monkeypatch.setattr(DuckDatabase, "_has_room", lambda *_: False)
    for number in range(1, 3):
        store.put([made("big", number), made("other", number)])
    log = tmp_path / "m.duckdb.wal"
    before = log.stat().st_size
    assert before > 4 * 7 * 20_000
    store.delete("big")
    assert [run.name for run in store.runs()] == ["other"] and before < log.stat().st_size < before + 100_000
    store.close()
    assert log.stat().st_size > before
    store = open_duckdb(tmp_path / "m.duckdb")
    assert [run.name for run in store.runs()] == ["other"]
    monkeypatch.undo()
    store.delete("nothing")
    assert not log.exists() or log.stat().st_size < 100_000
    store.close()


def test_a_server_on_a_full_disk(tmp_path: Path) -> None:
    command = namespace()
    if not command:
        pytest.skip("this user may mount no disk of its own (unshare -m): test_writer.py has a full one of its making")
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        [
            *(*command, sys.executable, "-m", "tests.metrics_server.server.full_disk"),
            *(str(tmp_path / "disk"), str(tmp_path / "spool")),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "went on\n", done.stderr[-3000:]
