"""Routed experts in C++: float32, or bfloat16 operands with float32 sums and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.experts.plan import RowPlan
from steptron_kernels.packed_weights import PackedWeights


def row_plan(experts_TK: Tensor, num_experts: int) -> tuple[RowPlan, Tensor]:
    """As :func:`steptron_kernels.experts.plain.row_plan`."""
    slot_N, rows_TK, tokens_per_expert_E = torch.ops.steptron_kernels.row_plan(experts_TK.contiguous(), num_experts)
    return RowPlan(slot_N, rows_TK), tokens_per_expert_E


class Experts:
    """As :func:`steptron_kernels.experts.plain.experts`, for float32 tensors.

    Args:
        packed: where packed weights are kept, which also says what the operands are rounded to.
    """

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed

    def __call__(
        self,
        x: Tensor,
        gate_up_EMH: Tensor,
        down_EHF: Tensor,
        tokens_per_expert_E: Tensor,
        weights: Tensor,
        plan: RowPlan | None = None,
        limit: float | None = None,
        clamp_after_silu: bool = True,
        *,
        recompute_rows: bool = False,
        recompute_product: bool = False,
        squared_norms: Tensor | None = None,
    ) -> Tensor:
        """Rows and products are never kept, but made again piece by piece: what asks for that changes nothing."""
        experts, hidden, width = down_EHF.shape
        if gate_up_EMH.shape != (experts, 2 * width, hidden) or x.shape[-1] != hidden:
            raise ValueError(
                f"x {tuple(x.shape)}, gate and up {tuple(gate_up_EMH.shape)} and down {tuple(down_EHF.shape)} do not "
                "fit together: [..., H], [E, 2F, H] and [E, H, F]"
            )
        if tokens_per_expert_E.shape != (experts,):
            raise ValueError(
                f"tokens_per_expert {tuple(tokens_per_expert_E.shape)}: expected one for each of {experts} experts"
            )
        y: Tensor = _Experts.apply(
            x if x.stride(-1) == 1 else x.contiguous(),
            gate_up_EMH,
            down_EHF,
            tokens_per_expert_E,
            weights,
            plan,
            limit,
            clamp_after_silu,
            squared_norms,
            self._packed,
        )
        return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        x,
        gate_up_EMH,
        down_EHF,
        tokens_per_expert_E,
        weights,
        plan,
        limit,
        clamp_after_silu,
        squared_norms,
        packed,
    ) -> Tensor:
        slot_N, rows_TK = (None, None) if plan is None else (plan.slot_N, plan.rows_TK)
        width = down_EHF.shape[-1]
        y, projected = torch.ops.steptron_kernels.experts(
            x,
            slot_N,
            rows_TK,
            packed.transposed(gate_up_EMH),
            packed.transposed(down_EHF),
            tokens_per_expert_E,
            weights.contiguous(),
            width,
            limit,
            clamp_after_silu,
            squared_norms,
        )
        ctx.save_for_backward(x, gate_up_EMH, down_EHF, tokens_per_expert_E, weights, projected, slot_N, rows_TK)
        ctx.options = (width, limit, clamp_after_silu)
        ctx.packed = packed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up_EMH, down_EHF, tokens_per_expert_E, weights, projected, slot_N, rows_TK = ctx.saved_tensors
        dx, d_gate_up, d_down, d_weights = torch.ops.steptron_kernels.experts_backward(
            dy.contiguous(),
            x,
            slot_N,
            rows_TK,
            ctx.packed.plain(gate_up_EMH),
            ctx.packed.plain(down_EHF),
            tokens_per_expert_E,
            weights.contiguous(),
            projected,
            *ctx.options,
        )
        return dx, d_gate_up, d_down, None, d_weights, None, None, None, None, None
