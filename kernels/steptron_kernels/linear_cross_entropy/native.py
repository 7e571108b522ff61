"""Cross entropy of a linear head in C++: float32, or bfloat16 operands with float32 logits, softmax and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.packed_weights import PackedWeights


class LinearCrossEntropy:
    """As :func:`steptron_kernels.linear_cross_entropy.plain.linear_cross_entropy`, for float32 tensors.

    Tokens that do not count cost nothing. A logit that is infinite or NaN makes the loss NaN. A result can be
    differentiated once: the backward pass scales the gradients of the forward pass where they lie.

    Args:
        packed: where packed weights are kept, which also says what the operands are rounded to.
    """

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed

    def __call__(self, h_TH: Tensor, w_VH: Tensor, labels_T: Tensor, mask_T: Tensor) -> Tensor:
        loss: Tensor = _LinearCrossEntropy.apply(
            h_TH, w_VH, labels_T.contiguous(), mask_T.contiguous(), self._packed, torch.is_grad_enabled()
        )
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TH: Tensor, w_VH: Tensor, labels_T: Tensor, mask_T: Tensor, packed: PackedWeights, training: bool
    ) -> Tensor:
        # needs_input_grad ignores the grad mode: evaluation must not pay for gradients.
        needs_h, needs_w = (needed and training for needed in ctx.needs_input_grad[:2])
        loss: Tensor
        loss, grad_h, grad_w = torch.ops.steptron_kernels.linear_cross_entropy(
            h_TH if h_TH.stride(1) == 1 else h_TH.contiguous(),
            w_VH.contiguous(),
            packed.transposed(w_VH),
            # In float32 the weight is the right operand of the gradient's product as it is.
            packed.plain(w_VH) if needs_h and packed.in_bf16 else None,
            labels_T,
            mask_T,
            needs_h,
            needs_w,
        )
        ctx.gradients = (grad_h if needs_h else None, grad_w if needs_w else None)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy was differentiated a second time: compute it again instead")
        grad_h, grad_w = ctx.gradients
        ctx.gradients = None
        return (
            None if grad_h is None else grad_h.mul_(grad),
            None if grad_w is None else grad_w.mul_(grad),
            None,
            None,
            None,
            None,
        )
