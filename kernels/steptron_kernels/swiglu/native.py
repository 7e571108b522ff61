"""SwiGLU with the release's activation clipping in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_up: Tensor, limit: float | None, clamp_after_silu: bool = True) -> Tensor:
    """As :func:`steptron_kernels.swiglu.plain.swiglu`, for float32; the limit must not be negative."""
    y: Tensor = _Swiglu.apply(gate_up.contiguous(), limit, clamp_after_silu)
    return y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float | None, clamp_after_silu: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.options = (limit, clamp_after_silu)
        y: Tensor = torch.ops.steptron_kernels.swiglu(gate_up, limit, clamp_after_silu)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return torch.ops.steptron_kernels.swiglu_backward(dy.contiguous(), gate_up, *ctx.options), None, None
