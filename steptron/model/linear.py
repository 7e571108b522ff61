"""Linear layers, as this model uses them: no bias, values set afterwards; Megatron-Core's where they are cut."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule

from steptron.model.transformer_config import StepConfig


def leave_uninitialised(weight: torch.Tensor) -> torch.Tensor:
    """The init method handed to Megatron's layers, whose values ``steptron.model.init`` sets."""
    return weight


class _ColumnParallelLinear(ColumnParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # With one tensor-parallel rank nothing is left of Megatron's product but the product.
        if self.tp_group.size() == 1:
            return self.config.kernels.linear(input, weight)
        return super()._forward_impl(input, weight, *args, **kwargs)


class _RowParallelLinear(RowParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return self.config.kernels.linear(input, weight)
        return super()._forward_impl(input, weight, *args, **kwargs)


class Linear(MegatronModule):
    """A matrix [output, input] that every tensor-parallel rank holds whole and applies to its own tokens."""

    def __init__(self, input_size: int, output_size: int, config: StepConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., input] -> [..., output]"""
        y: torch.Tensor = self.config.kernels.linear(x, self.weight)
        return y


def column_parallel(
    input_size: int, output_size: int, config: StepConfig, tp_group: torch.distributed.ProcessGroup | None
) -> ColumnParallelLinear:
    """A matrix [output, input] whose rows are split over tensor-parallel ranks."""
    return _ColumnParallelLinear(
        input_size,
        output_size,
        config=config,
        init_method=leave_uninitialised,
        bias=False,
        gather_output=False,
        tp_group=tp_group,
    )


def row_parallel(
    input_size: int, output_size: int, config: StepConfig, tp_group: torch.distributed.ProcessGroup | None
) -> RowParallelLinear:
    """A matrix [output, input] whose columns are split; its input already is."""
    return _RowParallelLinear(
        input_size,
        output_size,
        config=config,
        init_method=leave_uninitialised,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=tp_group,
    )
