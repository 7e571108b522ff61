"""Checkpoints written under one layout and read under the same and under another."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from steptron.checkpoint import loading, saving
from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import CONFIG, Progress, read_manifest
from steptron.checkpoint.restore import restore_model
from steptron.checkpoint.weights import open_weights
from steptron.config.loader import load as load_config
from steptron.errors import UserError
from steptron.model.parameter_shards import Place
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep
from tests.checkpoint.states import (
    ADAMW,
    BF16,
    MUON,
    PROGRESS,
    State,
    assembled,
    configuration,
    forget,
    num_owned,
    state_of,
    stored,
)
from tests.parallel.layouts import make_batches, parts_of
from tests.worker_pool import WorkerPool

LAYOUTS = {
    "one process": (1, []),
    "DP4": (4, []),
    "EP2": (2, ["parallel.expert=2"]),
    "EP2xDP2": (4, ["parallel.expert=2"]),
    "PP2xDP2": (4, ["parallel.pipeline=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "TP2xDP2": (4, ["parallel.tensor=2"]),
    "TP2 attention, EP4 experts": (4, ["parallel.tensor=2", "parallel.expert=4"]),
    "PP2xCP2": (4, ["parallel.pipeline=2", "parallel.context=2"]),
    "an empty stage": (4, ["parallel.pipeline=4", "parallel.pipeline_layout=Et|ttttttt||tmL"]),
}
SCATTER, EVERYWHERE = "optimizer.sharding.reduction=reduce_scatter", "optimizer.sharding.reduction=all_reduce"
ROUND_TRIPS = {
    ("PP2xVPP2",): ["TP2xDP2", "PP2xCP2"],
    ("TP2 attention, EP4 experts", EVERYWHERE): ["EP2", "an empty stage"],
    ("DP4", MUON, SCATTER): ["EP2xDP2"],
    ("EP2xDP2", MUON, SCATTER): ["TP2 attention, EP4 experts"],
    ("PP2xDP2", MUON, EVERYWHERE, BF16): ["an empty stage"],
}
"""Layout and settings under which a checkpoint is written, and the layouts under which it is read, with the other
reduction of gradients. All pairs of plain layouts are in ``test_every_pair.py``."""


def train_and_save(rank: int, world_size: int, output: Path, overrides: Sequence[str]) -> State:
    """Two steps, a checkpoint, and what it should hold on this rank."""
    config = configuration(output, overrides)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    for _ in range(2):
        train.run(make_batches()[mesh.data_rank :: mesh.data_size], 1e-2, 1e-3)
    saving.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
    return state_of(train)


def load_and_report(rank: int, world_size: int, folder: Path, overrides: Sequence[str]) -> tuple[Progress, int, State]:
    config = configuration(folder, overrides)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    forget(train)
    progress = loading.load(folder, train.chunks, train.optimizer, mesh)
    return progress, train.optimizer.num_steps, state_of(train)


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=" ".join)
def test_a_checkpoint_loads_bit_equal_under_other_layouts(
    pool: WorkerPool, tmp_path: Path, case: tuple[str, ...]
) -> None:
    """Written by owners alone, by logical name and whole shape; read by whoever owns it under another layout."""
    name, *settings = case
    world_size, layout = LAYOUTS[name]
    states = pool.run(world_size, train_and_save, tmp_path, [*layout, *settings])
    saved = assembled(states)
    folder = tmp_path / "checkpoints" / "step_00000002"
    written = stored(folder)
    assert written.keys() == saved.keys()
    assert [key for key in saved if not torch.equal(saved[key], written[key])] == []
    kinds = ["exp_avg", "exp_avg_sq", *(["momentum"] if MUON in settings else []), *(["master"] * (BF16 in settings))]
    assert {key.split(".")[1] for key in saved if key.startswith("optimizer.")} == set(kinds)
    for kind in kinds:
        own = {key: tensor for key, tensor in saved.items() if key.startswith(f"optimizer.{kind}.")}
        assert num_owned(states, kind) == sum(t.numel() for k, t in own.items() if not k.endswith("embedding.weight"))
        assert all(tensor.count_nonzero() > 0 for tensor in own.values())
    other = SCATTER if EVERYWHERE in settings else EVERYWHERE
    kept = [setting for setting in settings if setting not in (SCATTER, EVERYWHERE)]
    for target in ROUND_TRIPS[case]:
        world_size, layout = LAYOUTS[target]
        outcomes = pool.run(world_size, load_and_report, folder, [*layout, *kept, other])
        assert {(progress, steps) for progress, steps, _ in outcomes} == {(PROGRESS, 2)}
        loaded = assembled([state for _, _, state in outcomes])
        assert loaded.keys() == saved.keys()
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == [], target


def test_a_vocabulary_that_does_not_divide_is_stored_without_its_padding(pool: WorkerPool, tmp_path: Path) -> None:
    """513 rows: two ranks hold 257 each, the last rank's last is padding; both MTP depths use the embedding."""
    odd = ["model.vocab_size=513", "model.mtp.depths=2", "loss.mtp_train_depths=2", MUON]
    world_size, layout = LAYOUTS["TP2xDP2"]
    saved = assembled(pool.run(world_size, train_and_save, tmp_path, [*layout, *odd]))
    for key in ("model.embedding.weight", "optimizer.exp_avg.mtp.1.head.weight", "optimizer.exp_avg.head.weight"):
        assert saved[key].shape == (513, 64)
    for target in ("one process", "PP2xDP2", "TP2"):
        world_size, layout = LAYOUTS[target]
        folder = tmp_path / "checkpoints" / "step_00000002"
        loaded = assembled([o[2] for o in pool.run(world_size, load_and_report, folder, [*layout, *odd])])
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == [], target


