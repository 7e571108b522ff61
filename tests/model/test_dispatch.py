"""Dispatchers: what the local one hands on, and the expert-parallel ones against loops."""

from __future__ import annotations

import contextlib

import pytest
import torch

from steptron.config.schema import MoeConfig, ParallelConfig
from steptron.model.dispatch import ExpertParallelDispatcher, LocalDispatcher
from steptron.model.router import Routing
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import build_mesh
from tests.model import deep_ep_on_gloo
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


def through(dispatcher: ExpertParallelDispatcher, h: torch.Tensor, routing: Routing, first_expert: int) -> torch.Tensor:
    x, counts, weights, plan, combine = dispatcher.dispatch(h, routing)
    assert plan is None and x.is_contiguous()
    assert x.shape == (int(counts.sum()), h.shape[1]) and weights.shape == (x.shape[0],)
    numbers = first_expert + torch.arange(counts.numel()).repeat_interleave(counts)
    return combine(expert_function(x, numbers, weights.to(x.dtype)))


def test_local_dispatcher_leaves_gathering_to_the_experts() -> None:
    routing = make_routing(7, 3, seed=3)
    h = torch.randn(7, HIDDEN)
    config = transformer_config(small_config(), ParallelConfig(), torch.float32)
    x, counts, weights, plan, combine = LocalDispatcher(EXPERTS, config).dispatch(h, routing)
    assert x is h and weights is routing.weights_TK and combine(x) is x
    assert plan is not None
    by_expert = routing.experts_TK.flatten()[plan.slot_N]
    assert torch.equal(by_expert, by_expert.sort().values)
    assert counts.tolist() == [int((routing.experts_TK == e).sum()) for e in range(EXPERTS)]


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
    routing = make_routing(tokens, top_k, seed=10 + rank, used=used)
    h = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(20 + rank)).requires_grad_()
    direction = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(30 + rank))
    with deep_ep_on_gloo.installed() if kind == "flex" else contextlib.nullcontext():
        dispatcher = ExpertParallelDispatcher(EXPERTS, config, mesh.groups)
        out = through(dispatcher, h, routing, mesh.expert_rank * EXPERTS // world_size)
        gradients = torch.autograd.grad(out, [h, routing.weights_TK], direction)
    expected = by_loops(h, routing)
    references = torch.autograd.grad(expected, [h, routing.weights_TK], direction)
    return [(a.detach(), b.detach()) for a, b in zip((out, *gradients), (expected, *references), strict=True)]


@pytest.mark.parametrize("kind", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_expert_parallel_dispatchers_equal_loops(pool: WorkerPool, kind: str, situation: str) -> None:
    for rank in pool.run(2, expert_parallel, kind, situation):
        for own, expected in rank:
            assert own.shape == expected.shape
            assert relative_error(own, expected) < 1e-6


@pytest.mark.parametrize("kind", ["alltoall", "allgather", "flex"])
def test_expert_parallel_over_four_ranks(pool: WorkerPool, kind: str) -> None:
    for rank in pool.run(4, expert_parallel, kind, "random"):
        for own, expected in rank:
            assert relative_error(own, expected) < 1e-6


def flex_without_deep_ep(rank: int, world_size: int) -> str:
    parallel = ParallelConfig(expert=world_size, dispatcher="flex")
    moe = MoeConfig(num_experts=EXPERTS, top_k=2, expert_hidden_size=16, shared_hidden_size=16)
    config = transformer_config(small_config(moe=moe), parallel, torch.float32)
    with pytest.raises(ImportError) as caught:
        ExpertParallelDispatcher(EXPERTS, config, build_mesh(parallel).groups)
    return str(caught.value)


def test_flex_says_that_deep_ep_is_missing(pool: WorkerPool) -> None:
    for message in pool.run(2, flex_without_deep_ep):
        assert "DeepEP is not installed" in message
