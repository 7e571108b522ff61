"""Dispatchers: the local one against loops, the expert-parallel ones against the local one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.config.schema import MoeConfig, ParallelConfig
from steptron.model.dispatch import Dispatcher, ExpertParallelDispatcher, LocalDispatcher
from steptron.model.router import Routing
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import build_mesh
from tests.model.helpers import relative_error, small_config
from tests.worker_pool import WorkerPool

EXPERTS, HIDDEN = 8, 12


def make_routing(tokens: int, top_k: int, seed: int, experts: int = EXPERTS, used: int | None = None) -> Routing:
    """Random routing; with ``used``, to the first so many experts only."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    allowed = scores.clone()
    if used is not None:
        allowed[:, used:] = -1
    selected = allowed.topk(top_k, dim=1).indices
    # Any order of a token's experts is legal (top-k does not sort).
    order = torch.rand(tokens, top_k, generator=generator).argsort(dim=1)
    weights = torch.rand(tokens, top_k, generator=generator)
    return Routing(selected.gather(1, order), weights.requires_grad_(), scores)


def expert_function(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A different nonlinear function for each expert number, row by row."""
    return weight.unsqueeze(1) * torch.tanh(x * (0.1 + 0.2 * expert.to(x.dtype).unsqueeze(1)))


def by_loops(h: torch.Tensor, routing: Routing) -> torch.Tensor:
    rows = []
    for t in range(h.shape[0]):
        total = torch.zeros(HIDDEN, dtype=h.dtype)
        for k in range(routing.experts_TK.shape[1]):
            e, w = routing.experts_TK[t, k].view(1), routing.weights_TK[t, k].view(1).to(h.dtype)
            total = total + expert_function(h[t].view(1, -1), e, w).view(-1)
        rows.append(total)
    return torch.stack(rows) if rows else h.new_empty(0, HIDDEN)


def through(dispatcher: Dispatcher, h: torch.Tensor, routing: Routing, first_expert: int = 0) -> torch.Tensor:
    x, counts, weights, combine = dispatcher.dispatch(h, routing)
    assert x.shape == (int(counts.sum()), h.shape[1]) and weights.shape == (x.shape[0],)
    assert x.is_contiguous()
    numbers = first_expert + torch.arange(counts.numel()).repeat_interleave(counts)
    return combine(expert_function(x, numbers, weights.to(x.dtype)))


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_local_dispatcher(tokens: int, top_k: int) -> None:
    routing = make_routing(tokens, top_k, seed=tokens)
    h = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    out = through(LocalDispatcher(), h, routing)
    expected = by_loops(h, routing)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if tokens:
        own = torch.autograd.grad(out, [h, routing.weights_TK], direction)
        ref = torch.autograd.grad(expected, [h, routing.weights_TK], direction)
        torch.testing.assert_close(own[0], ref[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own[1], ref[1], rtol=1e-6, atol=1e-6)  # weights are fp32


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_local_dispatcher_of_any_shape(tokens: int, experts: int, top_k: int, seed: int) -> None:
    top_k = min(top_k, experts)
    routing = make_routing(tokens, top_k, seed, experts)
    h = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x, counts, _, _ = LocalDispatcher().dispatch(h, routing)
    assert counts.tolist() == [int((routing.experts_TK == e).sum()) for e in range(experts)]
    # Rows of an expert come in the order of their tokens: a stable sort, the same on every machine.
    expected = [h[t] for e in range(experts) for t in range(tokens) if e in routing.experts_TK[t]]
    assert torch.equal(x, torch.stack(expected) if expected else x)
    torch.testing.assert_close(through(LocalDispatcher(), h, routing), by_loops(h, routing), rtol=1e-12, atol=1e-12)


def test_weights_travel_with_their_rows() -> None:
    routing = make_routing(9, 3, seed=3)
    _, _, weights, _ = LocalDispatcher().dispatch(torch.zeros(9, HIDDEN), routing)
    expected = [
        routing.weights_TK[t, routing.experts_TK[t].tolist().index(e)].item()
        for e in range(EXPERTS)
        for t in range(9)
        if e in routing.experts_TK[t]
    ]
    assert weights.tolist() == expected


def test_gradients_that_are_not_contiguous() -> None:
    routing = make_routing(6, 2, seed=4)
    h = torch.randn(6, HIDDEN, requires_grad=True)
    through(LocalDispatcher(), h, routing).sum().backward()
    own = h.grad.clone()
    expected = h.detach().double().requires_grad_()
    by_loops(expected, routing).sum().backward()
    assert relative_error(own, expected.grad) < 1e-6


def test_two_micro_batches_in_flight() -> None:
    """1F1B runs a second forward before the first backward."""
    dispatcher = LocalDispatcher()
    results = []
    for seed in (5, 6):
        routing = make_routing(7, 2, seed)
        h = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        results.append((h, through(dispatcher, h, routing), routing))
    for h, out, routing in results:
        out.square().sum().backward()
        h64 = h.detach().double().requires_grad_()
        by_loops(h64, routing).square().sum().backward()
        assert relative_error(h.grad, h64.grad) < 1e-6


# ----------------------------------------------------------------------------- expert parallel


SITUATIONS = {
    "random": (10, None),
    "nothing for the last rank": (10, 4),
    "one token": (1, None),
}


def expert_parallel(rank: int, world_size: int, kind: str, situation: str):
    """Output and gradients of a rank's own tokens."""
    tokens, used = SITUATIONS[situation]
    top_k = 3
    parallel = ParallelConfig(expert=world_size, dispatcher=kind)
    mesh = build_mesh(parallel)
    moe = MoeConfig(num_experts=EXPERTS, top_k=top_k, expert_hidden_size=16, shared_hidden_size=16)
    config = transformer_config(small_config(moe=moe), parallel, torch.float32)
    dispatcher = ExpertParallelDispatcher(EXPERTS, config, mesh.groups)
    routing = make_routing(tokens, top_k, seed=10 + rank, used=used)
    h = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(20 + rank)).requires_grad_()
    first = mesh.expert_range(EXPERTS)[0]
    out = through(dispatcher, h, routing, first)
    direction = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(30 + rank))
    gradients = torch.autograd.grad(out, [h, routing.weights_TK], direction)
    # The same tokens with all experts here.
    expected = through(LocalDispatcher(), h, routing)
    references = torch.autograd.grad(expected, [h, routing.weights_TK], direction)
    return [(a.detach(), b.detach()) for a, b in zip((out, *gradients), (expected, *references), strict=True)]


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_expert_parallel_dispatchers_equal_the_local_one(pool: WorkerPool, kind: str, situation: str) -> None:
    for rank in pool.run(2, expert_parallel, kind, situation):
        for own, expected in rank:
            assert own.shape == expected.shape
            assert relative_error(own, expected) < 1e-6


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_expert_parallel_over_four_ranks(pool: WorkerPool, kind: str) -> None:
    for rank in pool.run(4, expert_parallel, kind, "random"):
        for own, expected in rank:
            assert relative_error(own, expected) < 1e-6
