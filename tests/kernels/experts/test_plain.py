"""Grouped experts against a loop over experts and tokens in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels.experts.plain import experts, grouped_linear, row_plan
from steptron_kernels.swiglu.plain import swiglu
from tests.model.helpers import relative_error

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


# ------------------------------------------------------------------------------ experts


def make_weights(num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(num_experts, 2 * WIDTH, HIDDEN), (num_experts, HIDDEN, WIDTH)]
    gate_up, down = (
        0.4 * torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(shapes)
    )
    return gate_up.requires_grad_(), down.requires_grad_()


def experts_by_loop(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, counts: list[int], weights: torch.Tensor, limit, after
) -> torch.Tensor:
    """w_e * down(swiglu(gate_up(x))), the weight on the output."""
    rows, start = [], 0
    for expert, count in enumerate(counts):
        for row in range(start, start + count):
            hidden = swiglu(gate_up[expert] @ x[row], limit, after)
            rows.append(weights[row] * (down[expert] @ hidden))
        start += count
    return torch.stack(rows) if rows else x.new_empty(0, x.shape[1])


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("limit, after", [(None, True), (0.5, True), (0.5, False)])
def test_experts(counts: list[int], limit: float | None, after: bool) -> None:
    gate_up, down = make_weights(4)
    generator = torch.Generator().manual_seed(6)
    tokens = sum(counts)
    x = (2 * torch.randn(tokens, HIDDEN, generator=generator)).requires_grad_()
    weights = (3 * torch.rand(tokens, generator=generator)).requires_grad_()
    direction = torch.randn(tokens, HIDDEN, generator=generator)
    y = experts(x, gate_up, down, torch.tensor(counts), weights, None, limit, after)
    y.backward(direction)

    leaves = [t.detach().double().requires_grad_() for t in (x, gate_up, down, weights)]
    expected = experts_by_loop(leaves[0], leaves[1], leaves[2], counts, leaves[3], limit, after)
    assert y.shape == (tokens, HIDDEN)
    assert relative_error(y, expected) < 1e-6
    own = [x.grad, gate_up.grad, down.grad, weights.grad]
    if tokens:
        expected.backward(direction.double())
        for a, b in zip(own, leaves, strict=True):
            assert b.grad is not None and relative_error(a, b.grad) < 1e-6
    else:
        assert all(a is not None and torch.count_nonzero(a) == 0 for a in own)


def test_gate_rows_come_first() -> None:
    gate_up, down = make_weights(2)
    with torch.no_grad():
        gate_up[:, :WIDTH] = -50.0  # the gate: silu of a large negative number is 0
        gate_up[:, WIDTH:] = 1.0
    y = experts(torch.ones(2, HIDDEN), gate_up, down, torch.tensor([1, 1]), torch.ones(2))
    assert y.abs().max() < 1e-6


def test_weights_stay_fp32_beside_bf16_experts() -> None:
    """Routing weights enter in fp32, the product is rounded once."""
    gate_up, down = make_weights(2)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    weights = torch.rand(6, generator=torch.Generator().manual_seed(8)).requires_grad_()
    y = experts(x, gate_up.bfloat16(), down.bfloat16(), torch.tensor([2, 4]), weights)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and weights.grad.dtype is torch.float32


# ------------------------------------------------------------------------------ with a plan


def random_selection(tokens: int, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_row_plan(tokens: int, num_experts: int, top_k: int, seed: int) -> None:
    top_k = min(top_k, num_experts)
    selection = random_selection(tokens, num_experts, top_k, seed)
    plan, counts = row_plan(selection, num_experts)
    assert counts.tolist() == [int((selection == e).sum()) for e in range(num_experts)]
    # Rows of an expert come in the order of their tokens: a stable sort, the same on every machine.
    expected = [
        t * top_k + k for e in range(num_experts) for t in range(tokens) for k in range(top_k) if selection[t, k] == e
    ]
    assert plan.slot_N.tolist() == expected
    assert plan.rows_TK.flatten()[plan.slot_N].tolist() == list(range(tokens * top_k))


@pytest.mark.parametrize("tokens, num_experts, top_k", [(0, 4, 2), (1, 4, 1), (17, 4, 3), (9, 8, 8)])
def test_experts_of_tokens(tokens: int, num_experts: int, top_k: int) -> None:
    """With a plan, tokens are gathered, weighted by their own weights, and added up."""
    gate_up, down = make_weights(num_experts)
    selection = random_selection(tokens, num_experts, top_k, seed=1)
    plan, counts = row_plan(selection, num_experts)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_()
    direction = torch.randn(tokens, HIDDEN, generator=generator)
    y = experts(x, gate_up, down, counts, weights, plan, 0.5)
    gradients = torch.autograd.grad(y, [x, gate_up, down, weights], direction)

    leaves = [t.detach().double().requires_grad_() for t in (x, gate_up, down, weights)]
    total = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for t in range(tokens):
        for k in range(top_k):
            e = int(selection[t, k])
            one = [0] * num_experts
            one[e] = 1
            total[t] += experts_by_loop(
                leaves[0][t : t + 1], leaves[1], leaves[2], one, leaves[3][t, k : k + 1], 0.5, True
            )[0]
    assert relative_error(y, total) < 1e-6
    if tokens:
        expected = torch.autograd.grad(total, leaves, direction.double())
        for own, reference in zip(gradients[:3], expected[:3], strict=True):
            assert relative_error(own, reference) < 1e-6
        # With one token this is one sum of products that cancel: 5e-6 was seen.
        assert relative_error(gradients[3], expected[3]) < 1e-5
