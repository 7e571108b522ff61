"""How tokens reach their experts and come back.

Two dispatchers behind one small interface: ``LocalDispatcher`` when a process holds all experts
(one sort), ``ExpertParallelDispatcher`` over Megatron-Core's all-to-all, all-gather and flex (DeepEP)
dispatchers otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)

from steptron.model.router import Routing
from steptron.model.transformer_config import StepConfig
from steptron_kernels.experts.plan import RowPlan


class Dispatched(NamedTuple):
    """Token copies at their experts.

    Attributes:
        x: [N, H], rows sorted by local expert; with a plan [T, H], tokens.
        tokens_per_expert_E: int64 [E], rows of each local expert.
        weights: routing weights, by row [N]; with a plan by token [T, K].
        plan: which token each row is a copy of, where the experts gather them.
        combine: what is left to do with the experts' output to have the sum over each token's experts, [T, H].
    """

    x: torch.Tensor
    tokens_per_expert_E: torch.Tensor
    weights: torch.Tensor
    plan: RowPlan | None
    combine: Callable[[torch.Tensor], torch.Tensor]


class Dispatcher(Protocol):
    """Sends tokens [T, H] to their experts."""

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched: ...


class LocalDispatcher:
    """All experts are here: one sort of the selections; the experts gather the tokens and add up themselves."""

    def __init__(self, num_experts: int, config: StepConfig) -> None:
        self._num_experts = num_experts
        self._row_plan = config.kernels.row_plan

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched:
        plan, tokens_per_expert_E = self._row_plan(routing.experts_TK, self._num_experts)
        return Dispatched(h_TH, tokens_per_expert_E, routing.weights_TK, plan, lambda y_TH: y_TH)


class ExpertParallelDispatcher:
    """Megatron-Core's dispatchers, fed from compact routing.

    DeepEP sends a token once to each rank that holds any of its experts, and adds up there before it sends back;
    it finds a token's experts by the largest weights, so that a weight of exactly 0 gets no gradient.

    Raises:
        ImportError: the dispatcher is flex, and DeepEP is not installed.
    """

    def __init__(self, num_experts: int, config: StepConfig, groups: ProcessGroupCollection) -> None:
        num_local = num_experts // groups.ep.size()
        first = groups.ep.rank() * num_local
        kinds: dict[str, type[MoETokenDispatcher]] = {
            "alltoall": MoEAlltoAllTokenDispatcher,
            "allgather": MoEAllGatherTokenDispatcher,
            "flex": MoEFlexTokenDispatcher,
        }
        self._engine = kinds[config.moe_token_dispatcher_type](
            num_local, list(range(first, first + num_local)), config=config, pg_collection=groups
        )

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched:
        weights_TE = torch.zeros_like(routing.scores_TE).scatter(1, routing.experts_TK, routing.weights_TK)
        selected_TE = torch.zeros_like(routing.scores_TE, dtype=torch.bool).scatter(1, routing.experts_TK, True)
        x, weights = self._engine.dispatch_preprocess(h_TH, selected_TE, weights_TE)
        x, weights = self._engine.token_dispatch(x, weights)
        x_NH, tokens_per_expert_E, weights_N = self._engine.dispatch_postprocess(x, weights)
        return Dispatched(x_NH.contiguous(), tokens_per_expert_E, weights_N, None, self._combine)

    def _combine(self, y_NH: torch.Tensor) -> torch.Tensor:
        y = self._engine.combine_preprocess(y_NH)
        return self._engine.combine_postprocess(self._engine.token_combine(y))
