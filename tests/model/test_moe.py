"""The MoE layer against explicit loops over tokens and experts in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steptron.config.schema import ParallelConfig
from steptron.model.balance import BalanceContext
from steptron.model.dispatch import ExpertParallelDispatcher, LocalDispatcher
from steptron.model.layer_spec import DenseFfnSpec, MoeFfnSpec
from steptron.model.moe import MoeFfn
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import Mesh, build_mesh
from steptron_kernels.swiglu.plain import swiglu
from tests.model.helpers import assert_all_close, relative_error, single_process, small_config
from tests.worker_pool import WorkerPool

HIDDEN, EXPERTS, TOP_K = 32, 8, 3
SPEC = MoeFfnSpec(EXPERTS, TOP_K, 3.0, 16, 1.0, DenseFfnSpec(24, 1.5, True), True)
GROUPS, COEFFICIENT = 4, 0.7


def make_layer(mesh: Mesh, parallel: ParallelConfig) -> MoeFfn:
    config = small_config(
        moe={"num_experts": EXPERTS, "top_k": TOP_K, "expert_hidden_size": 16, "shared_hidden_size": 24}
    )
    layer = MoeFfn(SPEC, 3, HIDDEN, transformer_config(config, parallel, torch.float32), mesh.groups)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "router.weight": (EXPERTS, HIDDEN),
        "router.bias": (EXPERTS,),
        "experts.gate_up_projection": (EXPERTS, 32, HIDDEN),
        "experts.down_projection": (EXPERTS, HIDDEN, 16),
        "shared.gate_up_projection.weight": (48, HIDDEN),
        "shared.down_projection.weight": (HIDDEN, 24),
    }
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert tensors.keys() == shapes.keys()
    first, last = (EXPERTS * place // mesh.expert_size for place in (mesh.expert_rank, mesh.expert_rank + 1))
    with torch.no_grad():
        for name, shape in shapes.items():
            values = 0.3 * torch.randn(shape, generator=generator)
            tensors[name].copy_(values[first:last] if name.startswith("experts") else values)
    return layer


def make_input(seed: int = 1, length: int = 11, batch: int = 2) -> torch.Tensor:
    return torch.randn(length, batch, HIDDEN, generator=torch.Generator().manual_seed(seed))


def direction_like(x: torch.Tensor, seed: int = 2) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def by_loops(
    layer: MoeFfn, h: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output [T, H] and L_EP in float64, and the leaves: h, then the layer's parameters in order."""
    leaves = [h.reshape(-1, HIDDEN).detach().double().requires_grad_()]
    leaves += [p.detach().double().requires_grad_() for p in layer.parameters()]
    x, (router, gate_up, down, shared_up, shared_down) = leaves[0], leaves[1:]
    names = [name for name, _ in layer.named_parameters()]
    assert [name.split(".")[0] for name in names] == ["router", "experts", "experts", "shared", "shared"]
    outputs, counts, mass = [], torch.zeros(EXPERTS, dtype=torch.float64), torch.zeros(EXPERTS, dtype=torch.float64)
    for t in range(x.shape[0]):
        p = torch.sigmoid(router @ x[t])
        biased = (p + layer.router.bias.double()).detach()
        ranked = biased.argsort(descending=True)
        assert biased[ranked[TOP_K - 1]] - biased[ranked[TOP_K]] > 1e-5, "near-tie: choose another seed"
        chosen = ranked[:TOP_K]
        weights = 3.0 * p[chosen] / p[chosen].sum()
        total = shared_down @ swiglu(shared_up @ x[t], 1.5)
        for w, e in zip(weights, chosen.tolist(), strict=True):
            total = total + w * (down[e] @ swiglu(gate_up[e] @ x[t], 1.0))
        outputs.append(total)
        if valid[t]:
            counts[chosen] += 1
            mass = mass + p / p.sum() / valid.sum()
    f = counts.view(GROUPS, -1).sum(dim=1) / counts.sum()
    return torch.stack(outputs), GROUPS * (f * mass.view(GROUPS, -1).sum(dim=1)).sum(), leaves


