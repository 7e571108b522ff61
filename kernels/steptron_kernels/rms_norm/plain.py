"""Zero-centred RMSNorm as torch operations.

``y = cast(x32 * rsqrt(mean(x32^2) + eps) * (1 + w32))`` over the last dimension: the stored weight is gamma - 1, so
weight decay pulls gamma to one (Step-3.5-Flash's released model). Statistics and products are float32 (float64 for
float64 inputs), rounded once at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension.

    Args:
        x: [..., N].
        weight: [N], gamma - 1.
        eps: added to the mean square.

    Returns:
        [..., N] in the dtype of ``x``.
    """
    y: Tensor = _RmsNorm.apply(x, weight, eps)
    return y


class _RmsNorm(torch.autograd.Function):
    """Keeps x and the inverse root mean square r alone.

    With g = dy (1 + w) and N the size: ``dx = r g - x r^3 <g, x> / N`` and ``dw = sum dy x r``. Both
    sums read one buffer, ``dy x``, which then holds dx; on CPU this is several times faster than
    autograd through ``torch.nn.functional.rms_norm``, and as exact.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x32 = x.to(dtype)
        buffer = x32 * x32
        scale = buffer.sum(dim=-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
        y = torch.mul(x32, scale, out=buffer).mul_(weight.to(dtype) + 1.0)
        ctx.save_for_backward(x, weight, scale)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        size = weight.shape[0]
        x32, dy32, gamma = x.to(scale.dtype), dy.to(scale.dtype), weight.to(scale.dtype) + 1.0
        buffer = torch.mul(dy32, x32, out=torch.empty_like(x32, memory_format=torch.contiguous_format))
        g_dot_x = torch.mv(buffer.view(-1, size), gamma).view(scale.shape)
        d_weight = buffer.mul_(scale).view(-1, size).sum(dim=0)
        x_factor = scale.pow(3).mul_(g_dot_x).div_(-size)
        dx = torch.mul(dy32, gamma, out=buffer).mul_(scale).addcmul_(x32, x_factor)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None
