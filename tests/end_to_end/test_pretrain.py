"""`steptron pretrain` and `steptron generate`, as a user runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steptron.checkpoint.folder import list_checkpoints, partial_folders
from steptron.checkpoint.verification import problems
from steptron.train.records import StepRecord, ValidationRecord, read_records
from steptron.train.stop import STOPPED_EXIT_CODE
from tests.end_to_end.runs import REPOSITORY, TIMEOUT_SECONDS, environment, pretrain_arguments, steptron

RATES = ("tokens_per_second", "step_seconds", "data_seconds", "model_tflops", "mfu", "memory_bytes")


def steps_of(output: Path) -> list[dict[str, object]]:
    """The training records without what depends on the clock or the machine."""
    records = [record for record in read_records(output / "log.jsonl") if isinstance(record, StepRecord)]
    return [{key: value for key, value in vars(record).items() if key not in RATES} for record in records]


def test_run_leaves_log_checkpoint_plot_and_generates(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = steptron(*pretrain_arguments(data, output, 4, "parallel.expert=2"), "--nproc", "2")
    assert "step 4/4" in done.stdout and "tokens/s" in done.stdout
    records = read_records(output / "log.jsonl")
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 3, 4]
    assert isinstance(records[-1], ValidationRecord) and records[-1].bits_per_byte is not None
    assert [path.name for path in list_checkpoints(output)] == ["step_00000004"]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = steptron(*pretrain_arguments(data, output, 4, "parallel.expert=2"), "--nproc", "2")
    assert "nothing to do" in again.stdout
    text = steptron("generate", str(output), "--prompt", "def ", "--max-new-tokens", "8", "--seed", "1").stdout
    assert text.startswith("def ")
    assert text == steptron("generate", str(output), "--prompt", "def ", "--max-new-tokens", "8", "--seed", "1").stdout
    assert "Warning" not in done.stderr + again.stderr


def test_resumed_run_equals_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    """The same log but for rates, whether ended on the way or not; four processes, and kills, are in test_kills.py."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steptron(*pretrain_arguments(data, whole, 5, "parallel.pipeline=2"), "--nproc", "2")
    steptron(*pretrain_arguments(data, parts, 3, "parallel.pipeline=2"), "--nproc", "2")
    resumed = steptron(*pretrain_arguments(data, parts, 5, "parallel.pipeline=2"), "--nproc", "2")
    assert "resuming from" in resumed.stdout
    assert steps_of(parts) == steps_of(whole)


def test_layouts_train_alike(data: Path, tmp_path: Path) -> None:
    """The whole command, data included: one process and EP2 consume the same samples."""
    one, two = tmp_path / "one", tmp_path / "two"
    steptron(*pretrain_arguments(data, one, 3))
    steptron(*pretrain_arguments(data, two, 3, "parallel.expert=2"), "--nproc", "2")
    for a, b in zip(steps_of(one), steps_of(two), strict=True):
        assert a["consumed_tokens"] == b["consumed_tokens"]
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-5)


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGINT,)], ids=["slurm", "ctrl_c"])
def test_signals_stop_after_a_checkpoint_and_the_same_command_goes_on(
    data: Path, tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    output = tmp_path / "run"
    arguments = [*pretrain_arguments(data, output, 100000, "parallel.expert=2"), "--nproc", "2"]
    process = _start(*arguments)
    try:
        _wait_for_steps(output, 2, process)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == STOPPED_EXIT_CODE, text
    assert "stopped as asked" in text
    (checkpoint,) = list_checkpoints(output)
    assert problems(checkpoint) == [] and partial_folders(output / "checkpoints") == []
    step = json.loads((checkpoint / "steptron.json").read_text())["progress"]["step"]
    arguments = [*pretrain_arguments(data, output, step + 1, "parallel.expert=2"), "--nproc", "2"]
    assert f"(step {step})" in steptron(*arguments).stdout
    assert [record["step"] for record in steps_of(output)] == list(range(1, step + 2))


def test_signals_before_the_first_step_are_heard(data: Path, tmp_path: Path) -> None:
    """From when the command listens; it has not read its configuration by then."""
    output = tmp_path / "run"
    process = _start(*pretrain_arguments(data, output, 100000))
    try:
        status, bit = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGUSR1 - 1)  # of what it handles
        _wait_until(lambda: int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) & bit > 0, process)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, text) == (
        STOPPED_EXIT_CODE,
        "stopped as asked before it began; the same command starts it\n",
    )
    assert not output.exists()


