"""A checkpoint rewritten for other layouts, and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from steptron.checkpoint import saving
from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import CONFIG, MODEL, Manifest, read_config, read_manifest
from steptron.checkpoint.relayout import check_target, relayout
from steptron.checkpoint.reshard import Resharded, reshard
from steptron.checkpoint.saving import complete, stamp
from steptron.checkpoint.stored_tensors import stored_tensors
from steptron.cli.main import app
from steptron.errors import ConfigError, UserError
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep
from tests.checkpoint.made import flip
from tests.checkpoint.states import BF16, MUON, PROGRESS, configuration, stored
from tests.parallel.layouts import make_batches
from tests.worker_pool import WorkerPool

SCATTER = "optimizer.sharding.reduction=reduce_scatter"
# The embedding lies on both stages of a pipeline, for MTP; rows of the vocabulary do not divide by two.
SETTINGS = ["parallel.expert=2", MUON, BF16, SCATTER, "model.vocab_size=513"]


def train_and_save(rank: int, world_size: int, output: Path) -> None:
    config = configuration(output, SETTINGS)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    train.run(make_batches()[mesh.data_rank :: mesh.data_size], 1e-2, 1e-3)
    saver = saving.Saver(config, ["hash"], mesh)
    saver.start(PROGRESS, train.chunks, train.optimizer, validation_loss=2.5)
    saver.finish()


def rewrite(rank: int, world_size: int, source: Path, output: Path, overrides: list[str]) -> Resharded | str:
    try:
        return reshard(source, output, relayout(source, overrides, world_size))
    except UserError as error:
        return str(error)


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    pool.run(2, train_and_save, output)
    folder = output / "checkpoints" / "step_00000002"
    (folder / "tokenizer.json").write_text("{}")
    sum_up_again(folder)
    return folder


def sum_up_again(folder: Path) -> None:
    """Takes what is in a checkpoint now for what was written."""
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    complete(folder, manifest, {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_tensor_is_bit_equal_on_the_way_through_other_layouts(
    pool: WorkerPool, checkpoint: Path, tmp_path: Path
) -> None:
    """EP2, PP2 x EP2, TP2 x PP2, one process; the data is nowhere."""
    expected, before = stored(checkpoint), read_manifest(checkpoint)
    assert {key.split(".")[1] for key in expected if key.startswith("optimizer.")} == {
        *("exp_avg", "exp_avg_sq", "momentum", "master")
    }
    source = checkpoint
    for number, (world_size, overrides) in enumerate(
        [
            (4, ["parallel.pipeline=2"]),
            (4, ["parallel.expert=1", "parallel.tensor=2", "optimizer.sharding.reduction=all_reduce"]),
            (1, ["parallel.tensor=1", "parallel.pipeline=1"]),
        ]
    ):
        output = tmp_path / str(number) / "step_00000002"
        outcomes = pool.run(world_size, rewrite, source, output, overrides)
        # Two processes wrote their states of random generators, and nobody has since.
        assert [getattr(outcome, "keeps_random_states", outcome) for outcome in outcomes] == [False] * world_size
        assert random_rows(output) == {}
        written = stored(output)
        assert written.keys() == expected.keys()
        assert [key for key in expected if not same_bits(written[key], expected[key])] == []
        manifest = read_manifest(output)
        assert manifest.progress == before.progress and manifest.validation_loss == 2.5
        assert (manifest.datasets, manifest.optimizer_steps) == (before.datasets, before.optimizer_steps)
        assert manifest.processes == world_size
        config = read_config(output)
        assert manifest.layout == config.parallel.model_dump(mode="json")
        assert config.model_dump(exclude={"parallel", "optimizer"}) == read_config(checkpoint).model_dump(
            exclude={"parallel", "optimizer"}
        )
        # Every process has written its own files, and the tokenizer came along.
        ranks = {name.split("_")[2] for name in manifest.files if name.startswith("__")}
        assert ranks == {str(rank) for rank in range(world_size)} and "tokenizer.json" in manifest.files
        assert [path for path in output.parent.iterdir() if path != output] == []
        source = output


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def random_rows(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = stored_tensors(folder, read_manifest(folder))
    return {key: tensor.shape for key, tensor in tensors.items() if key.startswith("random.")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_random_states_stay_where_the_number_of_processes_does(
    pool: WorkerPool, checkpoint: Path, tmp_path: Path
) -> None:
    """Row by row those that were stored, not those of the processes that rewrite."""
    outcomes = pool.run(2, rewrite, checkpoint, tmp_path / "pipeline", ["parallel.expert=1", "parallel.pipeline=2"])
    assert all(isinstance(outcome, Resharded) and outcome.keeps_random_states for outcome in outcomes), outcomes
    assert random_rows(tmp_path / "pipeline") == random_rows(checkpoint) != {}
    kept, given = (_random_values(folder) for folder in (tmp_path / "pipeline", checkpoint))
    assert [key for key in given if not torch.equal(kept[key], given[key])] == []


def _random_values(folder: Path) -> dict[str, torch.Tensor]:
    listed = stored_tensors(folder, read_manifest(folder))
    tensors = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in listed.items() if key.startswith("random.")}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def test_a_damaged_checkpoint_gets_no_new_checksums(pool: WorkerPool, checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    shard = max(damaged.glob("*.distcp"), key=lambda file: file.stat().st_size)
    flip(shard, shard.stat().st_size // 2)
    for text in pool.run(2, rewrite, damaged, tmp_path / "out", []):
        assert f"{shard.name} has other content than was written" in str(text)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_only_the_layout_can_be_given(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        relayout(checkpoint, ["parallel.expert=1", "train.steps=3", "optimizer.lr=1", "parallelism=2"], 1)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        *("train.steps=3", "optimizer.lr=1", "parallelism=2")
    ]
    with pytest.raises(ConfigError, match=r"the number of processes \(3\) must be a multiple of parallel.pipeline"):
        relayout(checkpoint, ["parallel.pipeline=2"], 3)
    with pytest.raises(ConfigError, match=r"parallel\.experts"):
        relayout(checkpoint, ["parallel.experts=2"], 2)


def test_what_a_run_needs_of_its_machine_is_not_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint of a run on GPUs, with DeepEP, whose folders are on another machine."""
    folder = tmp_path / "gpu"
    shutil.copytree(checkpoint, folder)
    text = (folder / CONFIG).read_text()
    assert "device: auto" in text
    (folder / CONFIG).write_text(text.replace("device: auto", "device: cuda"))
    sum_up_again(folder)
    config = relayout(folder, ["parallel.dispatcher=flex"], 2)
    assert (config.train.device, config.parallel.dispatcher) == ("cuda", "flex")


