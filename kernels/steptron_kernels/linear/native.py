"""y = x W^T in C++: float32, or bfloat16 operands with float32 sums and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.packed_weights import PackedWeights


class Linear:
    """As :func:`steptron_kernels.linear.plain.linear`, for float32 tensors.

    Args:
        packed: where packed weights are kept, which also says what the operands are rounded to.
    """

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"x {tuple(x.shape)} does not fit the weight {tuple(weight.shape)}: [..., K] and [N, K]")
        x_MK = x.reshape(-1, x.shape[-1])
        y: Tensor = _Linear.apply(x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous(), weight, self._packed)
        return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: Tensor, packed: PackedWeights) -> Tensor:
        ctx.save_for_backward(x_MK, weight)
        ctx.packed = packed
        y: Tensor = torch.ops.steptron_kernels.linear(x_MK, packed.transposed(weight), *reversed(weight.shape))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, weight = ctx.saved_tensors
        packed: PackedWeights = ctx.packed
        dy_MN = dy_MN.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            right = packed.plain(weight)
            if packed.in_bf16:
                dx = torch.ops.steptron_kernels.linear(dy_MN, right, *weight.shape)
            else:
                dx = torch.ops.steptron_kernels.linear_plain(dy_MN, right)
        if ctx.needs_input_grad[1]:
            dw = torch.ops.steptron_kernels.linear_weight_gradient(dy_MN, x_MK, packed.in_bf16)
        return dx, dw, None
