"""The global gradient norm counts each gradient once under every layout, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.config.schema import ParallelConfig
from steptron.model.parameter_shards import shard
from steptron.model.stages import split_stages
from steptron.parallel.gradient_buffer import DataParallel
from steptron.parallel.gradient_norm import _sum_of_squares, clip_gradients, gradient_norm
from steptron.parallel.mesh import Mesh, build_mesh
from tests.model.helpers import build_model, single_process, small_config
from tests.worker_pool import WorkerPool

CONFIG = small_config()
CPU = torch.device("cpu")


def whole_gradients() -> dict[str, torch.Tensor]:
    """A gradient for every parameter of the whole model; frozen ones get one too, which must not count."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(CONFIG)
    return {p.name: torch.randn(p.shape, generator=generator) for p in model.spec.parameters()}


def direct_norm(mtp_depths: int, freeze_router: bool) -> float:
    total = 0.0
    for name, gradient in whole_gradients().items():
        frozen = name.endswith("router.bias") or (freeze_router and name.endswith("router.weight"))
        frozen |= any(name.startswith(f"mtp.{depth}.") for depth in range(mtp_depths, CONFIG.mtp.depths))
        if not frozen:
            total += float(gradient.double().square().sum())
    return math.sqrt(total)


def loaded(mesh: Mesh, parallel: ParallelConfig, mtp_depths: int, freeze_router: bool) -> DataParallel:
    """This process's part, as the finished reductions leave it."""
    stage = split_stages(CONFIG.num_layers, parallel.pipeline)[mesh.pipeline_rank]
    model = build_model(CONFIG, stage, mesh, parallel, mtp_depths=mtp_depths, freeze_router=freeze_router)
    wrapped = DataParallel(model, mesh)
    values, tensors = whole_gradients(), dict(model.named_parameters())
    for parameter in model.spec.parameters():
        if parameter.name in tensors and tensors[parameter.name].requires_grad:
            gradient = tensors[parameter.name].main_grad
            for part in shard(parameter, mesh.place).matrices:
                whole = values[parameter.name]
                if not parameter.is_expert:
                    whole = whole[slice(*part.matrix.rows)]
                    gradient = tensors[parameter.name].main_grad[slice(*part.rows)]
                gradient.copy_(whole.chunk(part.count, dim=part.axis)[part.index])
    return wrapped


def norm_and_clipped(
    rank: int, world_size: int, layout: dict[str, int], mtp_depths: int, freeze_router: bool
) -> tuple[float, float]:
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel)
    model = loaded(mesh, parallel, mtp_depths, freeze_router)
    norm = gradient_norm([model], mesh, CPU)
    clip_gradients([model], norm, 0.5)
    return norm, gradient_norm([model], mesh, CPU)


@pytest.mark.parametrize("mtp_depths, freeze_router", [(2, False), (1, True), (0, False)])
@pytest.mark.parametrize(
    "world_size, layout",
    [
        (2, {}),
        (2, {"expert": 2}),
        (4, {"expert": 2}),
        (4, {"expert": 4}),
        (2, {"pipeline": 2}),
        (4, {"pipeline": 4}),
        (4, {"pipeline": 2, "expert": 2}),
        (2, {"tensor": 2}),
        (4, {"tensor": 2, "expert": 4}),
        (4, {"pipeline": 2, "tensor": 2}),
        (4, {"context": 2, "expert": 2}),
    ],
    ids=["DP2", "EP2", "DP2xEP2", "EP4", "PP2", "PP4", "PP2xEP2", "TP2", "TP2, EP4", "PP2xTP2", "CP2xEP2"],
)
def test_each_gradient_counts_once(
    pool: WorkerPool, world_size: int, layout: dict[str, int], mtp_depths: int, freeze_router: bool
) -> None:
    expected = direct_norm(mtp_depths, freeze_router)
    results = pool.run(world_size, norm_and_clipped, layout, mtp_depths, freeze_router)
    for norm, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(0.5, rel=1e-5)
    assert len(set(results)) == 1, "all ranks must scale by the same factor"


def test_one_process() -> None:
    mesh = single_process()
    model = loaded(mesh, ParallelConfig(), 2, False)
    assert gradient_norm([model], mesh, CPU) == pytest.approx(direct_norm(2, False), rel=1e-6)


def test_clipping_scales_every_gradient_alike_and_only_when_the_norm_is_larger() -> None:
    mesh = single_process()
    model = loaded(mesh, ParallelConfig(), 2, False)
    before = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
    norm = gradient_norm([model], mesh, CPU)
    clip_gradients([model], norm, 2 * norm)
    clip_gradients([model], norm, norm)
    for name, p in model.module.named_parameters():
        assert torch.equal(p.main_grad, before[name])
    clip_gradients([model], norm, norm / 4)
    for name, p in model.module.named_parameters():
        torch.testing.assert_close(p.main_grad, before[name] / 4, rtol=1e-5, atol=0)


def test_gradients_that_are_not_finite_show_in_the_norm() -> None:
    mesh = single_process()
    model = loaded(mesh, ParallelConfig(), 2, False)
    model.module.embedding.weight.main_grad[0, 0] = math.nan
    assert math.isnan(gradient_norm([model], mesh, CPU))
    model.module.embedding.weight.main_grad[0, 0] = math.inf
    assert math.isinf(gradient_norm([model], mesh, CPU))


@pytest.mark.parametrize("size", [1e15, 1e-15])
def test_very_large_and_very_small_gradients(size: float) -> None:
    mesh = single_process()
    model = loaded(mesh, ParallelConfig(), 2, False)
    for buffer in model.buffers:
        buffer.data.fill_(size)
    expected = size * math.sqrt(sum(buffer.data.numel() for buffer in model.buffers))
    assert gradient_norm([model], mesh, CPU) == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_a_large_tensor_is_exact() -> None:
    """torch's own CPU norm of three million fp32 elements is off by 5e-5: ranks that hold different
    parts of the same experts would clip differently."""
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1))
    expected = float(gradient.double().square().sum())
    assert float(_sum_of_squares([gradient], CPU)) == pytest.approx(expected, rel=1e-6)
    halves = [gradient[:1_000_000], gradient[1_000_000:]]
    assert float(_sum_of_squares(halves, CPU)) == pytest.approx(expected, rel=1e-6)
    assert float(_sum_of_squares([], CPU)) == 0.0
