"""Expert balance against explicit loops over tokens and experts in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.model.balance import AttachLoss, BalanceContext, bias_update, ep_group_loss
from steptron.model.router import Routing
from tests.worker_pool import WorkerPool

EXPERTS = 12


def make_routing(tokens: int, top_k: int, seed: int, dtype: torch.dtype = torch.float64) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(EXPERTS, generator=generator)
    experts = (scores + bias).topk(top_k, dim=1).indices
    scores.requires_grad_()
    return Routing(experts, torch.ones(tokens, top_k), scores)


def by_loops(routing: Routing, groups: int, valid: list[bool]):
    """L_EP, its gradient with respect to the scores, counts and confidence, from the definitions."""
    scores = routing.scores_TE.detach().double().tolist()
    experts = routing.experts_TK.tolist()
    top_k = len(experts[0])
    kept = [t for t, keep in enumerate(valid) if keep]
    counts = [0] * EXPERTS
    mass = [0.0] * EXPERTS
    confidence = 0.0
    for t in kept:
        total = sum(scores[t])
        for e in experts[t]:
            counts[e] += 1
            confidence += scores[t][e] / total / len(kept)
        for e in range(EXPERTS):
            mass[e] += scores[t][e] / total / len(kept)
    size = EXPERTS // groups
    f = [sum(counts[g * size : (g + 1) * size]) / (len(kept) * top_k) for g in range(groups)]
    p = [sum(mass[g * size : (g + 1) * size]) for g in range(groups)]
    assert sum(f) == pytest.approx(1.0, abs=1e-12) and sum(p) == pytest.approx(1.0, abs=1e-12)
    loss = groups * sum(a * b for a, b in zip(f, p, strict=True))
    gradient = [[0.0] * EXPERTS for _ in valid]
    for t in kept:
        total = sum(scores[t])
        mean_f = sum(f[e // size] * scores[t][e] for e in range(EXPERTS)) / total
        for e in range(EXPERTS):
            gradient[t][e] = groups / len(kept) / total * (f[e // size] - mean_f)
    return loss, torch.tensor(gradient, dtype=torch.float64), counts, confidence


@pytest.mark.parametrize("groups", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("padding", ["none", "ragged", "half"])
@pytest.mark.parametrize("top_k", [1, 3, 12])
def test_loss_counts_and_confidence(groups: int, padding: str, top_k: int) -> None:
    tokens, coefficient = 23, 0.37
    routing = make_routing(tokens, top_k, seed=groups)
    valid = {
        "none": [True] * tokens,
        "ragged": [t % 5 != 2 and t < 19 for t in range(tokens)],
        "half": [t < tokens // 2 for t in range(tokens)],
    }[padding]
    mask = None if padding == "none" else torch.tensor(valid)
    context = BalanceContext(groups, coefficient, mask, sum(valid))
    weighted = context.observe(5, routing)
    (gradient,) = torch.autograd.grad(weighted, routing.scores_TE)

    loss, expected_gradient, counts, confidence = by_loops(routing, groups, valid)
    seen = context.layers[5]
    assert weighted.item() == pytest.approx(coefficient * loss, rel=1e-12)
    assert float(seen.ep_loss) == pytest.approx(loss, rel=1e-12)
    assert not seen.ep_loss.requires_grad
    assert seen.tokens_per_expert_E.tolist() == counts and seen.tokens_per_expert_E.dtype is torch.int64
    assert float(seen.confidence) == pytest.approx(confidence, rel=1e-12)
    torch.testing.assert_close(gradient, coefficient * expected_gradient, rtol=1e-11, atol=1e-15)


def counts_of(experts_TK: torch.Tensor, num_experts: int, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Selections per expert, by a routing without scores."""
    return Routing(experts_TK, experts_TK, torch.empty(0, num_experts)).tokens_per_expert(valid_T)


def observed_by_parts(rank: int, world_size: int, valid: list[bool]) -> tuple[float, torch.Tensor, torch.Tensor, float]:
    """A rank's view of a micro-batch of which it has every world_size-th token."""
    whole = make_routing(len(valid), 3, seed=4)
    scores = whole.scores_TE.detach()[rank::world_size].clone().requires_grad_()
    own = Routing(whole.experts_TK[rank::world_size], whole.weights_TK[rank::world_size], scores)
    context = BalanceContext(4, 0.37, torch.tensor(valid)[rank::world_size], sum(valid), dist.group.WORLD)
    context.observe(5, own).backward()
    layer = context.layers[5]
    return float(layer.ep_loss), scores.grad / 0.37, layer.tokens_per_expert_E, float(layer.confidence)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_micro_batch_have_its_loss_and_their_own_tokens_gradient(
    pool: WorkerPool, ranks: int
) -> None:
    """Not the mean of losses over parts, nor a gradient that arrives once per rank; a rank may have padding alone."""
    valid = [t % ranks != 1 and t != 8 for t in range(24)]
    loss, gradient, counts, confidence = by_loops(make_routing(24, 3, seed=4), 4, valid)
    outcomes = pool.run(ranks, observed_by_parts, valid)
    for rank, (own_loss, own_gradient, _, _) in enumerate(outcomes):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(own_gradient, gradient[rank::ranks], rtol=1e-11, atol=1e-14)
    assert sum(outcome[2] for outcome in outcomes).tolist() == counts
    assert sum(outcome[3] for outcome in outcomes) == pytest.approx(confidence, rel=1e-12)


