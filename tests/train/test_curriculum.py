"""Runs of several stages: what a switch changes, and that being killed at one changes nothing."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from steptron.checkpoint.folder import checkpoint_folder, list_checkpoints
from steptron.checkpoint.manifest import read_config, read_manifest
from steptron.config.checks import check_stages
from steptron.config.loader import load
from steptron.errors import UserError
from steptron.train import loop
from steptron.train.records import EventRecord, StepRecord
from steptron.train.run_lock import run_lock_of_all
from steptron.train.step import TrainStep
from steptron.train.stop import StopRequest
from tests.data.corpora import build_small, varied_texts
from tests.train.test_fault_runs import digests, events_of, records, steps_of
from tests.worker_pool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
STAGES = f"""
base: {ROOT}/configs/model/nano.yaml
model: {{mtp: {{depths: 3}}}}
balance: {{ep_groups: 4}}
optimizer: {{lr: 2e-3, schedule: {{kind: constant}}}}
train:
  global_batch_size: 4
  micro_batch_size: 1
  deterministic: true
  logging: {{tensorboard: false}}
  validation: {{batches: 1}}
  checkpoint: {{keep: 1}}
stages:
  - name: base
    tokens: 300
    data: {{sequence_length: 32}}
    train: {{global_batch_size: 4, batch_ramp: {{start: 2, increment: 2, sequences: 4}}}}
    optimizer: {{schedule: {{kind: cosine, warmup_steps: 1, min_lr: 1e-3}}}}
  - name: anneal
    tokens: 200
    data: {{sequence_length: 32}}
    balance: {{bias: {{rate: 1e-3, final_rate: 0}}, ep_loss_coefficient: 0}}
    loss: {{mtp_weight: 0.1}}
    optimizer: {{lr: 1e-3, weight_decay: 0.01, schedule: {{kind: cosine, min_lr: 2e-4}}}}
  - name: long
    tokens: 400
    data: {{sequence_length: 96}}
    model: {{full: {{rope: {{theta: 1e6}}}}}}
    train: {{global_batch_size: 2}}
    balance: {{freeze_router: true}}
    optimizer: {{lr: 2e-4, schedule: {{kind: constant, warmup_fraction: 0.3}}}}
  - name: mtp
    tokens: 300
    clone_mtp: true
    data: {{sequence_length: 96}}
    model: {{full: {{rope: {{theta: 1e6}}}}}}
    balance: {{freeze_router: true}}
    loss: {{mtp_weight: 0.1, mtp_train_depths: 3}}
    train: {{global_batch_size: 2, freeze_backbone: true}}
    optimizer: {{lr: 2e-4}}
