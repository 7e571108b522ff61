"""Running `steptron` as a user does, on a small corpus and the nano preset."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 150


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def steptron(*arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is in the assertion when the exit code is another."""
    done = subprocess.run(
        [sys.executable, "-m", "steptron", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if expect is not None:
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def pretrain_arguments(data: Path, output: Path, steps: int, *overrides: str) -> list[str]:
    """Nano, 8 sequences of 64 tokens per step."""
    return [
        "pretrain",
        "configs/pretrain/nano.yaml",
        f"data.train.0.path={data}",
        f"train.output={output}",
        f"train.steps={steps}",
        "data.sequence_length=64",
        "train.global_batch_size=8",
        "optimizer.schedule={kind: constant, warmup_steps: 0}",
        "train.validation.batches=1",
        "train.logging.tensorboard=false",
        *overrides,
    ]


def build_data(folder: Path, files: Sequence[Path], vocabulary: int = 512) -> Path:
    """A dataset from some text files."""
    steptron(
        *("data", "build", *map(str, files), "--output", str(folder), "--train-tokenizer", str(vocabulary)),
        *("--validation-fraction", "0.1", "--workers", "1"),
    )
    return folder
