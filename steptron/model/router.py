"""The router as a module, and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule

from steptron.model.layer_spec import MoeFfnSpec
from steptron.model.transformer_config import StepConfig


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
    """Selects experts by score plus bias and weighs them by score alone (see ``steptron_kernels.route.plain``).

    ``bias`` is an fp32 buffer that the balance rule moves once per step.

    Args:
        spec: the layer's experts.
        hidden_size: H.
        config: Megatron-Core's configuration, with the operations.
    """

    bias: torch.Tensor

    def __init__(self, spec: MoeFfnSpec, hidden_size: int, config: StepConfig) -> None:
        super().__init__(config)
        self.spec = spec
        self.weight = torch.nn.Parameter(torch.empty(spec.num_experts, hidden_size, dtype=config.params_dtype))
        self.register_buffer("bias", torch.zeros(spec.num_experts, dtype=torch.float32))

    def forward(self, h_TH: torch.Tensor) -> Routing:
        """Routes tokens; at least fp32 whatever the dtype of the residual stream."""
        return Routing(
            *self.config.kernels.route(h_TH, self.weight, self.bias, self.spec.top_k, self.spec.scaling_factor)
        )
