"""Grouped experts against a loop over experts and tokens in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.config.schema import ParallelConfig
from steptron.model.activation import clamped_swiglu
from steptron.model.experts import GroupedExperts, grouped_linear
from steptron.model.layer_spec import DenseFfnSpec, MoeFfnSpec
from steptron.model.transformer_config import transformer_config
from tests.model.helpers import relative_error, small_config

HIDDEN, WIDTH = 16, 8

CASES = {
    "even": [5, 5, 5, 5],
    "empty first": [0, 3, 7, 2],
    "empty last": [3, 7, 2, 0],
    "empty between": [3, 0, 0, 9],
    "all to one": [0, 0, 17, 0],
    "one token": [0, 1, 0, 0],
    "no tokens": [0, 0, 0, 0],
    "ragged": [1, 33, 2, 64],
}


def linear_by_loop(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    rows, start = [], 0
    for expert, count in enumerate(counts):
        for row in range(start, start + count):
            rows.append(w[expert] @ x[row])
        start += count
    return torch.stack(rows) if rows else x.new_empty(0, w.shape[1])


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
def test_grouped_linear(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), HIDDEN, generator=generator).requires_grad_()
    w = torch.randn(len(counts), WIDTH, HIDDEN, generator=generator).requires_grad_()
    direction = torch.randn(sum(counts), WIDTH, generator=generator)
    y = grouped_linear(x, w, torch.tensor(counts))
    y.backward(direction)

    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = linear_by_loop(x64, w64, counts)
    assert y.shape == expected.shape and y.dtype is torch.float32
    assert relative_error(y, expected) < 1e-6
    if sum(counts):
        expected.backward(direction.double())
        assert relative_error(x.grad, x64.grad) < 1e-6 and relative_error(w.grad, w64.grad) < 1e-6
    assert x.grad is not None and x.grad.shape == x.shape
    for expert, count in enumerate(counts):
        if count == 0:
            assert torch.count_nonzero(w.grad[expert]) == 0, "an expert without tokens has the gradient 0"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 5).map(lambda n: 4 * n),
    st.integers(1, 5).map(lambda n: 4 * n),
)
def test_grouped_linear_of_any_shape(counts: list[int], inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), inputs, generator=generator).requires_grad_()
    w = torch.randn(len(counts), outputs, inputs, generator=generator).requires_grad_()
    y = grouped_linear(x, w, torch.tensor(counts))
    y.square().sum().backward()
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = linear_by_loop(x64, w64, counts)
    assert relative_error(y, expected) < 1e-6
    if sum(counts):
        expected.square().sum().backward()
        assert relative_error(x.grad, x64.grad) < 2e-6 and relative_error(w.grad, w64.grad) < 2e-6
    else:
        assert torch.count_nonzero(w.grad) == 0


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_gradients_that_are_not_contiguous(kind: str) -> None:
    """grouped_mm's own backward refuses these; ``sum().backward()`` makes the first."""
    counts = torch.tensor([4, 0, 8, 4])
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = torch.randn(4, 16, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    wide = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    direction = {
        "expanded": torch.ones(1, 1).expand(16, 16),
        "transposed": wide[:, :16].t(),
        "strided": wide[:, ::2],
    }[kind]
    grouped_linear(x, w, counts).backward(direction)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    linear_by_loop(x64, w64, counts.tolist()).backward(direction.double())
    assert relative_error(x.grad, x64.grad) < 1e-6 and relative_error(w.grad, w64.grad) < 1e-6


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    counts = torch.tensor([2, 3])
    x, w = torch.randn(5, HIDDEN), torch.randn(2, WIDTH, HIDDEN)
    grouped_linear(x, w.clone().requires_grad_(), counts).sum().backward()
    leaf = x.clone().requires_grad_()
    grouped_linear(leaf, w, counts).sum().backward()
    assert relative_error(leaf.grad, linear_gradient_of_sum(w, counts.tolist())) < 1e-6


def linear_gradient_of_sum(w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([w[e].sum(dim=0).expand(count, -1) for e, count in enumerate(counts)])


def test_bf16_rounds_once() -> None:
    """Products accumulate in fp32: the error is that of rounding the result."""
    counts = [3, 0, 11, 2]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).bfloat16().requires_grad_()
    w = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    y = grouped_linear(x, w, torch.tensor(counts))
    y.sum().backward()
    expected = linear_by_loop(x.detach().double(), w.detach().double(), counts)
    assert y.dtype is torch.bfloat16 and w.grad.dtype is torch.bfloat16
    assert (y.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert torch.count_nonzero(w.grad[1]) == 0


# ------------------------------------------------------------------------------ GroupedExperts


def make_experts(num_local: int, limit: float | None, after_silu: bool = True) -> GroupedExperts:
    spec = MoeFfnSpec(num_local, 2, 3.0, WIDTH, limit, DenseFfnSpec(8, None, True), after_silu)
    experts = GroupedExperts(
        spec, HIDDEN, num_local, transformer_config(small_config(), ParallelConfig(), torch.float32)
    )
    with torch.no_grad():
        for number, parameter in enumerate(experts.parameters()):
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return experts


def experts_by_loop(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, counts: list[int], weights: torch.Tensor, limit, after
) -> torch.Tensor:
    """w_e * down(swiglu(gate_up(x))), the weight on the output."""
    rows, start = [], 0
    for expert, count in enumerate(counts):
        for row in range(start, start + count):
            hidden = clamped_swiglu(gate_up[expert] @ x[row], limit, after)
            rows.append(weights[row] * (down[expert] @ hidden))
        start += count
    return torch.stack(rows) if rows else x.new_empty(0, x.shape[1])


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("limit, after", [(None, True), (0.5, True), (0.5, False)])
def test_grouped_experts(counts: list[int], limit: float | None, after: bool) -> None:
    experts = make_experts(4, limit, after)
    generator = torch.Generator().manual_seed(6)
    tokens = sum(counts)
    x = (2 * torch.randn(tokens, HIDDEN, generator=generator)).requires_grad_()
    weights = (3 * torch.rand(tokens, generator=generator)).requires_grad_()
    direction = torch.randn(tokens, HIDDEN, generator=generator)
    y = experts(x, torch.tensor(counts), weights)
    y.backward(direction)

    leaves = [
        t.detach().double().requires_grad_() for t in (x, experts.gate_up_projection, experts.down_projection, weights)
    ]
    expected = experts_by_loop(leaves[0], leaves[1], leaves[2], counts, leaves[3], limit, after)
    assert y.shape == (tokens, HIDDEN)
    assert relative_error(y, expected) < 1e-6
    own = [x.grad, experts.gate_up_projection.grad, experts.down_projection.grad, weights.grad]
    if tokens:
        expected.backward(direction.double())
        for a, b in zip(own, leaves, strict=True):
            assert b.grad is not None and relative_error(a, b.grad) < 1e-6
    else:
        assert all(a is not None and torch.count_nonzero(a) == 0 for a in own)


def test_gate_rows_come_first() -> None:
    experts = make_experts(2, None)
    with torch.no_grad():
        experts.gate_up_projection[:, :WIDTH] = -50.0  # the gate: silu of a large negative number is 0
        experts.gate_up_projection[:, WIDTH:] = 1.0
    y = experts(torch.ones(2, HIDDEN), torch.tensor([1, 1]), torch.ones(2))
    assert y.abs().max() < 1e-6


def test_weights_stay_fp32_beside_bf16_experts() -> None:
    """Routing weights enter in fp32, the product is rounded once."""
    experts = make_experts(2, None).bfloat16()
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    weights = torch.rand(6, generator=torch.Generator().manual_seed(8)).requires_grad_()
    y = experts(x, torch.tensor([2, 4]), weights)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and weights.grad.dtype is torch.float32
