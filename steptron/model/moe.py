"""The mixture-of-experts feed-forward layer: router, dispatch, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from steptron.config.schema import RecomputePart
from steptron.model.balance import AttachLoss, BalanceContext
from steptron.model.dispatch import Dispatched, Dispatcher, ExpertParallelDispatcher, LocalDispatcher
from steptron.model.experts import GroupedExperts
from steptron.model.ffn import DenseFfn
from steptron.model.layer_spec import MoeFfnSpec
from steptron.model.moe_watch import MoeWatch
from steptron.model.router import Router, Routing
from steptron.model.transformer_config import StepConfig
from steptron_kernels.recompute import not_kept, recomputed


class MoeFfn(MegatronModule):
    """sum over selected experts of w_e * Expert_e(h), plus Shared(h), unscaled and ungated."""

    def __init__(
        self,
        spec: MoeFfnSpec,
        layer_index: int,
        hidden_size: int,
        config: StepConfig,
        groups: ProcessGroupCollection,
        recompute: frozenset[RecomputePart] = frozenset(),
    ) -> None:
        super().__init__(config)
        self.layer_index = layer_index
        self.router = Router(spec, hidden_size, config)
        self.experts = GroupedExperts(spec, hidden_size, spec.num_experts // groups.ep.size(), config, recompute)
        self.shared = DenseFfn(spec.shared, hidden_size, config, groups.tp, recompute)
        # With one rank nothing is sent: the experts gather the rows, and again where asked to.
        self._dispatch_again = "moe_permutation" in recompute and groups.ep.size() > 1
        self._side_stream: torch.cuda.Stream | None = None
        self.dispatcher: Dispatcher = (
            LocalDispatcher(spec.num_experts, config)
            if groups.ep.size() == 1
            else ExpertParallelDispatcher(spec.num_experts, config, groups)
        )

    def forward(self, h: torch.Tensor, balance: BalanceContext | None) -> torch.Tensor:
        """[S, B, H] -> [S, B, H]; with ``balance``, routing is recorded and the EP loss attached."""
        h_TH = h.reshape(-1, h.shape[-1])
        routing = self.router(h_TH)
        watch = None
        if balance is not None:
            watch = balance.watch
            loss = balance.observe(self.layer_index, routing)
            if balance.coefficient:
                h_TH = AttachLoss.apply(h_TH, loss)
        if self.config.overlap_expert_communication:
            output_TH = self._overlapped(h_TH, routing, watch)
        else:
            output_TH = self._routed(h_TH, routing, watch) + self.shared(h_TH)
        return output_TH.view_as(h)

    def _routed(self, h_TH: torch.Tensor, routing: Routing, watch: MoeWatch | None) -> torch.Tensor:
        """Sum over each token's experts, [T, H]."""

        def dispatch(h_TH: torch.Tensor, weights_TK: torch.Tensor) -> Dispatched:
            return self.dispatcher.dispatch(h_TH, replace(routing, weights_TK=weights_TK))

        x, tokens_per_expert_E, weights, plan, combine = recomputed(
            dispatch, h_TH, routing.weights_TK, when=self._dispatch_again
        )
        look = None if watch is None else watch.experts(self.layer_index, self.experts, routing.experts_TK.numel())
        with not_kept(x):
            y = self.experts(x, tokens_per_expert_E, weights, plan, rows=look)
        return combine(y)

    def _overlapped(self, h_TH: torch.Tensor, routing: Routing, watch: MoeWatch | None) -> torch.Tensor:
        """The whole sum, the shared expert on a stream of its own while tokens travel.

        It is started first: sending waits for the number of rows, and the host with it. The backward, which goes
        the other way round, runs each operation on the stream of its forward.
        """
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(h_TH.device)
        main, side = torch.cuda.current_stream(h_TH.device), self._side_stream
        side.wait_stream(main)
        h_TH.record_stream(side)
        with torch.cuda.stream(side):
            shared_TH = self.shared(h_TH)
        routed_TH = self._routed(h_TH, routing, watch)
        main.wait_stream(side)
        shared_TH.record_stream(main)
        return routed_TH + shared_TH
