"""The global gradient norm counts each gradient once under every layout, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.config.schema import OptimizerConfig, ParallelConfig, ShardingConfig
from steptron.model.chunks import ModelChunks
from steptron.model.parameter_shards import shard
from steptron.model.stages import split_stages
from steptron.optim.owned import OwnedPiece
from steptron.optim.ownership import Reduction
from steptron.parallel import gradient_norm as module
from steptron.parallel.gradient_norm import _sum_of_squares, clip_gradients, gradient_norm
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.sharded_model import ShardedModel
from tests.model.helpers import build_model, single_process, small_config
from tests.parallel.layouts import sharded_by
from tests.worker_pool import WorkerPool

CONFIG = small_config()
CPU = torch.device("cpu")
MODELS = [(2, False), (1, True), (0, False)]
"""MTP depths that train, and whether routers are frozen."""
OWNERSHIPS = [
    ("muon", "auto"),
    ("muon", "reduce_scatter"),
    ("muon", "all_reduce"),
    ("adamw", "reduce_scatter"),
    ("adamw", "all_reduce"),
]


def whole_gradients() -> dict[str, torch.Tensor]:
    """A gradient for every parameter of the whole model; frozen ones get one too, which must not count."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(CONFIG)
    return {p.name: torch.randn(p.shape, generator=generator) for p in model.spec.parameters()}


def direct_norm(mtp_depths: int, freeze_router: bool) -> float:
    """A float32 number."""
    total = 0.0
    for name, gradient in whole_gradients().items():
        frozen = name.endswith("router.bias") or (freeze_router and name.endswith("router.weight"))
        frozen |= any(name.startswith(f"mtp.{depth}.") for depth in range(mtp_depths, CONFIG.mtp.depths))
        if not frozen:
            total += float(gradient.double().square().sum())
    return float(torch.tensor(math.sqrt(total), dtype=torch.float32))


def loaded(
    mesh: Mesh,
    parallel: ParallelConfig,
    mtp_depths: int = 2,
    freeze_router: bool = False,
    optimizer: str = "muon",
    reduction: str = "auto",
) -> ShardedModel:
    """This process's part, as the finished reductions leave it: after a reduce-scatter what others own is garbage."""
    stage = split_stages(CONFIG.num_layers, parallel.pipeline)[mesh.pipeline_rank]
    model = build_model(CONFIG, stage, mesh, parallel, mtp_depths=mtp_depths, freeze_router=freeze_router)
    config = OptimizerConfig(name=optimizer, lr=1.0, sharding=ShardingConfig(reduction=reduction))
    sharded = sharded_by(ModelChunks([model]), config, mesh)
    values, tensors = whole_gradients(), dict(model.named_parameters())
    for buffer in sharded.gradients:
        buffer.data.fill_(math.nan)  # padding too
        for own in buffer.plan.shards:
            parameter = own.parameter
            for part in shard(parameter, mesh.place).matrices:
                whole, gradient = values[parameter.name], tensors[parameter.name].main_grad
                if not parameter.is_expert:
                    whole, gradient = whole[slice(*part.matrix.rows)], gradient[slice(*part.rows)]
                gradient.copy_(whole.chunk(part.count, dim=part.axis)[part.index])
        layout, group = buffer.plan.layout, mesh.replicas(buffer.plan.replicas)
        if layout.reduction is Reduction.REDUCE_SCATTER:
            for span in layout.spans:
                for cell, data in enumerate(buffer.data[span.start : span.stop].chunk(layout.ranks)):
                    if cell != group.cell:
                        data.fill_(math.nan)
    return sharded


def norms_and_clipped(
    rank: int, world_size: int, layout: dict[str, int]
) -> dict[tuple[int, bool, str, str], list[float]]:
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel)
    found = {}
    for mtp_depths, freeze_router in MODELS:
        for ownership in OWNERSHIPS if mtp_depths == 2 else OWNERSHIPS[:1]:
            owned = loaded(mesh, parallel, mtp_depths, freeze_router, *ownership).owned
            norm, _ = gradient_norm(owned, CPU)
            clip_gradients(owned, norm, 0.5)
            found[mtp_depths, freeze_router, *ownership] = [norm, gradient_norm(owned, CPU)[0]]
    return found