def test_fp32_is_close_to_float64() -> None:
    routing = make_routing(500, 4, seed=1, dtype=torch.float32)
    context = BalanceContext(4, 1.0, None, 500)
    weighted = context.observe(0, routing)
    (gradient,) = torch.autograd.grad(weighted, routing.scores_TE)
    loss, expected, _, _ = by_loops(routing, 4, [True] * 500)
    assert weighted.item() == pytest.approx(loss, rel=1e-6)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_padding_tokens_count_nowhere() -> None:
    """Whatever padding tokens look like, every statistic and gradient is that of the others alone."""
    routing = make_routing(30, 3, seed=2)
    valid = torch.arange(30) % 3 != 1
    padded = BalanceContext(4, 1.0, valid, int(valid.sum()))
    with_padding = padded.observe(0, routing)
    (gradient,) = torch.autograd.grad(with_padding, routing.scores_TE)

    scores = routing.scores_TE.detach()[valid].requires_grad_()
    alone = BalanceContext(4, 1.0, None, int(valid.sum()))
    without = alone.observe(0, Routing(routing.experts_TK[valid], routing.weights_TK[valid], scores))
    (expected,) = torch.autograd.grad(without, scores)

    torch.testing.assert_close(with_padding, without, rtol=1e-14, atol=0)
    assert torch.equal(padded.layers[0].tokens_per_expert_E, alone.layers[0].tokens_per_expert_E)
    torch.testing.assert_close(padded.layers[0].confidence, alone.layers[0].confidence, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient[valid], expected, rtol=1e-13, atol=1e-18)
    assert torch.count_nonzero(gradient[~valid]) == 0


def test_a_micro_batch_of_padding_alone() -> None:
    routing = make_routing(6, 2, seed=3)
    context = BalanceContext(4, 0.0, torch.zeros(6, dtype=torch.bool), 0)
    loss = context.observe(0, routing)
    assert loss.item() == 0.0 and torch.count_nonzero(context.layers[0].tokens_per_expert_E) == 0
    assert float(context.layers[0].confidence) == 0.0
    (gradient,) = torch.autograd.grad(loss, routing.scores_TE)
    assert torch.count_nonzero(gradient) == 0


