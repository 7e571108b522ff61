"""Zero-centred RMSNorm in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`steptron_kernels.rms_norm.plain.rms_norm`, for float32."""
    y: Tensor = _RmsNorm.apply(x.contiguous(), weight.contiguous(), eps)
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.steptron_kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, d_weight = torch.ops.steptron_kernels.rms_norm_backward(dy.contiguous(), *ctx.saved_tensors)
        return dx, d_weight, None
