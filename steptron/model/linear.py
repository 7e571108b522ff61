"""Megatron-Core's tensor-parallel linear layers, as this model uses them: no bias, values set afterwards."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


def leave_uninitialised(weight: torch.Tensor) -> torch.Tensor:
    """The init method handed to Megatron's layers, whose values ``steptron.model.init`` sets."""
    return weight


def column_parallel(
    input_size: int,
    output_size: int,
    config: TransformerConfig,
    tp_group: torch.distributed.ProcessGroup | None,
    gather_output: bool = False,
) -> ColumnParallelLinear:
    """A matrix [output, input] whose rows are split over tensor-parallel ranks."""
    return ColumnParallelLinear(
        input_size,
        output_size,
        config=config,
        init_method=leave_uninitialised,
        bias=False,
        gather_output=gather_output,
        tp_group=tp_group,
    )


def row_parallel(
    input_size: int, output_size: int, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup | None
) -> RowParallelLinear:
    """A matrix [output, input] whose columns are split; its input already is."""
    return RowParallelLinear(
        input_size,
        output_size,
        config=config,
        init_method=leave_uninitialised,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=tp_group,
    )
