"""`steptron pretrain` and a metrics server, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from steptron.checkpoint.folder import list_checkpoints
from steptron.train.records import StepRecord, ValidationRecord, read_records
from steptron_metrics.reading.reader import MetricsReader
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings
from tests.end_to_end.runs import REPOSITORY, TIMEOUT_SECONDS, environment, pretrain_arguments, steptron

EP2 = ("parallel.expert=2", "train.threads=1")
TRAIN = ("loss", "lm_loss", "grad_norm", "learning_rate", "batch_size")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Settings(tmp_path_factory.mktemp("server"), port=0, http_port=0)) as server:
        yield server


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def stored(server: Server, run: str) -> pd.DataFrame:
    with MetricsReader(server.http_address) as reader:
        return reader.iterations(run) if run in set(reader.runs()["name"]) else pd.DataFrame()


def assert_log_is_stored(server: Server, run: str, output: Path) -> None:
    """What rank 0 logs is what the server has of every step."""
    records = read_records(output / "log.jsonl")
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    until(lambda: len(stored(server, run)) == len(steps), f"{len(steps)} iterations of {run}")
    with MetricsReader(server.http_address) as reader:
        iterations = reader.iterations(run)
        assert iterations.index.tolist() == sorted(steps) and (iterations["num_ranks"] == 2).all()
        for name in TRAIN:
            frame = reader.aggregates(run, f"train.{name}", -1)
            for step, record in steps.items():
                assert frame.loc[step].tolist() == pytest.approx([getattr(record, name)], rel=1e-6)
        validations = reader.aggregates(run, "validation.lm_loss", -1)
        expected = {record.step: record.lm_loss for record in records if isinstance(record, ValidationRecord)}
        assert validations[0].dropna().to_dict() == pytest.approx(expected, rel=1e-6)


def test_a_run_and_its_resumption(data: Path, tmp_path: Path, server: Server) -> None:
    """Steps 4 and 5, made again from the checkpoint of step 3, take the place of those of before."""
    output, name = tmp_path / "out", "resumed"
    telemetry = (f"telemetry.server={server.address}", f"telemetry.run={name}", "train.checkpoint.every_steps=3")
    steptron(*pretrain_arguments(data, output, 5, *EP2, *telemetry), "--nproc", "2")
    assert_log_is_stored(server, name, output)
    sessions = stored(server, name)["session_ns"]
    assert sessions.nunique() == 1
    for folder in list_checkpoints(output):
        if folder.name == "step_00000005":
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            folder.rmdir()
    done = steptron(*pretrain_arguments(data, output, 7, *EP2, *telemetry), "--nproc", "2")
    assert "resuming" in done.stdout and f"telemetry to {server.address} as {name}" in done.stdout
    assert_log_is_stored(server, name, output)
    again = stored(server, name)["session_ns"]
    assert again.nunique() == 2 and again.loc[:3].nunique() == 1 and again.loc[4:].nunique() == 1
    with MetricsReader(server.http_address) as reader:
        tokens = reader.aggregates(name, "moe.tokens", 8)
        # 8 sequences of 64 tokens with two experts each, over 2 ranks' micro-batches of 2.
        assert tokens.shape == (7, 8) and (tokens.sum(axis=1) == 2 * 2 * 64 * 2).all()
        assert reader.events(name)["kind"].tolist().count("finished") >= 1


def test_without_a_server_a_run_ends_as_ever_and_its_next_run_delivers(data: Path, tmp_path: Path) -> None:
    """Frames wait in the run's folder; the run's own command finds them, even when there is nothing to train."""
    output, name = tmp_path / "out", "late"
    settings = Settings(tmp_path / "server", port=0, http_port=0)
    with running(settings) as server:
        address = server.address
    arguments = pretrain_arguments(data, output, 3, *EP2, f"telemetry.server={address}", f"telemetry.run={name}")
    done = steptron(*arguments, "--nproc", "2")
    assert "3 frames could not be sent" in done.stderr and "they wait in the run's folder" in done.stderr
    assert address in done.stderr
    port = int(address.rpartition(":")[2])
    with running(Settings(tmp_path / "server", port=port, http_port=0)) as server:
        more = pretrain_arguments(data, output, 4, *EP2, f"telemetry.server={address}", f"telemetry.run={name}")
        assert "could not be sent" not in steptron(*more, "--nproc", "2").stderr
        assert_log_is_stored(server, name, output)


def test_an_alert_gets_its_checkpoint(data: Path, tmp_path: Path, server: Server) -> None:
    output, name = tmp_path / "out", "asked"
    telemetry = (f"telemetry.server={server.address}", f"telemetry.run={name}")
    arguments = [*pretrain_arguments(data, output, 100_000, *EP2, *telemetry), "--nproc", "2"]
    command = [sys.executable, "-m", "steptron", *arguments]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda: len(stored(server, name)) > 2, "three iterations", TIMEOUT_SECONDS)
        assert not list_checkpoints(output)
        folder = server.folder / "requests"
        folder.mkdir(exist_ok=True)
        request = {"number": 1, "kind": "checkpoint", "reason": "an expert blew up", "alerts": [1]}
        draft = folder / "draft"
        draft.write_text(json.dumps({"requests": [request]}))
        draft.rename(folder / f"{name}.json")
        until(lambda: bool(list_checkpoints(output)), "a checkpoint", TIMEOUT_SECONDS)
    finally:
        process.terminate()
        text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    # One for the request, one at the end; more would mean that the request was not withdrawn.
    assert len(list_checkpoints(output)) == 2, text
    until(lambda: not (folder / f"{name}.json").exists(), "withdrawal")
    with MetricsReader(server.http_address) as reader:
        events = reader.events(name)
        assert "an alert asked for it" in events[events["kind"] == "checkpoint"]["detail"].tolist()
