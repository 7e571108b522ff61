"""Small models, process groups and comparisons that the tests of the model share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from steptron.config.schema import (
    AttentionConfig,
    ClampConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    ParallelConfig,
    RopeConfig,
    RopeScalingConfig,
    SlidingAttentionConfig,
)
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.layer_spec import ParameterRole, model_spec
from steptron.model.router import Router, Routing
from steptron.model.stages import Stage
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import Mesh, build_mesh
from steptron_kernels.select import PLAIN, Kernels


def small_config(**changes: Any) -> ModelConfig:
    """5 layers + 2 MTP depths with every feature on, small enough for a test of milliseconds."""
    fields: dict[str, Any] = dict(
        vocab_size=48,
        hidden_size=32,
        num_layers=5,
        num_dense_layers=1,
        layout="S3F1+heads+gate",
        head_dim=8,
        dense_hidden_size=40,
        full=AttentionConfig(
            num_heads=2,
            num_kv_groups=2,
            rope=RopeConfig(theta=5e6, rotary_fraction=0.5, scaling=RopeScalingConfig(factor=2.0, original_length=16)),
        ),
        sliding=SlidingAttentionConfig(num_heads=4, num_kv_groups=2, window=4, rope=RopeConfig(theta=1e4)),
        moe=MoeConfig(num_experts=4, top_k=2, expert_hidden_size=16, shared_hidden_size=24),
        clamp=ClampConfig(routed={3: 1.0, 4: 1.0}, shared={4: 1.5}),
        mtp=MtpConfig(depths=2),
    )
    return ModelConfig(**(fields | changes))


def single_process() -> Mesh:
    """The mesh of this process alone; its gloo group is made at the first call and kept."""
    if not dist.is_initialized():
        parallel_state.destroy_model_parallel()  # groups that a test has left behind with a world of its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        return Mesh(ProcessGroupCollection.use_mpu_process_groups())
    return build_mesh(ParallelConfig())


def build_model(
    config: ModelConfig,
    stage: Stage | None = None,
    mesh: Mesh | None = None,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = PLAIN,
    **options: Any,
) -> StepModel:
    """A model whose tensors hold what their allocation left there; see ``fill`` and ``initialise``."""
    spec = model_spec(config)
    return StepModel(
        spec,
        stage or Stage.whole(config.num_layers),
        transformer_config(config, parallel or ParallelConfig(), dtype, kernels=kernels),
        (mesh or single_process()).groups,
        **options,
    )


@torch.no_grad()
def fill(model: StepModel, seed: int) -> None:
    """Random values, large enough that every feature matters: norms and biases are not zero.

    Drawn in order of the whole model's parameters, so that every stage of the same model gets the
    same values; experts of an expert-parallel rank are cut out of the whole stack.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.logical_tensors())
    for parameter in model.spec.parameters():
        scale = {ParameterRole.EMBEDDING: 1.0, ParameterRole.NORM: 0.2, ParameterRole.ROUTER_BIAS: 0.3}
        values = torch.randn(parameter.shape, generator=generator) * scale.get(parameter.role, 0.25)
        if parameter.name in tensors:
            tensor = tensors[parameter.name]
            if parameter.is_expert and tensor.shape[0] != parameter.shape[0]:
                first = parallel_state.get_expert_model_parallel_rank() * tensor.shape[0]
                values = values[first : first + tensor.shape[0]]
            tensor.copy_(values)


def random_batch(
    vocab_size: int, batch_size: int, length: int, seed: int, documents: list[list[int]] | None = None
) -> MicroBatch:
    """Random tokens; with ``documents``, lengths of the documents of each row, the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    stream_BS = torch.randint(0, vocab_size, (batch_size, length + 1), generator=generator)
    tokens_BS, labels_BS = stream_BS[:, :-1].contiguous(), stream_BS[:, 1:].contiguous()
    documents_BS = torch.full((batch_size, length), -1)
    positions_BS = torch.zeros(batch_size, length, dtype=torch.int64)
    mask_BS = torch.zeros(batch_size, length, dtype=torch.bool)
    for row, lengths in enumerate(documents or [[length]] * batch_size):
        start = 0
        for number, size in enumerate(lengths):
            stop = start + size
            documents_BS[row, start:stop] = number
            positions_BS[row, start:stop] = torch.arange(size)
            mask_BS[row, start : stop - 1] = True
            start = stop
    return MicroBatch(tokens_BS, labels_BS, mask_BS, positions_BS, documents_BS)


def gradients(model: StepModel) -> dict[str, torch.Tensor]:
    """``grad`` of every parameter that has one, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; the plain norm where nothing is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    norm = float(expected.norm())
    return float((actual - expected).norm()) / (norm if norm > 0 else 1.0)


def assert_all_close(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    """Same names, and ``relative_error`` within the tolerance for each."""
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e} > {tolerance:.0e}"


def watch_selection_gaps(model: StepModel) -> list[float]:
    """Collects, from now on, how close each layer's last selected and first rejected expert came."""
    gaps: list[float] = []

    def look(router: Router, inputs: object, routing: Routing) -> None:
        ranked = (routing.scores_TE.detach() + router.bias).sort(dim=1, descending=True).values
        k = router.spec.top_k
        if k < ranked.shape[1]:
            gaps.append(float((ranked[:, k - 1] - ranked[:, k]).min()))

    for router in model.routers().values():
        router.register_forward_hook(look)
    return gaps
