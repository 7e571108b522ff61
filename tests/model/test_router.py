"""The router against loops over tokens and experts in float64."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.config.schema import ParallelConfig
from steptron.model.layer_spec import DenseFfnSpec, MoeFfnSpec
from steptron.model.router import Router
from steptron.model.transformer_config import transformer_config
from tests.model.helpers import small_config

HIDDEN, EXPERTS = 16, 6


def make_router(top_k: int, dtype: torch.dtype = torch.float32, scale: float = 3.0, seed: int = 0) -> Router:
    spec = MoeFfnSpec(EXPERTS, top_k, scale, 8, None, DenseFfnSpec(8, None, True), True)
    router = Router(spec, HIDDEN, transformer_config(small_config(), ParallelConfig(), dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        router.bias.copy_(0.3 * torch.randn(EXPERTS, generator=generator))
    return router


def by_loops(h: list[list[float]], weight: list[list[float]], bias: list[float], top_k: int, scale: float):
    """Selected sets, weights and scores of every token, in Python floats."""
    selected, weights, scores = [], [], []
    for token in h:
        p = [1 / (1 + math.exp(-sum(a * b for a, b in zip(token, row, strict=True)))) for row in weight]
        ranked = sorted(range(len(p)), key=lambda e: p[e] + bias[e], reverse=True)
        if top_k < len(p):
            gap = p[ranked[top_k - 1]] + bias[ranked[top_k - 1]] - p[ranked[top_k]] - bias[ranked[top_k]]
            assert gap > 1e-5, "near-tie: choose another seed"
        chosen = ranked[:top_k]
        total = sum(p[e] for e in chosen)
        selected.append(set(chosen))
        weights.append({e: scale * p[e] / total for e in chosen})
        scores.append(p)
    return selected, weights, scores


@pytest.mark.parametrize("top_k", range(1, EXPERTS + 1))
def test_selection_weights_and_scores(top_k: int) -> None:
    router = make_router(top_k)
    h = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    routing = router(h)
    selected, weights, scores = by_loops(
        h.double().tolist(), router.weight.double().tolist(), router.bias.double().tolist(), top_k, 3.0
    )
    assert routing.experts_TK.dtype is torch.int64 and routing.weights_TK.dtype is torch.float32
    assert [set(row) for row in routing.experts_TK.tolist()] == selected
    for experts, own, expected in zip(routing.experts_TK.tolist(), routing.weights_TK.tolist(), weights, strict=True):
        assert own == pytest.approx([expected[e] for e in experts], rel=2e-6)
        assert sum(own) == pytest.approx(3.0, rel=1e-6)
    torch.testing.assert_close(
        routing.scores_TE.double(), torch.tensor(scores, dtype=torch.float64), rtol=2e-6, atol=1e-7
    )


def test_gradients_of_weights_with_respect_to_router_and_hidden() -> None:
    """Against autograd through the formula in float64, at the selection that the router made."""
    router = make_router(3)
    h = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    routing = router(h)
    direction = torch.randn(30, 3, generator=torch.Generator().manual_seed(3))
    own = torch.autograd.grad((routing.weights_TK * direction).sum(), [h, router.weight])

    h64, w64 = h.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(30):
        chosen = routing.experts_TK[t]
        p = 1 / (1 + torch.exp(-(w64[chosen] @ h64[t])))
        total = total + (3.0 * p / p.sum() * direction[t].double()).sum()
    expected = torch.autograd.grad(total, [h64, w64])
    for a, b in zip(own, expected, strict=True):
        assert (a.double() - b).norm() <= 3e-6 * b.norm()


def test_bias_selects_but_does_not_weigh_and_gets_no_gradient() -> None:
    router = make_router(2)
    h = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(4)).requires_grad_()
    with torch.no_grad():
        router.bias.zero_()
    plain = router(h)
    with torch.no_grad():
        router.bias[5] = 10.0  # expert 5 is now always selected
    biased = router(h)
    assert (biased.experts_TK == 5).any(dim=1).all() and not (plain.experts_TK == 5).any(dim=1).all()
    assert torch.equal(plain.scores_TE, biased.scores_TE)
    selected = biased.scores_TE.gather(1, biased.experts_TK)
    torch.testing.assert_close(biased.weights_TK, 3.0 * selected / selected.sum(dim=1, keepdim=True))
    biased.weights_TK.square().sum().backward()
    assert not router.bias.requires_grad and router.bias.grad is None
    assert "bias" not in dict(router.named_parameters())


def test_an_equal_bias_on_all_experts_changes_nothing() -> None:
    router = make_router(2)
    h = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5))
    before = router(h)
    with torch.no_grad():
        router.bias += 0.25
    after = router(h)
    assert [set(row) for row in before.experts_TK.tolist()] == [set(row) for row in after.experts_TK.tolist()]


def test_scores_are_fp32_though_the_residual_is_bf16() -> None:
    router = make_router(2, torch.bfloat16)
    assert router.weight.dtype is torch.bfloat16 and router.bias.dtype is torch.float32
    h = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16().requires_grad_()
    routing = router(h)
    assert routing.scores_TE.dtype is torch.float32
    exact = torch.sigmoid(h.double() @ router.weight.double().t())
    assert (routing.scores_TE - exact).abs().max() < 1e-6  # a product in bf16 would be off by 1e-3
    routing.weights_TK.square().sum().backward()
    assert h.grad is not None and h.grad.dtype is torch.bfloat16
    assert router.weight.grad is not None and router.weight.grad.dtype is torch.bfloat16


def test_all_scores_underflowing_gives_finite_weights() -> None:
    router = make_router(2)
    h = torch.full((3, HIDDEN), 1.0)
    with torch.no_grad():
        router.weight.fill_(-1000.0)
    routing = router(h)
    assert routing.weights_TK.isfinite().all()