def test_a_model_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_text("model: {}\n")
    complete(tmp_path, Manifest(**stamp(), processes=1, progress=None, files={}), {})
    with pytest.raises(UserError, match=r"holds a model alone.*train\.initial_weights"):
        relayout(tmp_path, [], 1)


def test_what_is_there_is_not_replaced_unasked(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is named after step 3, but .* holds step 2"):
        check_target(tmp_path / "step_00000003", checkpoint, 2, force=False)
    shutil.copytree(checkpoint, tmp_path / "there")
    with pytest.raises(UserError, match=r"holds a checkpoint already: .*--force"):
        check_target(tmp_path / "there", checkpoint, 2, force=False)
    check_target(tmp_path / "there", checkpoint, 2, force=True)
    with pytest.raises(UserError, match="is, holds or lies in what is read"):
        check_target(checkpoint, checkpoint, 2, force=True)


def test_inspect_shows_what_a_checkpoint_holds(checkpoint: Path) -> None:
    expected = stored(checkpoint)
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert "2: EP2 DP2" in result.stdout and "2.500000 nats" in result.stdout
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    for kind in ("model", "optimizer.master", "optimizer.momentum", "optimizer.exp_avg"):
        own = [tensor for key, tensor in expected.items() if key.startswith(f"{kind}.")]
        numbers = [len(own), sum(t.numel() for t in own), sum(t.numel() * t.element_size() for t in own)]
        assert rows[kind][:3] == [f"{number:,}" for number in numbers]
    assert rows["model"][3:] == ["bfloat16,", "float32"]  # router biases are float32
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(checkpoint), "--tensors", "model.embedding*"])
    assert result.stdout.split()[:5] == ["model.embedding.weight", "[513,", "64]", "bfloat16", f"{513 * 64 * 2:,}"]
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(checkpoint), "--tensors", "embedding"])
    assert result.exit_code == 2 and "no tensor has such a key; keys are like model." in result.stderr


def test_a_damaged_list_of_tensors_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    flip(folder / ".metadata", 1000)
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(folder)])
    assert result.exit_code == 2 and ".metadata has other content than was written" in result.stderr