LAYOUTS = {
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "DP4": (4, {}),
    "DP4 by nodes": (4, {"node_size": 2}),
    "DP2xEP2": (4, {"expert": 2}),
    "EP4": (4, {"expert": 4}),
    "PP2": (2, {"pipeline": 2}),
    "PP4": (4, {"pipeline": 4}),
    "PP2xDP2": (4, {"pipeline": 2}),
    "PP2xEP2": (4, {"pipeline": 2, "expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2xDP2": (4, {"tensor": 2}),
    "TP2, EP4": (4, {"tensor": 2, "expert": 4}),
    "PP2xTP2": (4, {"pipeline": 2, "tensor": 2}),
    "CP2xEP2": (4, {"context": 2, "expert": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_gradient_counts_once(pool: WorkerPool, name: str) -> None:
    """And the norm is the same float32 number under all layouts, whoever owns what: all scale by the same factor."""
    world_size, layout = LAYOUTS[name]
    results = pool.run(world_size, norms_and_clipped, layout)
    for result in results:
        assert result == results[0] and len(result) == len(OWNERSHIPS) + 2
        for (mtp_depths, freeze_router, *_), (norm, clipped) in result.items():
            assert norm == direct_norm(mtp_depths, freeze_router)
            assert clipped == pytest.approx(0.5, rel=1e-5)


def test_one_process() -> None:
    owned = loaded(single_process(), ParallelConfig()).owned
    assert gradient_norm(owned, CPU) == (direct_norm(2, False), 0.0)
    assert gradient_norm(owned, CPU, torch.tensor(3.0, dtype=torch.float64))[1] == 3.0


def numbers_along(rank: int, world_size: int) -> tuple[float, float]:
    """Some ranks own nothing."""
    owned = loaded(build_mesh(ParallelConfig()), ParallelConfig()).owned
    return gradient_norm(owned if rank == 1 else [], CPU, torch.tensor(10.0**rank, dtype=torch.float64))


def test_ranks_that_own_nothing_and_a_number_that_goes_along(pool: WorkerPool) -> None:
    (norm, total), *others = pool.run(3, numbers_along)
    assert others == [(norm, total)] * 2 and 0 < norm < direct_norm(2, False) and total == 111.0


def test_nothing_at_all() -> None:
    single_process()
    assert gradient_norm([], CPU) == (0.0, 0.0)
    clip_gradients([], 2.0, 1.0)


def test_clipping_scales_every_gradient_alike_and_only_when_the_norm_is_larger() -> None:
    sharded = loaded(single_process(), ParallelConfig())
    model, owned = sharded.chunks[0].module, sharded.owned
    before = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    norm, _ = gradient_norm(owned, CPU)
    clip_gradients(owned, norm, 2 * norm)
    clip_gradients(owned, norm, norm)
    for name, p in model.named_parameters():
        assert torch.equal(p.main_grad, before[name])
    clip_gradients(owned, norm, norm / 4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.main_grad, before[name] / 4, rtol=1e-5, atol=0)


def test_gradients_that_are_not_finite_show_in_the_norm() -> None:
    sharded = loaded(single_process(), ParallelConfig())
    embedding = sharded.chunks[0].module.embedding.weight
    embedding.main_grad[0, 0] = math.nan
    assert math.isnan(gradient_norm(sharded.owned, CPU)[0])
    embedding.main_grad[0, 0] = math.inf
    assert math.isinf(gradient_norm(sharded.owned, CPU)[0])


@pytest.mark.parametrize("size", [1e15, 1e-15, 1e30, 1e-38])
def test_very_large_and_very_small_gradients(size: float) -> None:
    """Their squares are no float32 numbers."""
    sharded = loaded(single_process(), ParallelConfig())
    for buffer in sharded.gradients:
        buffer.data.fill_(size)
    expected = size * math.sqrt(sum(piece.gradient.numel() for piece in sharded.owned))
    assert gradient_norm(sharded.owned, CPU)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunk", [{"cpu": 1 << 15}, {}, {"cpu": 77}], ids=["cpu", "other devices", "short"])
def test_the_norm_of_a_large_tensor_is_exact_wherever_it_is_cut(
    chunk: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own CPU norm of three million fp32 elements is off by 5e-5: ranks that hold different
    parts of the same experts would clip differently."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    gradient = torch.randn(300_001 if chunk == {"cpu": 77} else 3_000_001, generator=torch.Generator().manual_seed(1))
    expected = math.fsum(gradient.double().square().tolist())
    for border in (0, 1, 100_000, 231_072):
        parts = [gradient[:border], gradient[border:]]
        assert float(_sum_of_squares(parts, CPU)) == pytest.approx(expected, rel=1e-12)
    assert float(_sum_of_squares([], CPU)) == 0.0


def test_who_owns_what_does_not_change_a_bit() -> None:
    """A hundred random ways to cut and to deal the same gradients, of which fp32 sums would show most."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(200_000, generator=generator)
    norms = set()
    for _ in range(100):
        borders = torch.randint(0, gradient.numel(), (6,), generator=generator).sort().values.tolist()
        parts = [gradient[a:b] for a, b in zip([0, *borders], [*borders, gradient.numel()], strict=True)]
        order = torch.randperm(len(parts), generator=generator).tolist()
        ranks = [_sum_of_squares([parts[i] for i in order[rank::3]], CPU) for rank in range(3)]
        norms.add(float(torch.stack(ranks).sum().sqrt().float()))
    assert len(norms) == 1


def test_the_copy_of_the_embedding_is_clipped_but_not_counted() -> None:
    sharded = loaded(single_process(), ParallelConfig())
    copies = [OwnedPiece(p.piece, p.weight, p.gradient, is_copy=True) for p in sharded.owned]
    assert gradient_norm(copies, CPU)[0] == 0.0
    before = copies[0].gradient.clone()
    clip_gradients(copies, 2.0, 1.0)
    torch.testing.assert_close(copies[0].gradient, before / 2)