"""
MOE_LAYERS = 7
ENDS = [4, 6, 9, 11]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("data"), "texts", [{"text": text} for text in varied_texts(200)])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "stages.yaml"
    path.write_text(STAGES)
    return path


@dataclass(frozen=True)
class Outcome:
    error: str
    complete: bool
    state: dict[str, str]
    printed: str


class _Killed(Exception):
    """In the place of a signal."""


def train(
    rank: int,
    world_size: int,
    file: Path,
    data: Path,
    output: Path,
    overrides: Sequence[str] = (),
    killed_at: int | None = None,
    through: str | None = None,
) -> Outcome:
    """Trains through all stages, or until so many have ended; then nothing more happens."""
    loaded = load(file, [f"data.train=[{{path: {data}}}]", f"train.output={output}", *overrides])
    curriculum = loaded.through(through)
    check_stages(curriculum, world_size, check_data=True)
    printed, error, complete = io.StringIO(), "", False
    steps: list[TrainStep] = []
    ended: list[int] = []
    run, resume = loop.Pretraining.run, loop.Pretraining.__init__

    def note(self: loop.Pretraining, *args: Any, **options: Any) -> None:
        resume(self, *args, **options)
        steps.append(self.step)

    def run_or_die(self: loop.Pretraining, stop: StopRequest) -> bool:
        result = run(self, stop)
        ended.append(self.progress.step)
        if len(ended) == killed_at:
            raise _Killed
        return result

    with (
        mock.patch.object(loop.Pretraining, "__init__", note),
        mock.patch.object(loop.Pretraining, "run", run_or_die),
        mock.patch("gc.freeze"),  # this process outlives the run
        mock.patch("gc.unfreeze"),
        contextlib.redirect_stdout(printed),
        run_lock_of_all(output),
    ):
        try:
            complete = loop.pretrain(curriculum, torch.device("cpu"), StopRequest())
        except UserError as raised:
            error = str(raised)
        except _Killed:
            error = "killed"
    return Outcome(error, complete, digests(steps[-1]) if steps else {}, printed.getvalue())


def test_a_run_goes_through_all_stages_and_says_so(pool: WorkerPool, file: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    (outcome,) = pool.run(1, train, file, data, output)
    assert outcome.error == "" and outcome.complete
    steps = [record for record in steps_of(output) if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == list(range(1, 12))
    assert [record.batch_size for record in steps] == [2, 2, 4, 4, 4, 4, 2, 2, 2, 2, 2]
    assert [record.sequence_length for record in steps] == [32] * 6 + [96] * 5
    assert [len(record.mtp_losses) for record in steps] == [1] * 9 + [3] * 2
    assert [record.learning_rate for record in steps[4:7]] == [1e-3, pytest.approx(6e-4), 0.0]
    assert [record.bias_update_rate for record in steps] == [1e-3] * 4 + [1e-3, 5e-4] + [0.0] * 5
    switches = [(event.step, event.detail.split(" (")[0]) for event in events_of(output) if event.event == "stage"]
    assert switches == [(1, "base"), (5, "anneal"), (7, "long"), (10, "mtp")]
    # Weight decay, EP loss and MTP weight of a stage are those of its loss and update.
    for record, weight, ep in ((steps[0], 0.3, 1e-3), (steps[4], 0.1, 0.0)):
        expected = record.lm_loss + weight * record.mtp_losses[0] + ep * MOE_LAYERS * (record.ep_loss or 0)
        assert record.loss == pytest.approx(expected, rel=1e-6)
    # The last checkpoint of each stage is kept for good, with the stage's own configuration.
    assert [int(folder.name[-8:]) for folder in list_checkpoints(output)] == ENDS
    for end, name, theta in zip(ENDS, ("base", "anneal", "long", "mtp"), (5e6, 5e6, 1e6, 1e6), strict=True):
        folder = checkpoint_folder(output, end)
        manifest = read_manifest(folder)
        assert manifest.stage is not None and (manifest.stage.name, manifest.stage.ends) == (name, True)
        assert read_config(folder).model.full.rope.theta == theta
    # With the backbone frozen only MTP depths change.
    parts = tmp_path / "parts"
    pool.run(1, train, file, data, parts, (), 2)
    (before,) = pool.run(1, train, file, data, parts, (), 1)
    changed = {name for name in outcome.state if outcome.state[name] != before.state.get(name)}
    model = {name for name in outcome.state if " of " not in name and name != "updates"}
    assert changed & model and all(name.startswith("mtp.") for name in changed & model)
    assert any(name.startswith("mtp.0.") for name in changed & model)


def test_killed_at_each_switch_it_ends_bit_for_bit_as_in_one_go(
    pool: WorkerPool, file: Path, data: Path, tmp_path: Path
) -> None:
    through, parts = tmp_path / "through", tmp_path / "parts"
    (expected,) = pool.run(1, train, file, data, through)
    for end in ENDS[:-1]:
        (killed,) = pool.run(1, train, file, data, parts, (), 1)
        assert killed.error == "killed" and f"checkpoint: {checkpoint_folder(parts, end)}" in killed.printed
    (last,) = pool.run(1, train, file, data, parts)
    assert last.complete and last.state == expected.state
    assert records(parts) == records(through)
    (again,) = pool.run(1, train, file, data, parts)
    assert again.complete and "nothing to do: step 11 of 11 is done" in again.printed


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, ["parallel.expert=2"]),
        (2, ["parallel.pipeline=2"]),
        (2, ["parallel.context=2"]),
    ],
    ids=["EP2", "PP2", "CP2"],
)
def test_stages_under_other_layouts_learn_the_same(
    pool: WorkerPool, file: Path, data: Path, tmp_path: Path, world_size: int, layout: list[str]
) -> None:
    """The first two stages on one process, the others on several: losses as on one throughout."""
    through, parts = tmp_path / "through", tmp_path / "parts"
    pool.run(1, train, file, data, through)
    pool.run(1, train, file, data, parts, (), 2)
    outcomes = pool.run(world_size, train, file, data, parts, layout)
    assert [outcome.error for outcome in outcomes] == [""] * world_size
    for ours, theirs in zip(steps_of(parts), steps_of(through), strict=True):
        assert isinstance(ours, StepRecord) and isinstance(theirs, StepRecord)
        assert ours.lm_loss == pytest.approx(theirs.lm_loss, rel=1e-5)
        assert ours.mtp_losses == pytest.approx(theirs.mtp_losses, rel=1e-5)


def test_cloned_depths_begin_as_the_first_one(pool: WorkerPool, file: Path, data: Path, tmp_path: Path) -> None:
    """Where nothing is learned after the clone, all depths are alike; so are bf16's master weights."""
    still = ["stages.3.optimizer.lr=1e-30", "stages.3.optimizer.weight_decay=0", "train.precision=bf16"]
    (outcome,) = pool.run(1, train, file, data, tmp_path / "run", still)
    assert outcome.error == ""
    first = [name for name in outcome.state if "mtp.0." in name and not name.startswith(("momentum", "exp_avg"))]
    assert any(name.startswith("master of") for name in first)
    for name in first:
        ours, others = outcome.state[name], {outcome.state[name.replace("mtp.0.", f"mtp.{k}.")] for k in (1, 2)}
        # The fp32 weights behind copies begin as these: what the first depth's have below bf16 is its own.
        assert len(others) == 1 and (name.startswith("master of") or others == {ours}), name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "stages.0.tokens=400",
            "step 4 was made in stage base, of 12 sequences after 0; as the",
        ),
        ("stages.0.name=start", "is made in stage start, of 12 sequences after 0"),
        ("stages.0.train.global_batch_size=6", "step 4 was made in stage base, of 12 sequences"),
    ],
)
def test_stages_that_have_begun_cannot_be_changed(
    pool: WorkerPool, file: Path, data: Path, tmp_path: Path, override: str, said: str
) -> None:
    output = tmp_path / "run"
    pool.run(1, train, file, data, output, (), 1)
    (outcome,) = pool.run(1, train, file, data, output, [override])
    assert said in outcome.error and "--fresh" in outcome.error
    # Later ones can.
    (outcome,) = pool.run(1, train, file, data, output, ["stages.1.tokens=100", "stages.2.tokens=100"])
    assert outcome.complete, outcome.error
    assert [event.event for event in events_of(output) if isinstance(event, EventRecord)].count("stage") == 4


def test_a_run_can_end_with_a_stage_and_go_on(pool: WorkerPool, file: Path, data: Path, tmp_path: Path) -> None:
    through, parts = tmp_path / "through", tmp_path / "parts"
    (expected,) = pool.run(1, train, file, data, through)
    for _ in range(2):  # the second time there is nothing to do
        (outcome,) = pool.run(1, train, file, data, parts, (), None, "anneal")
        assert outcome.complete and list_checkpoints(parts)[-1] == checkpoint_folder(parts, 6)
    assert "nothing to do: step 6 of 6 is done" in outcome.printed
    (outcome,) = pool.run(1, train, file, data, parts)
    assert outcome.complete and outcome.state == expected.state
    (outcome,) = pool.run(1, train, file, data, parts, (), None, "base")
    assert "the run is at step 11 already, beyond step 4, with which base ends" in outcome.error