def test_loss_is_one_at_balance_and_g_at_collapse() -> None:
    uniform = torch.full((12, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    each_once = torch.ones(EXPERTS, dtype=torch.int64)
    for groups in (2, 3, 4):
        assert float(ep_group_loss(uniform, each_once, groups, None, 12)) == pytest.approx(1.0, abs=1e-14)
    collapsed = torch.zeros(12, EXPERTS, dtype=torch.float64)
    collapsed[:, 0] = 1.0
    all_first = torch.zeros(EXPERTS, dtype=torch.int64)
    all_first[0] = 12
    assert float(ep_group_loss(collapsed, all_first, 4, None, 12)) == pytest.approx(4.0, abs=1e-14)


def test_unbalanced_experts_of_balanced_groups_cost_nothing() -> None:
    """What makes it a loss of groups: inside a group any distribution is as good as another."""
    mass = torch.zeros(1, EXPERTS, dtype=torch.float64)
    mass[0, [0, 3, 6, 9]] = 0.25
    counts = (mass[0] * 8).long()
    assert float(ep_group_loss(mass, counts, 4, None, 1)) == pytest.approx(1.0)
    assert float(ep_group_loss(mass, counts, 12, None, 1)) == pytest.approx(3.0)


def test_one_group_has_no_gradient() -> None:
    routing = make_routing(9, 3, seed=4)
    (gradient,) = torch.autograd.grad(BalanceContext(1, 1.0, None, 9).observe(0, routing), routing.scores_TE)
    assert gradient.abs().max() < 1e-16


def test_gradient_flows_through_p_only() -> None:
    """f is a count: moving the scores without changing the selection changes L_EP by p's part alone,
    and the analytic gradient is that of L with f held."""
    routing = make_routing(17, 3, seed=5)
    scores = routing.scores_TE.detach()
    (gradient,) = torch.autograd.grad(BalanceContext(4, 1.0, None, 17).observe(0, routing), routing.scores_TE)
    step = 1e-6 * torch.randn(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    values = [
        float(BalanceContext(4, 1.0, None, 17).observe(0, Routing(routing.experts_TK, routing.weights_TK, s)))
        for s in (scores + step, scores - step)
    ]
    assert (values[0] - values[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-6)


def test_observing_a_layer_again_counts_once() -> None:
    """Recomputation runs the router twice in one micro-batch."""
    routing = make_routing(11, 3, seed=7)
    context = BalanceContext(4, 1.0, None, 11)
    first = context.observe(2, routing)
    counts = context.layers[2].tokens_per_expert_E.clone()
    second = context.observe(2, routing)
    assert torch.equal(first, second) and list(context.layers) == [2]
    assert torch.equal(context.layers[2].tokens_per_expert_E, counts)


def test_scores_that_all_underflow_leave_everything_finite() -> None:
    """As in the router, whose weights are 0 then: one such token must not end a run with NaN."""
    routing = make_routing(8, 3, seed=9, dtype=torch.float32)
    scores = routing.scores_TE.detach().clone()
    scores[5] = 0.0
    scores.requires_grad_()
    context = BalanceContext(4, 1.0, None, 8)
    loss = context.observe(0, Routing(routing.experts_TK, routing.weights_TK, scores))
    loss.backward()
    assert loss.isfinite() and context.layers[0].confidence.isfinite() and scores.grad.isfinite().all()


def test_counts_of_experts_nobody_selects_are_zero() -> None:
    assert counts_of(torch.tensor([[0, 1], [1, 0]]), 5, None).tolist() == [2, 2, 0, 0, 0]
    assert counts_of(torch.tensor([[0, 1], [1, 4]]), 5, torch.tensor([True, False])).tolist() == [1, 1, 0, 0, 0]


# ---------------------------------------------------------------------------------- bias update


@pytest.mark.parametrize(
    "counts, signs",
    [
        ([4, 4, 4, 4], [0, 0, 0, 0]),
        ([5, 4, 3, 4], [-1, 0, 1, 0]),  # a count equal to the mean: no change
        ([1, 0, 0, 0], [-1, 1, 1, 1]),  # mean 0.25
        ([3, 3, 3, 2], [-1, -1, -1, 1]),  # mean 2.75: the total does not divide by 4
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_bias_update_signs(counts: list[int], signs: list[int]) -> None:
    update = bias_update(torch.tensor(counts), 1e-3)
    assert update.dtype is torch.float32
    assert torch.equal(update, torch.tensor(signs, dtype=torch.float32) * 1e-3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=16))
def test_bias_update_is_exact_in_integers(counts: list[int]) -> None:
    """Counts beyond float32's 2^24, where a mean in floating point would not see a difference of one."""
    total, size = sum(counts), len(counts)
    expected = [(total > size * c) - (total < size * c) for c in counts]
    assert bias_update(torch.tensor(counts), 1.0).tolist() == expected


def test_bias_update_sees_one_token_in_a_trillion() -> None:
    many = 10**12
    assert bias_update(torch.tensor([many, many, many, many + 1]), 1.0).tolist() == [1, 1, 1, -1]


def test_bias_update_of_several_layers_is_that_of_each() -> None:
    counts = torch.tensor([[5, 4, 3, 4], [0, 0, 0, 8]])
    assert torch.equal(bias_update(counts, 0.5), torch.stack([bias_update(row, 0.5) for row in counts]))


def test_bias_updates_balance_the_selection() -> None:
    """The sign is right: repeated updates bring an expert that is always selected down to its share."""
    scores = torch.rand(400, EXPERTS, generator=torch.Generator().manual_seed(8)) * 0.2
    scores[:, 0] += 0.5
    bias = torch.zeros(EXPERTS)
    for _ in range(400):
        counts = counts_of((scores + bias).topk(3, dim=1).indices, EXPERTS, None)
        bias += bias_update(counts, 2e-3)
    assert counts.max() < 1.3 * counts.double().mean() and counts.min() > 0.7 * counts.double().mean()


# ---------------------------------------------------------------------------------- AttachLoss


def test_attached_loss_adds_its_own_gradient_once_whatever_the_scale() -> None:
    """The output is rescaled afterwards (losses divided by token counts): the attached loss is not."""
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    loss = (x @ w).square().mean()
    y = AttachLoss.apply(x, loss)
    assert torch.equal(y, x)
    gx, gw = torch.autograd.grad(1e-3 * (7 * y).sum(), [x, w], retain_graph=True)
    ex, ew = torch.autograd.grad(loss, [x, w])
    torch.testing.assert_close(gx, ex + 7e-3, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(gw, ew, rtol=1e-14, atol=1e-15)


def test_attached_loss_reaches_the_backward_pass_even_with_a_zero_output_gradient() -> None:
    x = torch.randn(4, requires_grad=True)
    AttachLoss.apply(x, x.square().sum()).mul(0.0).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_attached_loss_keeps_its_dtype_beside_a_bf16_tensor() -> None:
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    s = torch.randn(4, dtype=torch.float32, requires_grad=True)
    AttachLoss.apply(x, s.square().sum()).float().sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.bfloat16
    torch.testing.assert_close(s.grad, 2 * s.detach())
