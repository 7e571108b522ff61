"""One transformer layer: pre-norm attention and feed-forward around the residual stream."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from steptron.model.attention import SelfAttention
from steptron.model.balance import BalanceContext
from steptron.model.ffn import DenseFfn
from steptron.model.layer_spec import LayerSpec, MoeFfnSpec
from steptron.model.moe import MoeFfn
from steptron.model.norm import build_norm
from steptron.model.sequence import SequenceContext
from steptron.model.transformer_config import StepConfig


class TransformerLayer(MegatronModule):
    """x <- x + Attention(norm(x)); x <- x + FFN(norm(x)), all as its LayerSpec says."""

    def __init__(self, spec: LayerSpec, config: StepConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.spec = spec
        hidden = spec.hidden_size
        self.attention_norm = build_norm(hidden, spec.norm_eps, config)
        self.attention = SelfAttention(spec.attention, hidden, spec.norm_eps, config, groups.tp)
        self.ffn_norm = build_norm(hidden, spec.norm_eps, config)
        self.ffn: MoeFfn | DenseFfn = (
            MoeFfn(spec.ffn, spec.index, hidden, config, groups)
            if isinstance(spec.ffn, MoeFfnSpec)
            else DenseFfn(spec.ffn, hidden, config, groups.tp)
        )

    def forward(self, x: torch.Tensor, sequence: SequenceContext, balance: BalanceContext | None) -> torch.Tensor:
        """[S, B, H] -> [S, B, H]"""
        x, h = self.config.kernels.add_rms_norm(
            x, self.attention(self.attention_norm(x), sequence), self.ffn_norm.weight, self.ffn_norm.eps
        )
        return x + (self.ffn(h, balance) if isinstance(self.ffn, MoeFfn) else self.ffn(h))
