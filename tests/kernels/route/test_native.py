"""The native router against the plain formula in float64, at the selection that it made."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.route import native, plain
from tests.model.helpers import relative_error

extension.require()

SCALING = 3.0
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make(tokens: int, hidden: int, experts: int, seed: int = 0) -> Inputs:
    """h, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator)
    weight = 1.5 / math.sqrt(hidden) * torch.randn(experts, hidden, generator=generator)
    return h, weight, 0.2 * torch.randn(experts, generator=generator)


def check_selection(experts_TK: torch.Tensor, scores_TE: torch.Tensor, bias_E: torch.Tensor) -> None:
    """The K first of all experts by descending score plus bias, then by index: exactly, given the scores."""
    rows = (scores_TE + bias_E).tolist()
    for own, row in zip(experts_TK.tolist(), rows, strict=True):
        ranked = sorted(range(len(row)), key=lambda e: (0 if math.isnan(row[e]) else 1, -row[e], e))
        assert own == ranked[: len(own)]


def check(inputs: Inputs, top_k: int, use_weights: bool = True, use_scores: bool = True) -> None:
    h, weight = (t.detach().requires_grad_() for t in inputs[:2])
    experts_TK, weights_TK, scores_TE = native.route(h, weight, inputs[2], top_k, SCALING)
    assert experts_TK.dtype is torch.int64 and not experts_TK.requires_grad
    check_selection(experts_TK, scores_TE, inputs[2])

    h64, weight64 = (t.detach().double().requires_grad_() for t in inputs[:2])
    expected_scores = (h64 @ weight64.t()).sigmoid()
    selected = expected_scores.gather(1, experts_TK)
    expected_weights = SCALING * selected / (selected.sum(dim=1, keepdim=True) + 1e-20)
    assert weights_TK.shape == expected_weights.shape and relative_error(weights_TK, expected_weights) < 1e-6
    assert scores_TE.shape == expected_scores.shape and relative_error(scores_TE, expected_scores) < 1e-6

    generator = torch.Generator().manual_seed(7)
    to_weights = torch.randn(weights_TK.shape, generator=generator, dtype=torch.float64) * use_weights
    to_scores = torch.randn(scores_TE.shape, generator=generator, dtype=torch.float64) * use_scores
    # Only what is used takes part in the graph: the other gradient arrives as None.
    used = [(weights_TK, to_weights)] * use_weights + [(scores_TE, to_scores)] * use_scores
    own = torch.autograd.grad([y for y, _ in used], [h, weight], [d.float() for _, d in used])
    expected = torch.autograd.grad(
        [expected_weights, expected_scores], [h64, weight64], [to_weights.float().double(), to_scores.float().double()]
    )
    for a, b in zip(own, expected, strict=True):
        # With one expert a token's weight is constant; what is left is rounding of terms that cancel.
        floor = 1e-6 * math.sqrt(max(b.numel(), 1))
        assert a.shape == b.shape and float((a.double() - b).norm()) <= 2e-6 * float(b.norm()) + floor


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([0, 1, 2, 63, 64, 65, 130]),
    hidden=st.sampled_from([1, 3, 16, 65, 600]),
    num_experts=st.sampled_from([1, 2, 7, 8, 9, 32, 64, 65, 288]),
    top_k=st.integers(1, 16),
    use=st.sampled_from([(True, True), (True, False), (False, True)]),
    seed=st.integers(0, 99),
)
def test_equals_the_formula(
    tokens: int, hidden: int, num_experts: int, top_k: int, use: tuple[bool, bool], seed: int
) -> None:
    check(make(tokens, hidden, num_experts, seed), min(top_k, num_experts), *use)


@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_selects_weighs_and_scores_as_the_plain_router(top_k: int) -> None:
    inputs = make(300, 64, 48)
    own, expected = native.route(*inputs, top_k, SCALING), plain.route(*inputs, top_k, SCALING)
    ranked = (expected[2] + inputs[2]).sort(dim=1, descending=True).values
    assert (ranked[:, top_k - 1] - ranked[:, top_k]).min() > 2e-6, "near-tie: choose another seed"
    own_order, expected_order = own[0].argsort(dim=1), expected[0].argsort(dim=1)
    assert torch.equal(own[0].gather(1, own_order), expected[0].gather(1, expected_order))
    torch.testing.assert_close(own[1].gather(1, own_order), expected[1].gather(1, expected_order), rtol=2e-6, atol=0)
    torch.testing.assert_close(own[2], expected[2], rtol=2e-6, atol=1e-7)


def test_of_equal_experts_the_lower_index_is_taken() -> None:
    h = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.zeros(20, 8)
    experts_TK, weights_TK, _ = native.route(h, weight, torch.zeros(20), 5, SCALING)
    assert torch.equal(experts_TK, torch.arange(5).expand(100, 5))
    torch.testing.assert_close(weights_TK, torch.full((100, 5), SCALING / 5))
    bias = torch.zeros(20)
    bias[[3, 17]], bias[0] = 0.25, -0.25
    experts_TK, _, _ = native.route(h, weight, bias, 5, SCALING)
    assert torch.equal(experts_TK, torch.tensor([3, 17, 1, 2, 4]).expand(100, 5))


def test_neighbouring_floats_are_told_apart() -> None:
    """Selections are by value to the last bit, also below zero and across it."""
    bias = torch.tensor([-0.5, -0.5, -0.5, -0.5, -2.0, 1.0])
    bias[1] = torch.nextafter(bias[1], torch.tensor(1.0))
    bias[2] = torch.nextafter(bias[2], torch.tensor(-1.0))
    h = torch.zeros(1, 4)
    for shift in (0.0, -0.25, 0.25, -4.0):
        check_selection(*_selected(h, bias + shift, 6))


