"""Muon on the nano preset under a layout; every function here is called in a worker process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.parallel.gradient_norm import clip_gradients, gradient_norm
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep
from tests.parallel.layouts import NANO, Part, parts_of, reduced_gradients
from tests.parallel.layouts import make_batches as make_batches

MUON = ["optimizer.name=muon", "optimizer.weight_decay=0.1", "data.sequence_length=48"]


def build(world_size: int, overrides: Sequence[str]) -> TrainStep:
    config = load(NANO, [*MUON, *overrides]).config
    check(config, world_size)
    return TrainStep(config, build_mesh(config.parallel), torch.device("cpu"))


def parameters_of(train: TrainStep) -> dict[str, Part]:
    parameters = {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}
    return parts_of(train.spec, train.mesh.place, parameters)


def given_gradients(
    rank: int, world_size: int, overrides: Sequence[str], steps: int, clip: float = 0.0
) -> tuple[dict[str, Part], list[float]]:
    """Parameters after some updates by the same gradients under every layout, and the gradients' norms."""
    train = build(world_size, overrides)
    norms = []
    for step in range(steps):
        set_gradients(train, step)
        norm, _ = gradient_norm(train.sharded.owned, train.device)
        norms.append(norm)
        if clip:
            clip_gradients(train.sharded.owned, norm, clip)
        train.optimizer.step(1e-2)
        train.sharded.gather.start()
    return parameters_of(train), norms


def set_gradients(train: TrainStep, step: int) -> None:
    """Gives every owned piece its run of a gradient that only the parameter's name and the step decide."""
    for piece in train.sharded.owned:
        whole = gradient_of(train, piece.piece.shard.parameter.name, step)
        shard = piece.piece.shard
        row_axis = 1 if shard.parameter.is_expert else 0
        local = torch.zeros(shard.shape)
        for part in shard.matrices:
            matrix = whole.narrow(row_axis, part.matrix.rows[0], part.matrix.rows[1] - part.matrix.rows[0])
            held = matrix.narrow(part.axis, part.range[0], part.range[1] - part.range[0])
            local.narrow(row_axis, part.rows[0], part.rows[1] - part.rows[0]).copy_(held)
        piece.gradient.copy_(local.view(-1)[piece.piece.start : piece.piece.stop])


def gradient_of(train: TrainStep, name: str, step: int) -> torch.Tensor:
    """[whole shape of the stored parameter]"""
    (spec,) = (parameter for parameter in train.spec.parameters() if parameter.name == name)
    seed = sum((i + 1) * ord(letter) for i, letter in enumerate(name)) + 7919 * step
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))


def one_step(rank: int, world_size: int, lr: float, overrides: Sequence[str]) -> tuple[dict[str, Part], ...]:
    """Parameters before a step, its gradients, and parameters after it, by logical matrix."""
    train = build(world_size, ["optimizer.clip_grad_norm=0", *overrides])
    before = parameters_of(train)
    batches = make_batches()
    train.accumulate_gradients(batches)
    gradients = parts_of(train.spec, train.mesh.place, reduced_gradients(train))
    train.run(batches, lr, 0.0)
    return before, gradients, parameters_of(train)
