"""Residual sum and its zero-centred RMSNorm in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`steptron_kernels.add_rms_norm.plain.add_rms_norm`, for float32."""
    total, y = _AddRmsNorm.apply(x.contiguous(), delta.contiguous(), weight.contiguous(), eps)
    return total, y


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, scale = torch.ops.steptron_kernels.add_rms_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_total: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if dy is None:  # nobody used the norm
            return d_total, d_total, None, None
        total, weight, scale = ctx.saved_tensors
        if d_total is not None:
            d_total = d_total.contiguous()
        dx, d_weight = torch.ops.steptron_kernels.add_rms_norm_backward(d_total, dy.contiguous(), total, weight, scale)
        return dx, dx, d_weight, None
