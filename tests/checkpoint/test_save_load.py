"""Checkpoints written under one layout and read under the same and under another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from steptron.checkpoint import save_load
from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import CONFIG, Progress, read_manifest
from steptron.checkpoint.restore import restore_model
from steptron.checkpoint.weights import open_weights
from steptron.config.loader import load as load_config
from steptron.config.schema import PretrainConfig
from steptron.errors import UserError
from steptron.model.parameter_shards import Place
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep
from tests.parallel.layouts import NANO, Part, assemble, make_batches, parts_of
from tests.worker_pool import WorkerPool

PROGRESS = Progress(step=2, consumed_sequences=16, consumed_tokens=700)
LAYOUTS = {
    "one process": (1, []),
    "EP2": (2, ["parallel.expert=2"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "TP2 attention, EP4 experts": (4, ["parallel.tensor=2", "parallel.expert=4"]),
    "PP2xCP2": (4, ["parallel.pipeline=2", "parallel.context=2"]),
    "an empty stage": (4, ["parallel.pipeline=4", "parallel.pipeline_layout=Et|ttttttt||tmL"]),
}
State = dict[str, Part]


def configuration(output: Path, overrides: list[str]) -> PretrainConfig:
    return load_config(NANO, [f"train.output={output}", "data.sequence_length=48", *overrides]).config


def train_and_save(rank: int, world_size: int, output: Path, overrides: list[str]) -> State:
    """Two steps, a checkpoint, and what it should hold on this rank."""
    config = configuration(output, overrides)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    for _ in range(2):
        train.run(make_batches()[mesh.data_rank :: mesh.data_size], 1e-2, 1e-3)
    save_load.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
    return state_of(train)


def load_and_report(rank: int, world_size: int, folder: Path, overrides: list[str]) -> tuple[Progress, int, State]:
    config = configuration(folder, overrides)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    for part in state_of(train).values():
        part.tensor.fill_(float("nan"))
    progress = save_load.load(folder, train.chunks, train.optimizer, mesh)
    return progress, train.optimizer.num_steps, state_of(train)


def state_of(train: TrainStep) -> State:
    """Every logical matrix of this rank's state, aliased."""
    kinds = {"model": dict(train.chunks.logical_tensors()), **train.optimizer.state()}
    return {
        f"{kind}.{name}": Part(part.axis, part.index, part.tensor.detach())
        for kind, tensors in kinds.items()
        for name, part in parts_of(train.spec, train.mesh.place, tensors).items()
    }


@pytest.fixture(
    scope="module", params=[("fp32", "TP2 attention, EP4 experts"), ("fp32", "PP2xVPP2"), ("bf16", "PP2xEP2")], ids=str
)
def saved_checkpoint(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """Precision, folder and state of a checkpoint that several processes wrote."""
    output = tmp_path_factory.mktemp("saved")
    precision, name = request.param
    world_size, layout = LAYOUTS[name]
    parts = pool.run(world_size, train_and_save, output, [*layout, f"train.precision={precision}"])
    return precision, output / "checkpoints" / "step_00000002", assemble(parts)


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_checkpoint_loads_bit_equal_under_every_layout(
    pool: WorkerPool, saved_checkpoint: tuple[str, Path, dict[str, torch.Tensor]], target: str
) -> None:
    precision, folder, saved = saved_checkpoint
    world_size, layout = LAYOUTS[target]
    outcomes = pool.run(world_size, load_and_report, folder, [*layout, f"train.precision={precision}"])
    assert {(progress, steps) for progress, steps, _ in outcomes} == {(PROGRESS, 2)}
    loaded = assemble([state for _, _, state in outcomes])
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    assert any(name.startswith("master.") for name in saved) == (precision == "bf16")


def test_a_vocabulary_that_does_not_divide_is_stored_without_its_padding(pool: WorkerPool, tmp_path: Path) -> None:
    """513 rows: two ranks hold 257 each, of which the last rank's last is padding."""
    odd = ["model.vocab_size=513", "model.mtp.depths=2", "loss.mtp_train_depths=2"]
    for name, (world_size, layout) in {"TP2": LAYOUTS["TP2"], "one process": (1, [])}.items():
        saved = assemble(pool.run(world_size, train_and_save, tmp_path / name, [*layout, *odd]))
        assert saved["model.embedding.weight"].shape == saved["exp_avg.mtp.1.head.weight"].shape == (513, 64)
        folder = tmp_path / name / "checkpoints" / "step_00000002"
        for target in ("one process", "TP2", "PP2"):
            world_size, layout = LAYOUTS[target]
            loaded = assemble([o[2] for o in pool.run(world_size, load_and_report, folder, [*layout, *odd])])
            assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []


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
        (["train.precision=bf16"], "optimizer.master.embedding.weight is missing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    pool: WorkerPool, checkpoint: Path, overrides: list[str], message: str
) -> None:
    (text,) = pool.run(1, failing_load, checkpoint, overrides)
    assert text.startswith(f"checkpoint {checkpoint} does not fit this model:") and message in text


def test_a_checkpoint_of_another_format_is_refused(pool: WorkerPool, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000002"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"format_version": 99}))
    with pytest.raises(UserError, match="has checkpoint format 99, this version reads 1"):
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
    save_load.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
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
