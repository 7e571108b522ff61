"""Routed experts: their weights."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from steptron.config.schema import RecomputePart
from steptron.model.layer_spec import MoeFfnSpec
from steptron.model.transformer_config import StepConfig
from steptron_kernels.experts.plan import RowPlan


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
    ) -> torch.Tensor:
        """Weighted expert outputs (:func:`steptron_kernels.experts.plain.experts`).

        Args:
            x: [N, H] rows sorted by expert; with a plan [T, H], tokens.
            tokens_per_expert_E: int64 [E].
            weights: fp32 [N]; with a plan [T, K].
            plan: which token each row is a copy of.

        Returns:
            [N, H]; with a plan [T, H], summed over each token's experts.
        """
        return self._experts(
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
        )
