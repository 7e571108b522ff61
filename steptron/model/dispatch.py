"""How tokens reach their experts and come back.

Two dispatchers behind one small interface: ``LocalDispatcher`` when a process holds all experts
(one sort, gathers both ways), ``ExpertParallelDispatcher`` over Megatron-Core's all-to-all and
all-gather dispatchers otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from steptron.model.router import Routing


class Dispatched(NamedTuple):
    """Token copies at their experts.

    Attributes:
        x_NH: [N, H], rows sorted by local expert.
        tokens_per_expert_E: int64 [E], rows of each local expert.
        weights_N: [N], routing weight of each row.
        combine: sums the outputs of each token's experts, [N, H] -> [T, H].
    """

    x_NH: torch.Tensor
    tokens_per_expert_E: torch.Tensor
    weights_N: torch.Tensor
    combine: Callable[[torch.Tensor], torch.Tensor]


class Dispatcher(Protocol):
    """Sends tokens [T, H] to their experts."""

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched: ...


class _Scatter(torch.autograd.Function):
    """x[token of row]; backward sums a token's K rows (a gather-sum, not an atomic add)."""

    @staticmethod
    def forward(ctx, h_TH: torch.Tensor, token_N: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(row_TK)
        return h_TH.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NH: torch.Tensor):  # type: ignore[no-untyped-def]
        (row_TK,) = ctx.saved_tensors
        return F.embedding_bag(row_TK, grad_NH.contiguous(), mode="sum"), None, None


class _Gather(torch.autograd.Function):
    """Sum of a token's K rows; backward copies its gradient to each of them."""

    @staticmethod
    def forward(ctx, y_NH: torch.Tensor, token_N: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(token_N)
        return F.embedding_bag(row_TK, y_NH, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH: torch.Tensor):  # type: ignore[no-untyped-def]
        (token_N,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_N), None, None


class LocalDispatcher:
    """All experts are here: one stable sort of the selections, then gathers."""

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched:
        num_tokens, top_k = routing.experts_TK.shape
        selections = routing.experts_TK.flatten()
        order_N = torch.argsort(selections, stable=True)
        row_N = torch.empty_like(order_N)
        row_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
        token_N = order_N // top_k
        row_TK = row_N.view(num_tokens, top_k)
        return Dispatched(
            _Scatter.apply(h_TH, token_N, row_TK),
            routing.tokens_per_expert(),
            routing.weights_TK.flatten().index_select(0, order_N),
            lambda y_NH: _Gather.apply(y_NH, token_N, row_TK),
        )


class ExpertParallelDispatcher:
    """Megatron-Core's dispatchers, fed from compact routing."""

    def __init__(self, num_experts: int, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        num_local = num_experts // groups.ep.size()
        first = groups.ep.rank() * num_local
        kinds = {"alltoall": MoEAlltoAllTokenDispatcher, "allgather": MoEAllGatherTokenDispatcher}
        self._engine = kinds[config.moe_token_dispatcher_type](
            num_local, list(range(first, first + num_local)), config=config, pg_collection=groups
        )

    def dispatch(self, h_TH: torch.Tensor, routing: Routing) -> Dispatched:
        weights_TE = torch.zeros_like(routing.scores_TE).scatter(1, routing.experts_TK, routing.weights_TK)
        selected_TE = torch.zeros_like(routing.scores_TE, dtype=torch.bool).scatter(1, routing.experts_TK, True)
        x, weights = self._engine.dispatch_preprocess(h_TH, selected_TE, weights_TE)
        x, weights = self._engine.token_dispatch(x, weights)
        x_NH, tokens_per_expert_E, weights_N = self._engine.dispatch_postprocess(x, weights)
        return Dispatched(x_NH.contiguous(), tokens_per_expert_E, weights_N, self._combine)

    def _combine(self, y_NH: torch.Tensor) -> torch.Tensor:
        y = self._engine.combine_preprocess(y_NH)
        return self._engine.combine_postprocess(self._engine.token_combine(y))