def _selected(h: torch.Tensor, bias: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts_TK, _, scores_TE = native.route(h, torch.zeros(bias.shape[0], h.shape[1]), bias, top_k, SCALING)
    return experts_TK, scores_TE, bias


def test_bias_selects_but_does_not_weigh() -> None:
    h, weight, bias = make(50, 16, 12)
    bias = bias.clone()
    bias[11] = 100.0
    experts_TK, weights_TK, scores_TE = native.route(h, weight, bias, 3, SCALING)
    assert (experts_TK[:, 0] == 11).all()
    selected = scores_TE.gather(1, experts_TK)
    torch.testing.assert_close(weights_TK, SCALING * selected / selected.sum(dim=1, keepdim=True))


def test_gradient_of_one_input_alone() -> None:
    h, weight, bias = make(70, 24, 9)
    leaves = h.requires_grad_(), weight.requires_grad_()
    both = torch.autograd.grad(native.route(*leaves, bias, 3, SCALING)[1].square().sum(), leaves)
    (of_h,) = torch.autograd.grad(native.route(h, weight.detach(), bias, 3, SCALING)[1].square().sum(), [h])
    (of_w,) = torch.autograd.grad(native.route(h.detach(), weight, bias, 3, SCALING)[1].square().sum(), [weight])
    assert torch.equal(of_h, both[0]) and torch.equal(of_w, both[1])


def test_strided_inputs_and_gradients() -> None:
    h, weight, bias = make(70, 24, 9)
    expected = native.route(h, weight, bias, 3, SCALING)
    wide = torch.randn(70, 40)
    wide[:, 8:32] = h
    for strided in (wide[:, 8:32], h.t().contiguous().t()):
        own = native.route(strided, weight.t().contiguous().t(), torch.stack([bias, bias], 1)[:, 0], 3, SCALING)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
        check((strided, weight.t().contiguous().t(), bias), 3)
    leaf = h.clone().requires_grad_()
    direction = torch.randn(3, 70).t()
    (own_grad,) = torch.autograd.grad(native.route(leaf, weight, bias, 3, SCALING)[1], [leaf], [direction])
    (contiguous,) = torch.autograd.grad(
        native.route(leaf, weight, bias, 3, SCALING)[1], [leaf], [direction.contiguous()]
    )
    assert torch.equal(own_grad, contiguous)


@pytest.mark.parametrize("route", [native.route, plain.route], ids=["native", "plain"])
def test_scores_that_all_underflow_leave_weights_and_gradients_finite(route) -> None:  # type: ignore[no-untyped-def]
    h = torch.ones(3, 8, requires_grad=True)
    weight = torch.full((6, 8), -1000.0, requires_grad=True)
    _, weights_TK, scores_TE = route(h, weight, torch.zeros(6), 2, SCALING)
    assert torch.count_nonzero(scores_TE) == 0 and torch.count_nonzero(weights_TK) == 0
    for gradient in torch.autograd.grad(weights_TK.sum(), [h, weight]):
        assert gradient.isfinite().all()


def test_nan_comes_out() -> None:
    """Where it came in: of a token, in all its weights; of an expert, in its score and all tokens, which select it."""
    h, weight, bias = make(70, 8, 12)
    h[40, 3] = math.nan
    _, weights_TK, scores_TE = native.route(h, weight, bias, 4, SCALING)
    touched = torch.arange(70) == 40
    assert weights_TK[touched].isnan().all() and scores_TE[touched].isnan().all()
    assert weights_TK[~touched].isfinite().all()
    h, weight, bias = make(70, 8, 12)
    weight[7, 2] = math.nan
    experts_TK, weights_TK, scores_TE = native.route(h, weight, bias, 4, SCALING)
    assert (experts_TK[:, 0] == 7).all() and scores_TE[:, 7].isnan().all() and weights_TK.isnan().all()
    assert (experts_TK.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert is selected once"


def test_nan_gradients_come_out() -> None:
    h, weight, bias = make(70, 8, 12)
    leaf = h.requires_grad_()
    _, weights_TK, _ = native.route(leaf, weight, bias, 4, SCALING)
    direction = torch.ones_like(weights_TK)
    direction[5, 2] = math.nan
    (gradient,) = torch.autograd.grad(weights_TK, [leaf], [direction])
    assert gradient[5].isnan().all() and gradient[6].isfinite().all()


def test_infinite_logits_saturate() -> None:
    h, weight, bias = make(5, 8, 12)
    weight[3], weight[4] = math.inf, -math.inf
    _, weights_TK, scores_TE = native.route(h.abs(), weight, bias, 12, SCALING)
    assert (scores_TE[:, 3] == 1).all() and (scores_TE[:, 4] == 0).all() and weights_TK.isfinite().all()


@pytest.mark.parametrize("top_k", [0, 13])
def test_top_k_beyond_the_experts_is_an_error(top_k: int) -> None:
    with pytest.raises(RuntimeError, match=f"top_k: expected 1 to 12, got {top_k}"):
        native.route(*make(5, 8, 12), top_k, SCALING)


def run(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    leaves = h.detach().requires_grad_(), weight.detach().requires_grad_()
    outputs = native.route(*leaves, bias, 6, SCALING)
    loss = outputs[1].square().sum() + outputs[2].square().sum()
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def test_the_same_bits_on_one_and_two_threads() -> None:
    inputs = make(500, 64, 70)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(*inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_token_is_routed_alike_whoever_its_neighbours_are() -> None:
    h, weight, bias = make(500, 64, 70)
    for whole, alone in zip(run(h, weight, bias)[:4], run(h[101:132], weight, bias)[:4], strict=True):
        assert torch.equal(whole[101:132], alone)
