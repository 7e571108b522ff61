"""One transformer layer: pre-norm attention and feed-forward around the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch.utils.checkpoint import checkpoint

from steptron.model.attention import SelfAttention
from steptron.model.balance import BalanceContext
from steptron.model.ffn import DenseFfn
from steptron.model.layer_spec import LayerSpec, MoeFfnSpec
from steptron.model.moe import MoeFfn
from steptron.model.norm import ZeroCentredRMSNorm, build_norm
from steptron.model.sequence import AttentionContext
from steptron.model.transformer_config import StepConfig
from steptron_kernels.recompute import not_kept, recomputed


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
            MoeFfn(spec.ffn, spec.index, hidden, config, groups, spec.recompute)
            if isinstance(spec.ffn, MoeFfnSpec)
            else DenseFfn(spec.ffn, hidden, config, groups.tp, spec.recompute)
        )

    def forward(self, x: torch.Tensor, sequence: AttentionContext, balance: BalanceContext | None) -> torch.Tensor:
        """[S, B, H] -> [S, B, H]"""
        attended = self._attend(x, sequence)
        if self.spec.recompute.isdisjoint({"ffn", "norm"}):
            # The residual sum and its norm in one pass over memory; the same numbers as one after the other.
            x, h = self.config.kernels.add_rms_norm(x, attended, self.ffn_norm.weight, self.ffn_norm.eps)
            return x + self._ffn(h, balance)
        x = x + attended
        return x + self._feed_forward(x, balance)

    def _attend(self, x: torch.Tensor, sequence: AttentionContext) -> torch.Tensor:
        if "attention" in self.spec.recompute:
            return _run_again(lambda x: self.attention(self.attention_norm(x), sequence), x)
        h = self._normalise(x, self.attention_norm)
        with not_kept(h):
            return self.attention(h, sequence)

    def _feed_forward(self, x: torch.Tensor, balance: BalanceContext | None) -> torch.Tensor:
        if "ffn" in self.spec.recompute:
            return _run_again(lambda x: self._ffn(self.ffn_norm(x), balance), x)
        h = self._normalise(x, self.ffn_norm)
        with not_kept(h):
            return self._ffn(h, balance)

    def _ffn(self, h: torch.Tensor, balance: BalanceContext | None) -> torch.Tensor:
        return self.ffn(h, balance) if isinstance(self.ffn, MoeFfn) else self.ffn(h)

    def _normalise(self, x: torch.Tensor, norm: ZeroCentredRMSNorm) -> torch.Tensor:
        def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return self.config.kernels.rms_norm(x, weight, norm.eps)

        h: torch.Tensor = recomputed(rms_norm, x, norm.weight, when="norm" in self.spec.recompute)
        return h


def _run_again(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function(x)``, of which x alone is kept. The second run repeats collectives, in the same order on all ranks.

    Nothing in a layer is random, so that no state of a generator needs to be kept.
    """
    y: torch.Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return y
