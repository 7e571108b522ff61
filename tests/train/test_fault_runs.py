"""Whole runs that meet batches that they should not learn from, in two processes; faults sit in the data."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from steptron.checkpoint.folder import checkpoint_folder, list_checkpoints
from steptron.checkpoint.manifest import read_manifest, write_manifest
from steptron.checkpoint.verification import problems
from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.stages import Curriculum
from steptron.data.batch import MicroBatch
from steptron.errors import UserError
from steptron.parallel.mesh import build_mesh
from steptron.train.loop import Pretraining
from steptron.train.records import EventRecord, Record, StepRecord, read_records
from steptron.train.run_lock import run_lock_of_all
from steptron.train.step import TrainStep
from steptron.train.stop import StopRequest
from tests.data.corpora import build_small, varied_texts
from tests.parallel.layouts import NANO
from tests.worker_pool import WorkerPool

BATCH = 4
_NO_RATES: dict[str, Any] = dict.fromkeys(
    ("tokens_per_second", "step_seconds", "data_seconds", "model_tflops", "mfu", "memory_bytes"), 0
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("data"), "texts", [{"text": text} for text in varied_texts(200)])


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of a run.

    Attributes:
        error: the message of the error that ended it; empty if none did.
        state: digests of parameters, selection biases and optimizer state, and the number of updates.
        printed: what it printed.
    """

    error: str
    state: dict[str, str]
    printed: str


@contextlib.contextmanager
def faults_in_data(added: dict[int, float], kind: str) -> Iterator[None]:
    """The summed loss of rank 1 is wrong for batches that begin with certain sequences.

    Args:
        added: what is added for each target, by the place of the batch's first sequence.
        kind: "loss"; or "no update": losses are as they are, but the optimizer and the routers' biases stand still.
    """
    first = [-1]
    take, run, step = Pretraining._global_batch, TrainStep._run, TrainStep.run

    def note(self: Pretraining, start: int, batch_size: int) -> list[MicroBatch]:
        first[0] = start
        return take(self, start, batch_size)

    def add(self: TrainStep, work: Any, counts: Any, forward_only: bool) -> torch.Tensor:
        sums = run(self, work, counts, forward_only)
        if kind == "loss" and not forward_only and torch.distributed.get_rank() == 1:
            sums[0] += added.get(first[0], 0.0) * counts.targets[0]
        return sums

    def idle(self: TrainStep, *args: Any) -> Any:
        if kind == "loss" or first[0] not in added:
            return step(self, *args)
        with (
            mock.patch.object(self.optimizer, "step", lambda lr: None),
            mock.patch.object(self, "_update_biases", lambda *args: None),
        ):
            return step(self, *args)

    with (
        mock.patch.object(Pretraining, "_global_batch", note),
        mock.patch.object(TrainStep, "_run", add),
        mock.patch.object(TrainStep, "run", idle),
    ):
        yield


def pretrain(
    rank: int,
    world_size: int,
    data: Path,
    output: Path,
    steps: int,
    overrides: Sequence[str] = (),
    added: dict[int, float] | None = None,
    kind: str = "loss",
) -> Outcome:
    """Runs nano on batches of 4 sequences of 32 tokens."""
    config = load(
        NANO,
        [
            f"data.train.0.path={data}",
            f"train.output={output}",
            f"train.steps={steps}",
            "data.sequence_length=32",
            f"train.global_batch_size={BATCH}",
            "optimizer.schedule={kind: constant, warmup_steps: 0}",
            "train.logging.tensorboard=false",
            *overrides,
        ],
    ).config
    check(config, world_size, check_data=True)
    printed, error = io.StringIO(), ""
    with (
        faults_in_data(added or {}, kind),
        contextlib.redirect_stdout(printed),
        mock.patch("gc.freeze"),  # this process outlives the run
        run_lock_of_all(config.train.output),
    ):
        run = Pretraining(Curriculum.of(config), build_mesh(config.parallel), torch.device("cpu"))
        try:
            run.run(StopRequest())
        except UserError as raised:
            error = str(raised)
    return Outcome(error, digests(run.step), printed.getvalue())


def digests(train: TrainStep) -> dict[str, str]:
    tensors = {name: tensor.detach() for name, tensor in train.chunks.logical_tensors()}
    for kind, states in train.optimizer.state().items():
        tensors |= {f"{kind} of {s.owned.name}[{s.owned.piece.start}:]": s.tensor for s in states}
    found = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    return found | {"updates": str(train.optimizer.num_steps)}