def test_divergence_is_reported_and_leaves_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    steptron(*pretrain_arguments(data, output, 2))
    broken = steptron(
        *pretrain_arguments(data, output, 20, "optimizer.lr=1e30", "optimizer.clip_grad_norm=0"), expect=2
    )
    assert "training stopped at step" in broken.stderr
    assert "Parameters with non-finite gradients: " in broken.stderr and "layers." in broken.stderr
    assert [path.name for path in list_checkpoints(output)] == ["step_00000002"]


def test_missing_data_is_refused_before_processes_start(tmp_path: Path) -> None:
    done = steptron(*pretrain_arguments(tmp_path / "nowhere", tmp_path / "run", 1), "--nproc", "2", expect=2)
    assert "data.train" in done.stderr and str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr


def test_bf16_trains(data: Path, tmp_path: Path) -> None:
    steptron(*pretrain_arguments(data, tmp_path / "run", 8, "train.precision=bf16"))
    losses = [float(str(record["lm_loss"])) for record in steps_of(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.2


def test_fresh_starts_over(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    steptron(*pretrain_arguments(data, output, 2))
    refused = steptron(*pretrain_arguments(data, output, 1, f"train.initial_weights={output}"), "--fresh", expect=2)
    assert f"--fresh would delete {output / 'checkpoints' / 'step_00000002'}" in refused.stderr
    assert [path.name for path in list_checkpoints(output)] == ["step_00000002"] and steps_of(output)
    steptron(*pretrain_arguments(data, output, 1), "--fresh")
    assert [record["step"] for record in steps_of(output)] == [1]
    assert [path.name for path in list_checkpoints(output)] == ["step_00000001"]


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "steptron", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_steps(output: Path, steps: int, process: subprocess.Popen[str]) -> None:
    log = output / "log.jsonl"
    _wait_until(lambda: log.exists() and log.read_text().count("\n") >= steps, process)


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert process.poll() is None, f"ended early: {process.communicate()[0]}"
        assert time.monotonic() < deadline, f"it did not happen within {TIMEOUT_SECONDS} s"
        time.sleep(0.02)


def test_a_run_starts_from_the_weights_of_another(data: Path, tmp_path: Path) -> None:
    """Its first step sees the loss that the other ended with; the optimizer starts anew, the source is not touched."""
    first, second = tmp_path / "first", tmp_path / "second"
    steptron(*pretrain_arguments(data, first, 3, "optimizer.lr=1e-2"))
    started = steptron(
        *pretrain_arguments(data, second, 4, f"train.initial_weights={first}", "train.precision=bf16"),
        *(
            "model.sliding.window=17",
            "model.mtp.depths=2",
            "train.initial_weights_missing={mtp: clone}",
            "--nproc",
            "2",
        ),
    )
    assert f"starting from the weights of {first / 'checkpoints' / 'step_00000003'}" in started.stdout
    assert "model.sliding.window: 16 before, 17 now" in started.stdout
    assert "  cloned: MTP depth 2 of this model from MTP depth 1 of the weights\n" in started.stdout
    records = [record for record in read_records(second / "log.jsonl") if isinstance(record, StepRecord)]
    untrained = [record for record in read_records(first / "log.jsonl") if isinstance(record, StepRecord)]
    assert records[0].step == 1 and records[0].lm_loss < untrained[-1].lm_loss + 0.05 < untrained[0].lm_loss - 0.1
    again = steptron(*pretrain_arguments(data, second, 4, "train.initial_weights=nowhere"), expect=2)
    assert "train.initial_weights (nowhere) is not a folder" in again.stderr
