"""Megatron-Core's TransformerConfig for our modules.

It carries only what Megatron's own parts read (linear layers, dispatchers, schedules). Whatever
differs from layer to layer lives in LayerSpec and is never looked up here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from steptron.config.schema import ModelConfig, ParallelConfig
from steptron_kernels.select import PLAIN, Kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By ``train.precision``."""


@dataclass
class StepConfig(TransformerConfig):
    """Megatron-Core's configuration, and what our modules need besides.

    Attributes:
        kernels: the operations that our modules call.
        overlap_expert_communication: compute the shared expert while tokens travel to the routed ones.
    """

    kernels: Kernels = PLAIN
    overlap_expert_communication: bool = False


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
    kernels: Kernels = PLAIN,
) -> StepConfig:
    """Builds the engine's configuration.

    Args:
        model: the architecture.
        parallel: the layout over processes.
        dtype: dtype of parameters and of tensors sent between pipeline stages.
        deterministic: ask Megatron's modules for deterministic operations.
        kernels: the operations that our modules call.
    """
    # Megatron refuses layer counts that do not divide by the stages, though its schedules do not
    # care; our stages hold explicit lists of layers, so it is given a count that divides.
    num_stages = parallel.pipeline * parallel.virtual_pipeline
    num_layers = -(-model.num_layers // num_stages) * num_stages
    with warnings.catch_warnings():
        # 0.16.1 warns about the default of a field that we do not set.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return StepConfig(
            kernels=kernels,
            overlap_expert_communication=parallel.overlap_expert_communication,
            num_layers=num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.full.num_heads,
            num_query_groups=model.full.num_kv_groups,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.dense_hidden_size,
            num_moe_experts=model.moe.num_experts,
            moe_router_topk=model.moe.top_k,
            moe_ffn_hidden_size=model.moe.expert_hidden_size,
            moe_token_dispatcher_type=parallel.dispatcher,
            moe_flex_dispatcher_backend="deepep",
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            # Read by Megatron's own router only, but without it a top-k of 1 is refused.
            moe_router_pre_softmax=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            sequence_parallel=parallel.tensor > 1,
            # Losses arrive already divided by global token counts: the schedule must not divide again.
            calculate_per_token_loss=True,
            # Values are set by steptron.model.init, as a function of each tensor's name.
            use_cpu_initialization=True,
            perform_initialization=False,
            deterministic_mode=deterministic,
            # Fused paths that need CUDA extensions; each would be silently different or absent on CPU.
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            moe_permute_fusion=False,
            # Every stage's output is needed until its backward: no pseudo-deallocation.
            deallocate_pipeline_outputs=False,
            # Gloo matches batched point-to-point messages between two ranks by order, which swaps
            # both directions at two stages; posting them one by one is right everywhere.
            batch_p2p_comm=False,
        )
