"""The router: sigmoid scores in fp32, a selection bias, renormalised weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from steptron.model.layer_spec import MoeFfnSpec


@dataclass(frozen=True)
class Routing:
    """Where T tokens go, K experts each, of E.

    Attributes:
        experts_TK: int64 [T, K], selected experts.
        weights_TK: fp32 [T, K], renormalised and scaled; differentiable.
        scores_TE: fp32 [T, E], sigmoid scores without the selection bias; differentiable.
    """

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    scores_TE: torch.Tensor

    def tokens_per_expert(self, valid_T: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [E]: how often each expert was selected, by the tokens that ``valid_T`` keeps (all by default)."""
        selections = self.experts_TK.flatten()
        kept = torch.ones_like(selections) if valid_T is None else valid_T.long().repeat_interleave(self.top_k)
        # Not bincount, which reads its result's size back from a GPU.
        return selections.new_zeros(self.scores_TE.shape[1]).scatter_add_(0, selections, kept)

    @property
    def top_k(self) -> int:
        return self.experts_TK.shape[1]


class Router(MegatronModule):
    """Selects experts by score plus bias and weighs them by score alone.

    p = sigmoid(W h) in fp32; S = top-k(p + b); w_e = scale * p_e / (sum over S of p + 1e-20). The
    bias (``bias``, an fp32 buffer moved by the balance rule once per step) never enters the weights
    and gets no gradient. Released model, ``Step3p5`` MoE gate; loss-free balancing as in
    arXiv 2408.15664.
    """

    bias: torch.Tensor

    def __init__(self, spec: MoeFfnSpec, hidden_size: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.spec = spec
        self.weight = torch.nn.Parameter(torch.empty(spec.num_experts, hidden_size, dtype=config.params_dtype))
        self.register_buffer("bias", torch.zeros(spec.num_experts, dtype=torch.float32))

    def forward(self, h_TH: torch.Tensor) -> Routing:
        """Routes tokens; at least fp32 whatever the dtype of the residual stream."""
        dtype = torch.promote_types(h_TH.dtype, torch.float32)
        scores_TE = F.linear(h_TH.to(dtype), self.weight.to(dtype)).sigmoid()
        with torch.no_grad():
            experts_TK = torch.topk(scores_TE + self.bias, self.spec.top_k, dim=-1, sorted=False).indices
        selected_TK = scores_TE.gather(1, experts_TK)
        weights_TK = selected_TK * (self.spec.scaling_factor / (selected_TK.sum(dim=-1, keepdim=True) + 1e-20))
        return Routing(experts_TK, weights_TK, scores_TE)
