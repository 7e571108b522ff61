"""Dense SwiGLU feed-forward layer: leading layers, MTP depths and the shared expert."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from steptron.model.activation import clamped_swiglu
from steptron.model.init import leave_uninitialised
from steptron.model.layer_spec import DenseFfnSpec


class DenseFfn(MegatronModule):
    """down(swiglu(gate_up(x))); the rows of ``gate_up_projection`` are gate, then up."""

    def __init__(
        self, spec: DenseFfnSpec, hidden_size: int, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__(config)
        self.spec = spec
        self.gate_up_projection = ColumnParallelLinear(
            hidden_size,
            2 * spec.hidden_size,
            config=config,
            init_method=leave_uninitialised,
            bias=False,
            gather_output=False,
            tp_group=tp_group,
        )
        self.down_projection = RowParallelLinear(
            spec.hidden_size,
            hidden_size,
            config=config,
            init_method=leave_uninitialised,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        gate_up, _ = self.gate_up_projection(x)
        output, _ = self.down_projection(clamped_swiglu(gate_up, self.spec.clamp, self.spec.clamp_after_silu))
        return output
