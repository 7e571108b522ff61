"""Dense SwiGLU feed-forward layer: leading layers, MTP depths and the shared expert."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from steptron.config.schema import RecomputePart
from steptron.model.layer_spec import DenseFfnSpec
from steptron.model.linear import column_parallel, row_parallel
from steptron.model.transformer_config import StepConfig
from steptron_kernels.recompute import not_kept, recomputed


class DenseFfn(MegatronModule):
    """down(swiglu(gate_up(x))); the rows of ``gate_up_projection`` are gate, then up."""

    def __init__(
        self,
        spec: DenseFfnSpec,
        hidden_size: int,
        config: StepConfig,
        tp_group: torch.distributed.ProcessGroup,
        recompute: frozenset[RecomputePart] = frozenset(),
    ) -> None:
        super().__init__(config)
        self.spec = spec
        self._recompute_activation = "activation" in recompute
        self.gate_up_projection = column_parallel(hidden_size, 2 * spec.hidden_size, config, tp_group)
        self.down_projection = row_parallel(spec.hidden_size, hidden_size, config, tp_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        gate_up, _ = self.gate_up_projection(x)
        hidden = recomputed(self._swiglu, gate_up, when=self._recompute_activation)
        with not_kept(hidden):
            output, _ = self.down_projection(hidden)
        return output

    def _swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.config.kernels.swiglu(gate_up, self.spec.clamp, self.spec.clamp_after_silu)