def context(valid: torch.Tensor, coefficient: float = COEFFICIENT) -> BalanceContext:
    return BalanceContext(GROUPS, coefficient, None if valid.all() else valid, int(valid.sum()))


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, COEFFICIENT])
def test_output_and_gradients(padding: bool, coefficient: float) -> None:
    layer = make_layer(single_process(), ParallelConfig())
    assert isinstance(layer.dispatcher, LocalDispatcher)
    h = make_input().requires_grad_()
    valid = torch.arange(22) % 4 != 3 if padding else torch.ones(22, dtype=torch.bool)
    balance = context(valid, coefficient)
    out = layer(h, balance)
    direction = direction_like(h)
    (out * direction).sum().backward()

    expected, ep_loss, leaves = by_loops(layer, h, valid)
    ((expected * direction.view(-1, HIDDEN).double()).sum() + coefficient * ep_loss).backward()
    assert out.shape == h.shape
    assert relative_error(out.view(-1, HIDDEN), expected) < 1e-6
    assert balance.layers[3].ep_loss.item() == pytest.approx(ep_loss.item(), rel=1e-6)
    own = [h.grad.view(-1, HIDDEN), *(p.grad for p in layer.parameters())]
    for a, b in zip(own, leaves, strict=True):
        assert b.grad is not None and relative_error(a, b.grad) < 2e-6


def test_the_balance_loss_matters_in_that_comparison() -> None:
    gradients = []
    for coefficient in (0.0, COEFFICIENT):
        layer = make_layer(single_process(), ParallelConfig())
        h = make_input()
        (layer(h, context(torch.ones(22, dtype=torch.bool), coefficient)) * direction_like(h)).sum().backward()
        gradients.append(layer.router.weight.grad)
    assert relative_error(*gradients) > 1e-4


def test_without_balance_the_output_is_the_same() -> None:
    layer, h = make_layer(single_process(), ParallelConfig()), make_input()
    balance = context(torch.ones(22, dtype=torch.bool))
    assert torch.equal(layer(h, None), layer(h, balance))


def test_shared_expert_is_neither_scaled_nor_gated() -> None:
    layer, h = make_layer(single_process(), ParallelConfig()), make_input()
    with torch.no_grad():
        layer.experts.down_projection.zero_()
    x = h.view(-1, HIDDEN).double()
    hidden = swiglu(x @ layer.shared.gate_up_projection.weight.double().t(), 1.5)
    expected = hidden @ layer.shared.down_projection.weight.double().t()
    assert relative_error(layer(h, None).view(-1, HIDDEN), expected) < 1e-6


def test_input_that_is_not_contiguous() -> None:
    layer, h = make_layer(single_process(), ParallelConfig()), make_input()
    assert torch.equal(layer(h.transpose(0, 1).contiguous().transpose(0, 1), None), layer(h, None))


# ----------------------------------------------------------------------------- expert parallel


def expert_parallel(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    parallel = ParallelConfig(expert=world_size, dispatcher=kind)  # type: ignore[arg-type]
    mesh = build_mesh(parallel)
    layer = make_layer(mesh, parallel)
    assert isinstance(layer.dispatcher, ExpertParallelDispatcher)
    h = make_input(seed=10 + rank).requires_grad_()
    balance = context(torch.arange(22) % (3 + rank) != 0)
    out = layer(h, balance)
    (out * direction_like(h, 20 + rank)).sum().backward()
    return {
        "out": out.detach(),
        "h": h.grad,
        "seen": balance.layers[3],
        "gradients": {name: p.grad for name, p in layer.named_parameters()},
    }


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_expert_parallel_equals_one_process(pool: WorkerPool, kind: str, world_size: int) -> None:
    """Each rank's micro-batch has its own EP loss; expert gradients arrive complete at their owner."""
    ranks = pool.run(world_size, expert_parallel, kind)
    layer = make_layer(single_process(), ParallelConfig())
    for rank, own in enumerate(ranks):
        h = make_input(seed=10 + rank).requires_grad_()
        balance = context(torch.arange(22) % (3 + rank) != 0)
        out = layer(h, balance)
        (out * direction_like(h, 20 + rank)).sum().backward()
        assert relative_error(own["out"], out) < 1e-6 and relative_error(own["h"], h.grad) < 2e-6
        assert torch.equal(own["seen"].tokens_per_expert_E, balance.layers[3].tokens_per_expert_E)
        assert torch.equal(own["seen"].ep_loss, balance.layers[3].ep_loss)
        assert torch.equal(own["seen"].confidence, balance.layers[3].confidence)
    combined = {
        name: torch.cat([own["gradients"][name] for own in ranks])
        if name.startswith("experts")
        else torch.stack([own["gradients"][name] for own in ranks]).sum(dim=0)
        for name in ranks[0]["gradients"]
    }
    assert_all_close(combined, {name: p.grad for name, p in layer.named_parameters()}, 2e-6)
