"""Norms that experts give beside their output against rows computed one by one in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from steptron_kernels import extension
from steptron_kernels.experts import native, plain
from steptron_kernels.packed_weights import PackedWeights

extension.require()
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K, LIMIT = 5, 24, 12, 3, 0.4
VERSIONS = {"plain": lambda: plain.experts, "native": lambda: native.Experts(PackedWeights("fp32"))}


def make(tokens: int) -> tuple[torch.Tensor, ...]:
    """x, gate and up, down, routing weights and selections in float64; the last expert gets nothing."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, HIDDEN), (NUM_EXPERTS, 2 * WIDTH, HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH)
    x, gate_up, down = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weights = torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)
    selection = torch.rand(tokens, NUM_EXPERTS - 1, generator=generator).argsort(dim=1)[:, :TOP_K]
    return x, gate_up, 0.3 * down, weights, selection.contiguous()


def by_row(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> list[float]:
    """||h||^2 and ||y||^2 of one row of one expert, without a routing weight."""
    gate, up = (gate_up @ x).chunk(2)
    h = torch.nn.functional.silu(gate).clamp(max=LIMIT) * up.clamp(-LIMIT, LIMIT)
    return [float(h @ h), float((down @ h) @ (down @ h))]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_of_every_row_before_the_routing_weight(version: str, with_plan: bool, tokens: int) -> None:
    x, gate_up, down, weights, selection = make(tokens)
    plan, counts = plain.row_plan(selection, NUM_EXPERTS)
    experts: Callable[..., torch.Tensor] = VERSIONS[version]()
    token_N, weights_N = plan.slot_N // TOP_K, weights.flatten()[plan.slot_N]
    expert_N = torch.repeat_interleave(torch.arange(NUM_EXPERTS), counts)
    norms = torch.full((len(token_N), 2), torch.nan)
    rows = (x, weights, plan) if with_plan else (x[token_N], weights_N, None)
    tensors = [t.float() for t in (rows[0], gate_up, down)]
    y = experts(*tensors, counts, rows[1].float(), rows[2], LIMIT, True, squared_norms=norms)
    expected = [by_row(x[t], gate_up[e], down[e]) for t, e in zip(token_N, expert_N, strict=True)]
    torch.testing.assert_close(
        norms.double(), torch.tensor(expected, dtype=torch.float64).view(-1, 2), rtol=1e-5, atol=0
    )
    assert torch.equal(y, experts(*tensors, counts, rows[1].float(), rows[2], LIMIT, True))


@pytest.mark.parametrize("version", VERSIONS)
def test_are_not_there_where_the_weight_is_zero(version: str) -> None:
    x, gate_up, down, weights, selection = make(6)
    weights[2, 1] = 0.0
    plan, counts = plain.row_plan(selection, NUM_EXPERTS)
    norms = torch.zeros(6 * TOP_K, 2)
    VERSIONS[version]()(*(t.float() for t in (x, gate_up, down)), counts, weights.float(), plan, squared_norms=norms)
    assert ((norms == -1).all(dim=1) == (plan.slot_N == 2 * TOP_K + 1)).all() and (norms >= -1).all()


def test_of_a_wrong_shape_are_refused() -> None:
    x, gate_up, down, weights, selection = make(4)
    plan, counts = plain.row_plan(selection, NUM_EXPERTS)
    tensors = [t.float() for t in (x, gate_up, down)]
    with pytest.raises(RuntimeError, match=r"squared_norms: expected contiguous float32 \[12, 2\]"):
        VERSIONS["native"]()(*tensors, counts, weights.float(), plan, squared_norms=torch.zeros(11, 2))
