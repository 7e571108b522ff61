"""A run that starts from a checkpoint of a smaller model, under other layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from steptron.checkpoint import saving
from steptron.checkpoint.fit import Filling
from steptron.checkpoint.folder import list_checkpoints
from steptron.checkpoint.manifest import Progress
from steptron.checkpoint.weights import open_weights, refuse_damaged, same_on_every_rank
from steptron.config.checks import check
from steptron.errors import UserError
from steptron.model.init import initialise
from steptron.model.parameter_shards import Place
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep
from tests.checkpoint.made import flip
from tests.checkpoint.states import BF16, State, assembled, configuration, state_of, stored
from tests.worker_pool import WorkerPool

LARGER = [
    "model.mtp.depths=3",
    "model.value_head=true",
    "train.initial_weights_missing={mtp: clone, value_head: initialise}",
    "train.seed=5",
]


def save_untrained(rank: int, world_size: int, output: Path) -> None:
    """Nano, with one MTP depth and no value head."""
    config = configuration(output, ["parallel.tensor=2"])
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"))
    saving.save(config, Progress(), ["hash"], train.chunks, train.optimizer, mesh)


def start(rank: int, world_size: int, weights: Path, overrides: list[str]) -> tuple[State, torch.Tensor]:
    """The state of a run that starts from weights, and the value head that the configuration draws."""
    config = configuration(weights, [*LARGER, f"train.initial_weights={weights}", *overrides])
    check(config, world_size)
    mesh = build_mesh(config.parallel)
    initial = same_on_every_rank(open_weights(weights, Filling.of(config)))
    train = TrainStep(config, mesh, torch.device("cpu"), initial)
    head = {"value_head.weight": torch.empty(1, config.model.hidden_size)}
    initialise(head, train.spec, config.model.init, config.train.seed, Place())
    return state_of(train), head["value_head.weight"]


@pytest.fixture(scope="module")
def weights(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    pool.run(2, save_untrained, output)
    return output


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (1, [BF16]),
        (2, ["parallel.tensor=2"]),
        (4, ["parallel.pipeline=2", "parallel.expert=2", "loss.mtp_train_depths=3"]),
    ],
)
def test_depths_are_cloned_and_a_value_head_drawn(
    pool: WorkerPool, weights: Path, world_size: int, overrides: list[str]
) -> None:
    answers = pool.run(world_size, start, weights, overrides)
    state, head = assembled([state for state, _ in answers]), answers[0][1]
    dtype = torch.bfloat16 if BF16 in overrides else torch.float32
    model = {
        key: tensor for key, tensor in stored(weights / "checkpoints" / "step_00000000").items() if "model." in key
    }
    expected = {}
    for key, tensor in model.items():
        expected[key] = tensor if key.endswith("router.bias") else tensor.to(dtype)
        for depth in (1, 2):
            if key.startswith("model.mtp.0."):
                expected[key.replace("mtp.0", f"mtp.{depth}")] = expected[key]
    expected["model.value_head.weight"] = head.to(dtype)
    found = {key: tensor for key, tensor in state.items() if key.startswith("model.")}
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    masters = {key: tensor for key, tensor in state.items() if key.startswith("optimizer.master.")}
    assert bool(masters) == (BF16 in overrides)
    for key, master in masters.items():
        assert torch.equal(master, found[key.replace("optimizer.master", "model")].float()), key


def refusal(rank: int, world_size: int, weights: Path, contents: bool) -> str:
    try:
        refuse_damaged(open_weights(weights), contents)
    except UserError as error:
        return str(error)
    return ""


def test_a_damaged_checkpoint_is_refused_by_every_process(pool: WorkerPool, weights: Path, tmp_path: Path) -> None:
    """One bit of a tensor: it would load."""
    run = shutil.copytree(weights, tmp_path / "run")
    assert pool.run(2, refusal, run, True) == ["", ""]
    (folder,) = list_checkpoints(run)
    flip(folder / "__0_0.distcp", 3000)
    for text in pool.run(2, refusal, run, True):
        assert text.startswith(f"checkpoint {folder} is damaged; name another one:\n  __0_0.distcp has other content")
    assert pool.run(2, refusal, run, False) == ["", ""]
