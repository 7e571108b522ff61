"""What Megatron-Core is told about a layout."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from steptron.config.schema import ParallelConfig
from steptron.model.transformer_config import transformer_config
from tests.model.helpers import small_config


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (8, 3)])
def test_stages(pipeline: int, virtual: int) -> None:
    """Megatron wants layers that divide by the stages; ours are listed, so that any number of them is right."""
    model = small_config()
    config = transformer_config(model, ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual), torch.float32)
    assert config.virtual_pipeline_model_parallel_size == (virtual if virtual > 1 else None)
    assert config.num_layers % (pipeline * virtual) == 0
    assert 0 <= config.num_layers - model.num_layers < pipeline * virtual
    # A group of micro-batches that the interleaved schedule takes at once; the checks of the batch rely on it.
    assert config.microbatch_group_size_per_vp_stage == pipeline


def test_sequence_parallelism_goes_with_tensor_parallelism_and_experts_stay_whole() -> None:
    for tensor, context, expert in product((1, 2), (1, 2), (1, 4)):
        parallel = ParallelConfig(tensor=tensor, context=context, expert=expert)
        config = transformer_config(small_config(), parallel, torch.bfloat16)
        assert config.sequence_parallel == (tensor > 1)
        assert config.tensor_model_parallel_size == tensor and config.expert_tensor_parallel_size == 1
        assert config.context_parallel_size == context and config.expert_model_parallel_size == expert


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("overlap", [False, True])
def test_expert_communication(dispatcher: str, overlap: bool) -> None:
    parallel = ParallelConfig(expert=2, dispatcher=dispatcher, overlap_expert_communication=overlap)
    config = transformer_config(small_config(), parallel, torch.bfloat16)
    assert config.moe_token_dispatcher_type == dispatcher and config.moe_flex_dispatcher_backend == "deepep"
    assert config.overlap_expert_communication is overlap
    # Megatron's own overlaps are of its own layers and schedules.
    assert not config.moe_shared_expert_overlap and not config.overlap_moe_expert_parallel_comm


def test_a_single_expert_per_token() -> None:
    """Megatron's own router would need another setting for it."""
    model = small_config()
    single = model.model_copy(update={"moe": model.moe.model_copy(update={"top_k": 1})})
    assert transformer_config(single, ParallelConfig(expert=2), torch.float32).moe_router_topk == 1