def saves_in_a_row(rank: int, world_size: int, output: Path, overrides: Sequence[str]) -> list[tuple[State, bool]]:
    """What each of six saves should hold on this rank, and whether it was planned anew; the last two are of another
    optimizer."""
    configs = [configuration(output, [*overrides, optimizer]) for optimizer in (ADAMW, MUON)]
    mesh = build_mesh(configs[0].parallel)
    saver = saving.Saver(configs[0], ["hash"], mesh)
    found = []
    for config, numbers in zip(configs, ((1, 2, 3, 4), (5, 6)), strict=True):
        train = TrainStep(config, mesh, torch.device("cpu"))
        for number in numbers:
            train.run(make_batches(number)[mesh.data_rank :: mesh.data_size], 1e-2, 1e-3)
            with mock.patch.object(MCoreSavePlanner, "create_local_plan", autospec=True, side_effect=_plan) as planned:
                saver.start(Progress(step=number), train.chunks, train.optimizer)
            saver.finish()
            found.append((state_of(train), planned.called))
    return found


_plan = MCoreSavePlanner.create_local_plan


def test_saves_are_planned_anew_only_when_other_tensors_are_saved(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(2, saves_in_a_row, tmp_path, ["parallel.expert=2"])
    for number, saves in enumerate(zip(*ranks, strict=True), start=1):
        saved = assembled([state for state, _ in saves])
        written = stored(tmp_path / "checkpoints" / f"step_{number:08}")
        assert written.keys() == saved.keys()
        assert [key for key in saved if not torch.equal(saved[key], written[key])] == []
    assert [[anew for _, anew in saves] for saves in ranks] == [[True, False, False, False, True, False]] * 2


def resumed_and_whole(
    rank: int, world_size: int, output: Path, overrides: Sequence[str]
) -> tuple[list[tuple[float, float]], State, list[tuple[float, float]], State]:
    """Losses and norms of steps 3 and 4 and the state after them: of one run, and of one that goes on from a checkpoint
    after step 2, where it had trained with other weights before."""
    config = configuration(output, overrides)
    mesh = build_mesh(config.parallel)
    batches = [make_batches(seed)[mesh.data_rank :: mesh.data_size] for seed in range(4)]

    def steps(train: TrainStep, numbers: Sequence[int]) -> list[tuple[float, float]]:
        results = [train.run(batches[number], 1e-2 / (1 + number), 1e-3) for number in numbers]
        return [(result.observed.losses.total, result.gradient_norm) for result in results]

    whole = TrainStep(config, mesh, torch.device("cpu"))
    steps(whole, (0, 1))
    folder = saving.save(config, PROGRESS, ["hash"], whole.chunks, whole.optimizer, mesh)
    rest = steps(whole, (2, 3))
    resumed = TrainStep(config, mesh, torch.device("cpu"))
    steps(resumed, (3,))
    loading.load(folder, resumed.chunks, resumed.optimizer, mesh)
    return rest, state_of(whole), steps(resumed, (2, 3)), state_of(resumed)


@pytest.mark.parametrize(
    "name, settings", [("one process", [MUON]), ("EP2xDP2", [MUON, SCATTER, BF16]), ("PP2xDP2", [MUON])]
)
def test_a_resumed_run_is_bit_identical(pool: WorkerPool, tmp_path: Path, name: str, settings: list[str]) -> None:
    world_size, layout = LAYOUTS[name]
    for rest, whole, again, resumed in pool.run(world_size, resumed_and_whole, tmp_path, [*layout, *settings]):
        assert again == rest
        assert resumed.keys() == whole.keys()
        for key, part in whole.items():
            assert torch.equal(part.tensor.nan_to_num(7.0), resumed[key].tensor.nan_to_num(7.0)), key


def restored(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    weights = open_weights(folder)
    assert weights.model == load_config(folder / CONFIG).config.model
    model = restore_model(weights, torch.device("cpu"))
    tensors = {name: tensor.detach() for name, tensor in model.logical_tensors()}
    return {f"model.{name}": part.tensor for name, part in parts_of(model.spec, Place(), tensors).items()}


def failing_load(rank: int, world_size: int, folder: Path, overrides: list[str]) -> str:
    try:
        load_and_report(rank, world_size, folder, overrides)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    pool.run(2, train_and_save, output, ["parallel.expert=2"])
    return output / "checkpoints" / "step_00000002"


def test_restore_builds_the_model_in_one_process(pool: WorkerPool, checkpoint: Path) -> None:
    (tensors,) = pool.run(1, restored, checkpoint)
    ((_, _, state),) = pool.run(1, load_and_report, checkpoint, [])
    expected = {name: part.tensor for name, part in state.items() if name.startswith("model.")}
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["model.dense_hidden_size=192"],
            "model.layers.0.ffn.gate.weight has shape [160, 64], the model needs [192, 64]",
        ),
        (
            ["model.num_layers=10", "model.clamp={}"],
            "model.layers.9.attention_norm.weight is missing",
        ),
        (
            ["model.num_layers=8", "model.clamp={}"],
            "model.layers.8.attention_norm.weight is not part of the model",
        ),
        (["model.layout=S3F1+heads+gate+sink"], "model.layers.0.attention.sink is missing"),
        (["model.mtp.depths=2"], "model.mtp.1.projection.weight is missing"),
        (["model.value_head=true"], "model.value_head.weight is missing"),
        ([BF16], "model.embedding.weight is float32, the model needs bfloat16"),
        ([MUON], "\n  optimizer.momentum.layers.0.attention.query.weight is missing"),
        ([MUON], "optimizer.exp_avg.layers.0.attention.query.weight is not part of this optimizer's state"),
        (
            [MUON, "optimizer.roles={query: {optimizer: adamw}}"],
            ":\n  optimizer.momentum.layers.0.attention.key.weight",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    pool: WorkerPool, checkpoint: Path, overrides: list[str], message: str
) -> None:
    (text,) = pool.run(1, failing_load, checkpoint, overrides)
    assert text.startswith(f"checkpoint {checkpoint} does not fit this model:") and message in text


@pytest.mark.parametrize("override", ["balance.freeze_router=true", "loss.mtp_train_depths=0"])
def test_state_of_what_is_frozen_since_is_left_out(pool: WorkerPool, checkpoint: Path, override: str) -> None:
    ((_, _, state),) = pool.run(1, load_and_report, checkpoint, [override])
    written, loaded = stored(checkpoint), assembled([state])
    without = written.keys() - loaded.keys()
    frozen = ".ffn.router.weight" if "router" in override else ".mtp."
    assert without == {key for key in written if key.startswith("optimizer.") and frozen in f".{key}"}
    assert [key for key in loaded if not torch.equal(loaded[key], written[key])] == []


def test_what_one_stage_misses_every_rank_reports(pool: WorkerPool, checkpoint: Path) -> None:
    """The dense layers lie on the first of two stages; the other finds nothing wrong."""
    overrides = ["parallel.pipeline=2", "model.dense_hidden_size=192"]
    texts = pool.run(4, failing_load, checkpoint, overrides)
    assert len(set(texts)) == 1
    assert "optimizer.exp_avg.layers.0.ffn.gate.weight has shape [160, 64], the model needs [192, 64]" in texts[0]


def test_a_checkpoint_of_another_format_is_refused(pool: WorkerPool, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000002"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"format_version": 99}))
    with pytest.raises(UserError, match="has checkpoint format 99, this version reads 2"):
        read_manifest(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(UserError, match=r"steptron\.json cannot be read"):
        read_manifest(folder)
    (folder / MANIFEST).write_bytes((checkpoint / MANIFEST).read_bytes())
    (text,) = pool.run(1, failing_load, folder, [])
    assert f"{folder} cannot be read as a checkpoint" in text


def save_into_a_file(rank: int, world_size: int, output: Path) -> str:
    output.write_text("not a folder") if rank == 0 else None
    try:
        train_and_save(rank, world_size, output, ["parallel.expert=2"])
    except UserError as error:
        return str(error)
    return ""


def test_an_unwritable_folder_is_reported_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    for text in pool.run(2, save_into_a_file, tmp_path / "occupied"):
        assert text.startswith("checkpoint not written: ") and str(tmp_path / "occupied") in text


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_shard_is_named_on_every_rank(
    pool: WorkerPool, checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(checkpoint, folder)
    shard = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:1000])
    else:
        shard.unlink()
    for message in pool.run(2, failing_load, folder, ["parallel.tensor=2"]):
        assert message.startswith(f"{folder} cannot be loaded"), message


def sink_run(rank: int, world_size: int, output: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with attention sinks, for which the released layout has no place, read as weights."""
    config = configuration(output, ["model.layout=S3F1+heads+gate+sink"])
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    saving.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
    weights = open_weights(output)
    other = TrainStep(config, mesh, torch.device("cpu"), weights)
    with pytest.raises(UserError, match=r"layers\.0\.attention\.sink has no place in the released layout"):
        weights.shapes()
    return {
        name: torch.stack([tensor, dict(train.chunks.logical_tensors())[name]]).detach()
        for name, tensor in other.chunks.logical_tensors()
        if name.endswith("sink")
    }


def test_sinks_are_weights_of_a_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    (sinks,) = pool.run(1, sink_run, tmp_path)
    assert len(sinks) == 10 and all(torch.equal(*pair) for pair in sinks.values())


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> list[float]:
    """From every generator; those of normal numbers keep a second one for later."""
    normal = [random.gauss(0.0, 1.0), np.random.standard_normal()]
    return [*normal, random.random(), np.random.random(), *torch.rand(2).tolist()]


def draw_after_saving(rank: int, world_size: int, output: Path) -> list[float]:
    config = configuration(output, ["parallel.expert=2"])
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    seed_generators(rank)
    draw()
    saving.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
    return draw()


def draw_after_loading(rank: int, world_size: int, folder: Path, overrides: list[str]) -> tuple[list[float], bool]:
    """What generators give, and whether that is what they would have given without the checkpoint."""
    config = configuration(folder, overrides)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    seed_generators(100 + rank)
    loading.load(folder, train.chunks, train.optimizer, mesh)
    drawn = draw()
    seed_generators(100 + rank)
    return drawn, drawn == draw()


def test_random_generators_go_on_where_each_rank_stopped(pool: WorkerPool, tmp_path: Path) -> None:
    """On as many processes, whatever their layout; on another number there is nothing to go on from."""
    drawn = pool.run(2, draw_after_saving, tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000002"
    assert drawn[0] != drawn[1]
    assert pool.run(2, draw_after_loading, folder, ["parallel.tensor=2"]) == [(numbers, False) for numbers in drawn]
    assert [untouched for _, untouched in pool.run(1, draw_after_loading, folder, [])] == [True]
