"""The router in C++, float32 products included, whatever other products are rounded to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def route(h_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`steptron_kernels.route.plain.route`, for float32.

    A token's experts come in descending order of score plus bias, NaN first; of equal ones the lower index comes
    first, also for the last place.
    """
    experts_TK, weights_TK, scores_TE = _Route.apply(h_TH, weight_EH, bias_E, top_k, scaling)
    return experts_TK, weights_TK, scores_TE


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, top_k: int, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        h_TH, weight_EH = h_TH if h_TH.stride(1) == 1 else h_TH.contiguous(), weight_EH.contiguous()
        experts_TK, weights_TK, scores_TE = torch.ops.steptron_kernels.route(
            h_TH, weight_EH, bias_E.contiguous(), top_k, scaling
        )
        ctx.mark_non_differentiable(experts_TK)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_TH, weight_EH, experts_TK, scores_TE)
        ctx.scaling = scaling
        return experts_TK, weights_TK, scores_TE

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, d_weights_TK: Tensor | None, d_scores_TE: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        needs_h, needs_w = ctx.needs_input_grad[:2]
        dh_TH, dw_EH = torch.ops.steptron_kernels.route_backward(
            None if d_weights_TK is None else d_weights_TK.contiguous(),
            None if d_scores_TE is None else d_scores_TE.contiguous(),
            *ctx.saved_tensors,
            ctx.scaling,
            needs_h,
            needs_w,
        )
        return dh_TH if needs_h else None, dw_EH if needs_w else None, None, None, None
