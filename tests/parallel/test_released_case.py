"""The released layout's tiny case under every kind of layout: losses and every gradient against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from steptron.checkpoint.weights import ReleasedWeights
from steptron.config.checks import check
from steptron.config.loader import with_overrides
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.model.sequence import shift_left
from steptron.parallel.mesh import build_mesh
from steptron.train.step import Losses, TrainStep
from tests.model.helpers import relative_error
from tests.parallel.layouts import Part, assemble, parts_of, reduced_gradients
from tests.worker_pool import WorkerPool

CASE = Path(__file__).resolve().parents[1] / "data" / "step3p5" / "tiny"
LAYOUTS = {
    "one process": (1, []),
    "PP2": (2, ["parallel.pipeline=2"]),
    "EP2": (2, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "TP2xEP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "CP2xTP2, EP4 experts": (4, ["parallel.context=2", "parallel.tensor=2", "parallel.expert=4"]),
}


def configuration(overrides: list[str]) -> PretrainConfig:
    """The case's training objective: lm + 0.3 sum_k alpha_k mtp_k over three depths, nothing else."""
    raw = {
        "model": ReleasedWeights(CASE).model.model_dump(),
        "balance": {"ep_loss_coefficient": 0.0},
        "loss": {"mtp_weight": 0.3, "mtp_decay": 0.6, "mtp_train_depths": 3},
        "data": {"train": [{"path": "unused"}], "sequence_length": 40},
        "optimizer": {"lr": 1e-3},
        "train": {"output": "unused", "steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
    }
    return with_overrides(PretrainConfig.model_validate(raw), overrides, "the case")


def rows() -> list[MicroBatch]:
    """One micro-batch for each of the case's two rows: every token but the last has a target."""
    with np.load(CASE / "expected.npz") as arrays:
        ids_BS = torch.from_numpy(arrays["input_ids"])
    batches = []
    for ids in ids_BS.split(1):
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, -1] = False
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        batches.append(MicroBatch(ids, shift_left(ids, 1, 0), mask, positions, torch.zeros_like(ids)))
    return batches


def losses_and_gradients(rank: int, world_size: int, overrides: list[str]) -> tuple[Losses, dict[str, Part]]:
    config = configuration(overrides)
    check(config, world_size)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"), ReleasedWeights(CASE))
    observed = train.accumulate_gradients(rows()[mesh.data_rank :: mesh.data_size])
    return observed.losses, parts_of(train.spec, mesh.place, reduced_gradients(train))


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_every_gradient(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, losses_and_gradients, overrides)
    with np.load(CASE / "expected.npz") as right:
        for losses, _ in outcomes:
            assert losses.lm == pytest.approx(float(right["lm_loss"]), rel=1e-6)
            assert losses.mtp == pytest.approx(right["mtp_losses"].tolist(), rel=1e-6)
            assert losses.total == pytest.approx(float(right["total_loss"]), rel=1e-6)
    own = assemble([gradients for _, gradients in outcomes])
    released = {tensor.matrix.name: tensor.name for tensor in ReleasedWeights(CASE).expected}
    with np.load(CASE / "grads.npz") as arrays:
        right = {name: torch.from_numpy(arrays[name]) for name in arrays}
    own = {released[name]: gradient for name, gradient in own.items()}
    assert own.keys() == right.keys() and len(right) == 186
    errors = {name: relative_error(own[name], right[name]) for name in right}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-4, f"{worst}: {errors[worst]:.2e}"