def records(output: Path) -> list[Record]:
    """The log; of steps without what depends on the clock or the machine."""
    return [
        replace(record, **_NO_RATES) if isinstance(record, StepRecord) else record
        for record in read_records(output / "log.jsonl")
    ]


def steps_of(output: Path) -> list[Record]:
    return [record for record in records(output) if isinstance(record, StepRecord)]


def events_of(output: Path) -> list[EventRecord]:
    return [record for record in records(output) if isinstance(record, EventRecord)]


SKIPPING = [
    "parallel.expert=2",
    "train.faults.on_non_finite=skip",
    "train.faults.loss_spike={threshold: 1.0, window: 3}",
]


def test_batches_are_skipped_as_if_nothing_had_been_updated(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """NaN in step 2 and loss spikes in steps 5 and 7, each on one rank of two."""
    faults = {BATCH: math.nan, 4 * BATCH: 3.0, 6 * BATCH: 2.0}
    through, idle, parts = tmp_path / "through", tmp_path / "idle", tmp_path / "parts"
    outcomes = pool.run(2, pretrain, data, through, 8, SKIPPING, faults)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    nan, *spikes = events_of(through)
    assert (nan.step, nan.event) == (2, "skipped") and "loss nan" in nan.detail
    assert [(event.step, event.event) for event in spikes] == [(5, "skipped"), (7, "skipped")]
    for event in spikes:
        assert "the median of the last 3 steps (train.faults.loss_spike.threshold: 1)" in event.detail
        assert f"step {event.step}: skipped: {event.detail}" in outcomes[0].printed
    assert [record.step for record in records(through)] == list(range(1, 9))
    # A run whose optimizer does nothing at those steps, and which notices no fault.
    expected = pool.run(2, pretrain, data, idle, 8, ["parallel.expert=2"], faults, "no update")
    assert expected[0].state["updates"] == "5"
    assert [outcome.state for outcome in outcomes] == [outcome.state for outcome in expected]
    assert steps_of(through) == [record for record in steps_of(idle) if record.step not in (2, 5, 7)]
    # The spike of step 7 is told only by losses from before the interruption.
    for steps in (6, 8):
        resumed = pool.run(2, pretrain, data, parts, steps, SKIPPING, faults)
    assert [outcome.state for outcome in resumed] == [outcome.state for outcome in outcomes]
    assert records(parts) == records(through)


ROLLING_BACK = [
    "parallel.expert=2",
    "train.faults.on_non_finite=roll_back",
    "train.faults.loss_spike={threshold: 1.0, window: 2, policy: roll_back}",
    "train.checkpoint.every_steps=2",
    "train.checkpoint.keep=9",
    "optimizer.weight_clipping.threshold=0.3",
]


def test_a_run_goes_back_to_its_checkpoint_and_leaves_out_the_data(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """A spike in the sixth batch, and NaN in the first one after those that are then left out."""
    faults = {5 * BATCH: 3.0, 7 * BATCH: math.nan}
    rolled, started, parts = tmp_path / "rolled", tmp_path / "started", tmp_path / "parts"
    outcomes = pool.run(2, pretrain, data, rolled, 8, ROLLING_BACK, faults)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    first, second = events_of(rolled)
    assert (first.step, first.event, second.step, second.event) == (4, "rolled back", 4, "rolled back")
    # Batches 5 and 6 (from 0: 4 and 5) after step 4; then batch 7 (6) is made, and 8 (7) fails, at step 6.
    assert first.detail.startswith(
        f"from step 6 to {checkpoint_folder(rolled, 4)}; sequences 16 to 23 of the data are left out: loss "
    )
    assert second.detail.startswith(
        f"from step 6 to {checkpoint_folder(rolled, 4)}; sequences 16 to 31 of the data are left out: loss nan"
    )
    assert [(record.step, record.kind) for record in records(rolled)] == (
        [(step, "train") for step in range(1, 5)] + 2 * [(4, "event")] + [(step, "train") for step in range(5, 9)]
    )
    # A run that had been started from that checkpoint with those sequences left out.
    pool.run(2, pretrain, data, started, 4, ROLLING_BACK)
    folder = checkpoint_folder(started, 4)
    manifest = read_manifest(folder)
    assert manifest.progress is not None
    write_manifest(
        folder, manifest.model_copy(update={"progress": replace(manifest.progress, left_out_sequences=4 * BATCH)})
    )
    expected = pool.run(2, pretrain, data, started, 8, ROLLING_BACK)
    assert [outcome.state for outcome in outcomes] == [outcome.state for outcome in expected]
    assert steps_of(rolled) == steps_of(started)
    assert read_manifest(checkpoint_folder(rolled, 8)).progress == read_manifest(checkpoint_folder(started, 8)).progress
    # Interrupted after the roll-back.
    for steps in (6, 8):
        resumed = pool.run(2, pretrain, data, parts, steps, ROLLING_BACK, faults)
    assert [outcome.state for outcome in resumed] == [outcome.state for outcome in outcomes]
    assert steps_of(parts) == steps_of(rolled) and len(events_of(parts)) == 2


def test_faults_in_a_row_stop_the_run(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    faults = {place * BATCH: math.nan for place in range(2, 9)}
    options = ["train.faults.on_non_finite=skip", "train.faults.max_in_a_row=2", "train.checkpoint.every_steps=2"]
    outcomes = pool.run(2, pretrain, data, tmp_path, 8, options, faults)
    for outcome in outcomes:
        assert outcome.error.startswith("training stopped at step 5, after 2 such faults without a good step beyond")
        assert "train.faults.max_in_a_row" in outcome.error and "loss nan" in outcome.error
    assert [event.step for event in events_of(tmp_path)] == [3, 4]
    assert list_checkpoints(tmp_path)[0] == checkpoint_folder(tmp_path, 2)


def test_without_a_checkpoint_there_is_no_way_back(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    outcomes = pool.run(2, pretrain, data, tmp_path, 4, ["train.faults.on_non_finite=roll_back"], {BATCH: math.nan})
    for outcome in outcomes:
        assert "training stopped at step 2: loss nan" in outcome.error
        assert "no checkpoint yet to roll back to: set train.checkpoint.every_steps lower" in outcome.error


def test_damaged_checkpoints_never_crowd_out_whole_ones(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """The newest is damaged: the run goes on before it, and keeps the one that it writes, of an earlier step."""
    keep = ["train.checkpoint.every_steps=2", "train.checkpoint.keep=1"]
    pool.run(2, pretrain, data, tmp_path, 4, [*keep, "train.checkpoint.keep=2"])
    damaged = checkpoint_folder(tmp_path, 4)
    (damaged / ".metadata").write_bytes(b"")
    for outcome in pool.run(2, pretrain, data, tmp_path, 3, keep):
        assert outcome.error == ""
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 3), damaged]
    assert problems(checkpoint_folder(tmp_path, 3)) == []
    # Written anew, it counts again.
    pool.run(2, pretrain, data, tmp_path, 4, keep)
    assert list_checkpoints(tmp_path) == [damaged] and problems(damaged) == []


def pretrain_with_damage(rank: int, world_size: int, data: Path, output: Path, bad_step: int, where: str) -> str:
    """A bit flips on one rank in a step: in a router's bias, after the update; or in a norm's weights that another rank
    owns, before the backward has ended, so that the update overwrites it."""
    update, accumulate, steps = TrainStep._update_biases, TrainStep.accumulate_gradients, [0]

    def damaged_bias(self: TrainStep, *args: Any) -> None:
        update(self, *args)
        if rank == 1 and steps[0] == bad_step:
            next(iter(self._chunks.routers().values())).bias.view(torch.int32)[0] ^= 1 << 12

    def damaged_norm(self: TrainStep, *args: Any) -> Any:
        observed = accumulate(self, *args)
        steps[0] += 1
        name = "final_norm.weight"
        owns = any(piece.name == name for piece in self.sharded.owned)
        if where == "norm" and not owns and steps[0] == bad_step:
            dict(self._chunks.named_parameters())[name].data.view(torch.int32)[0] ^= 1
        return observed

    options = ["train.faults.replica_check_every_steps=5", "train.checkpoint.every_steps=2"]
    with (
        mock.patch.object(TrainStep, "_update_biases", damaged_bias if where == "bias" else update),
        mock.patch.object(TrainStep, "accumulate_gradients", damaged_norm),
    ):
        return pretrain(rank, world_size, data, output, 6, options).error


@pytest.mark.parametrize(
    "where, bad_step, found, checkpoints", [("bias", 3, 4, [2]), ("bias", 5, 6, [2, 4]), ("norm", 5, 4, [2, 4])]
)
def test_replicas_are_compared_at_their_steps_and_before_each_checkpoint(
    pool: WorkerPool, data: Path, tmp_path: Path, where: str, bad_step: int, found: int, checkpoints: list[int]
) -> None:
    first, second = pool.run(2, pretrain_with_damage, data, tmp_path, bad_step, where)
    assert first == second and first.startswith(f"training stopped after step {found}: ")
    assert {"bias": "router.bias", "norm": "final_norm.weight"}[where] in first
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in checkpoints]
