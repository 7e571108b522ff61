"""The mixture-of-experts feed-forward layer: router, dispatch, routed experts, shared expert."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from steptron.model.balance import AttachLoss, BalanceContext
from steptron.model.dispatch import Dispatcher, ExpertParallelDispatcher, LocalDispatcher
from steptron.model.experts import GroupedExperts
from steptron.model.ffn import DenseFfn
from steptron.model.layer_spec import MoeFfnSpec
from steptron.model.router import Router
from steptron.model.transformer_config import StepConfig


class MoeFfn(MegatronModule):
    """sum over selected experts of w_e * Expert_e(h), plus Shared(h), unscaled and ungated."""

    def __init__(
        self,
        spec: MoeFfnSpec,
        layer_index: int,
        hidden_size: int,
        config: StepConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.layer_index = layer_index
        self.router = Router(spec, hidden_size, config)
        self.experts = GroupedExperts(spec, hidden_size, spec.num_experts // groups.ep.size(), config)
        self.shared = DenseFfn(spec.shared, hidden_size, config, groups.tp)
        self.dispatcher: Dispatcher = (
            LocalDispatcher(spec.num_experts, config)
            if groups.ep.size() == 1
            else ExpertParallelDispatcher(spec.num_experts, config, groups)
        )

    def forward(self, h: torch.Tensor, balance: BalanceContext | None) -> torch.Tensor:
        """[S, B, H] -> [S, B, H]; with ``balance``, routing is recorded and the EP loss attached."""
        h_TH = h.reshape(-1, h.shape[-1])
        routing = self.router(h_TH)
        if balance is not None:
            loss = balance.observe(self.layer_index, routing)
            if balance.coefficient:
                h_TH = AttachLoss.apply(h_TH, loss)
        x, tokens_per_expert_E, weights, plan, combine = self.dispatcher.dispatch(h_TH, routing)
        routed_TH = combine(self.experts(x, tokens_per_expert_E, weights, plan))
        return (routed_TH + self.shared(h_TH)).view_as(h)
