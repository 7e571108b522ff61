"""The largest output norms of experts' projections against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steptron.model.experts import GroupedExperts
from steptron.model.output_norms import OutputNorms
from steptron.train.step import TrainStep
from tests.optim.muon_runs import build, make_batches
from tests.worker_pool import WorkerPool

NORMS = "optimizer.weight_clipping.threshold=1e9"  # looked at, never clipped
Rows = list[tuple[int, torch.Tensor]]


def rows_of(inputs: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """Experts, and each one's rows [n, H] of a forward pass, in float64."""
    x, tokens_per_expert_E, _, plan = inputs
    first = 0
    for expert, count in enumerate(tokens_per_expert_E.tolist()):
        rows = range(first, first + count)
        tokens = rows if plan is None else [int(plan.slot_N[row]) // plan.rows_TK.shape[1] for row in rows]
        yield expert, x.detach().double()[list(tokens)]
        first += count


def by_hand(experts: GroupedExperts, rows: Rows) -> torch.Tensor:
    """[E, 3]: gate before SiLU, up, and down without the routing weight."""
    spec, largest = experts.spec, torch.zeros(experts.down_projection.shape[0], 3, dtype=torch.float64)
    for expert, x in rows:
        gate, up = (x @ experts.gate_up_projection[expert].detach().double().t()).chunk(2, dim=1)
        silu, clipped = gate * torch.sigmoid(gate), up
        if spec.expert_clamp is not None:
            silu, clipped = silu.clamp(max=spec.expert_clamp), up.clamp(-spec.expert_clamp, spec.expert_clamp)
        down = (silu * clipped) @ experts.down_projection[expert].detach().double().t()
        for column, y in enumerate((gate, up, down)):
            norms = [float(row.norm()) for row in y]
            largest[expert, column] = max([float(largest[expert, column]), *norms])
    return largest


def all_experts(train: TrainStep) -> dict[str, GroupedExperts]:
    return {
        name: module
        for chunk in train.chunks
        for name, module in chunk.named_modules()
        if isinstance(module, GroupedExperts)
    }


def watch(train: TrainStep) -> dict[str, Rows]:
    """Rows that experts get, by module."""
    rows: dict[str, Rows] = {}
    for name, module in all_experts(train).items():
        rows[name] = []
        module.register_forward_pre_hook(lambda _, inputs, name=name: rows[name].extend(rows_of(inputs)))
    return rows


def maxima_of(train: TrainStep) -> dict[str, torch.Tensor]:
    assert train.weight_clipping is not None
    norms = train.weight_clipping._norms
    assert isinstance(norms, OutputNorms)
    return norms.maxima


def compare(rank: int, world_size: int, overrides: list[str]) -> list[tuple[str, float, float]]:
    """Over the micro-batches of a step: by layer the largest relative error, and the smallest maximum."""
    train = build(world_size, [NORMS, "optimizer.name=sgd", *overrides])
    rows = watch(train)
    train.accumulate_gradients(make_batches()[train.mesh.data_rank :: train.mesh.data_size])
    results = []
    assert maxima_of(train).keys() == rows.keys() and len(rows) > 0
    for name, module in all_experts(train).items():
        own, expected = maxima_of(train)[name].double(), by_hand(module, rows[name])
        assert own.shape == expected.shape
        results.append((name, float(((own - expected).abs() / expected.clamp(min=1e-9)).max()), float(expected.min())))
    return results


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (1, ["train.kernels=plain"]),
        (1, ["train.recompute=[{layers: all, parts: [ffn]}, {layers: moe, parts: [moe_permutation, activation]}]"]),
        (2, ["parallel.expert=2"]),
        (2, ["parallel.expert=2", "train.recompute=[{layers: moe, parts: [moe_permutation, activation]}]"]),
        (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    ],
    ids=["native", "plain", "recompute", "EP2", "EP2 recompute", "PP2xVPP2"],
)
def test_equal_a_loop_over_tokens(pool: WorkerPool, world_size: int, overrides: list[str]) -> None:
    """Layers 7 and 8 of nano clip the products; four micro-batches."""
    for results in pool.run(world_size, compare, overrides):
        assert results
        for name, error, smallest in results:
            assert error < 1e-5 and smallest > 0, name


def trained(rank: int, world_size: int, overrides: list[str]) -> tuple[dict[str, torch.Tensor], bool]:
    """Parameters after two steps; whether an evaluation with larger weights left the maxima alone."""
    train, batches = build(world_size, overrides), make_batches()
    for _ in range(2):
        train.run(batches, 1e-2, 1e-3)
    parameters = {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}
    if train.weight_clipping is None:
        return parameters, True
    before = {name: maximum.clone() for name, maximum in maxima_of(train).items()}
    with torch.no_grad():
        for experts in all_experts(train).values():
            experts.gate_up_projection.mul_(10)
    train.evaluate(batches)
    return parameters, all(torch.equal(maximum, before[name]) for name, maximum in maxima_of(train).items())


def test_looking_changes_nothing_and_evaluation_is_not_looked_at(pool: WorkerPool) -> None:
    recompute = "train.recompute=[{layers: all, parts: [ffn]}]"
    ((expected, _),) = pool.run(1, trained, [recompute])
    ((parameters, untouched),) = pool.run(1, trained, [recompute, NORMS])
    assert untouched and [name for name in expected if not torch.equal(parameters[name], expected[name])] == []
