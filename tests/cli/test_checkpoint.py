"""`steptron checkpoint import-hf` and `export-hf`, as a user gives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steptron.checkpoint.released.shards import parse_size
from steptron.errors import UserError
from tests.checkpoint.released.transfers import CASE, bits, headers, load_folder, write_folder
from tests.worker_pool import REPOSITORY

COMMAND = [sys.executable, "-c", "from steptron.cli.main import main; main()", "checkpoint"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]),
}


def steptron(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=folder, env=ENVIRONMENT
    )


def test_there_with_two_processes_and_back_with_one(tmp_path: Path) -> None:
    result = steptron(tmp_path, "import-hf", CASE, "imported", "--nproc", "2")
    assert result.returncode == 0, result.stderr
    assert "import, share of rank 0 of 2: 100%" in result.stdout
    assert "imported: 192 tensors, 2,882,240 bytes in " in result.stdout
    assert "steptron generate" not in result.stdout and "train.initial_weights=imported" in result.stdout
    result = steptron(tmp_path, "export-hf", "imported", "out", "--max-shard-size", "0.5MB")
    assert result.returncode == 0, result.stderr
    assert "out: 192 tensors, 2,882,240 bytes in " in result.stdout
    assert len(headers(tmp_path / "out")) > 5
    assert bits(load_folder(tmp_path / "out")) == bits(load_folder(CASE))


def test_refusals_are_one_message(tmp_path: Path) -> None:
    tensors = load_folder(CASE)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    write_folder(tmp_path / "bad", tensors)
    for processes in ("1", "2"):
        result = steptron(tmp_path, "import-hf", "bad", "out", "--nproc", processes)
        assert result.returncode == 2
        assert result.stderr == (
            "bad does not fit its config.json: 2 problems\n"
            "  - model.norm.weight [64] is missing\n"
            "  - lm_head.weight [128, 64] is missing\n"
        )
    result = steptron(tmp_path, "export-hf", CASE, "out")
    assert result.returncode == 2
    assert result.stderr == f"{CASE} is a released model already: name a checkpoint\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


SLOWLY = """
import time
from steptron.platform import megatron_cpu
megatron_cpu.install()
from steptron.checkpoint.released.folder import ReleasedFolder
read = ReleasedFolder.read
ReleasedFolder.read = lambda *arguments: time.sleep(0.1) or read(*arguments)
from steptron.cli.main import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of an import that takes 20 seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "checkpoint", "import-hf", str(CASE), "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.building-*/*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    for text, size in {
        "5GB": 5_000_000_000,
        "500MB": 500_000_000,
        "4GiB": 4 * 2**30,
        "4gib": 4 * 2**30,
        "1.5 kb": 1500,
        "123": 123,
    }.items():
        assert parse_size(text) == size
    for text in ("", "GB", "5 apples", "-1GB", "0", "0.1", "1e3", "5GBB"):
        with pytest.raises(UserError, match="is not understood"):
            parse_size(text)
