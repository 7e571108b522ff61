"""Routed experts: their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from steptron.config.schema import RecomputePart
from steptron.model.layer_spec import MoeFfnSpec
from steptron.model.transformer_config import StepConfig
from steptron_kernels.experts.plan import RowPlan


@dataclass(frozen=True)
class ExpertRows:
    """Looks at the rows of a forward pass of experts.

    Attributes:
        look: gets the rows [N, H] that the experts are applied to where it wants them, int64 [E] rows of each expert,
            and fp32 [N, 2] squared norms of each row's intermediate and output
            (:func:`steptron_kernels.experts.plain.experts`).
        wants_inputs: whether it does.
    """

    look: Callable[[Tensor | None, Tensor, Tensor], None]
    wants_inputs: bool


class GroupedExperts(MegatronModule):
    """The routed experts that this process holds, stacked: gate_up [E, 2F, H], down [E, H, F]."""

    def __init__(
        self,
        spec: MoeFfnSpec,
        hidden_size: int,
        num_local_experts: int,
        config: StepConfig,
        recompute: frozenset[RecomputePart] = frozenset(),
    ) -> None:
        super().__init__(config)
        self.spec = spec
        self._recompute = recompute
        self._experts = config.kernels.experts
        width = spec.expert_hidden_size
        dtype = config.params_dtype
        self.gate_up_projection = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * width, hidden_size, dtype=dtype)
        )
        self.down_projection = torch.nn.Parameter(torch.empty(num_local_experts, hidden_size, width, dtype=dtype))

    def forward(
        self,
        x: torch.Tensor,
        tokens_per_expert_E: torch.Tensor,
        weights: torch.Tensor,
        plan: RowPlan | None,
        rows: ExpertRows | None = None,
    ) -> torch.Tensor:
        """Weighted expert outputs (:func:`steptron_kernels.experts.plain.experts`).

        Args:
            x: [N, H] rows sorted by expert; with a plan [T, H], tokens.
            tokens_per_expert_E: int64 [E].
            weights: fp32 [N]; with a plan [T, K].
            plan: which token each row is a copy of.
            rows: looks at the rows; None: nothing does.

        Returns:
            [N, H]; with a plan [T, H], summed over each token's experts.
        """
        squared_norms_N2 = None if rows is None else x.new_empty(weights.numel(), 2, dtype=torch.float32)
        y: Tensor = self._experts(
            x,
            self.gate_up_projection,
            self.down_projection,
            tokens_per_expert_E,
            weights,
            plan,
            self.spec.expert_clamp,
            self.spec.clamp_after_silu,
            recompute_rows="moe_permutation" in self._recompute,
            recompute_product="activation" in self._recompute,
            squared_norms=squared_norms_N2,
        )
        if rows is not None and squared_norms_N2 is not None:
            x_NH = None
            if rows.wants_inputs:
                x_NH = x if plan is None else x.index_select(0, plan.token_N)
            rows.look(x_NH, tokens_per_expert_E, squared_norms_N2)
        return y
