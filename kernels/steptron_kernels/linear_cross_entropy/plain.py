"""Cross entropy of a linear head as torch operations, without the full logits in memory."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 22
"""Logits alive at once (16 MiB in fp32, which fits a CPU's cache), unless the vocabulary is so large
that fewer rows than ``_FEWEST_ROWS`` would be left: a product needs those to be fast."""
_FEWEST_ROWS = {"cpu": 128, "cuda": 1024}


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, h_TH: torch.Tensor, w_VH: torch.Tensor, labels_T: torch.Tensor, mask_T: torch.Tensor
    ) -> torch.Tensor:
        dtype = torch.promote_types(h_TH.dtype, torch.float32)
        needs_h, needs_w = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(h_TH) if needs_h else None
        grad_w = torch.zeros(w_VH.shape, dtype=dtype, device=w_VH.device) if needs_w else None
        total = torch.zeros((), dtype=dtype, device=h_TH.device)
        rows = max(_CHUNK_ELEMENTS // w_VH.shape[0], _FEWEST_ROWS[h_TH.device.type])
        for start in range(0, h_TH.shape[0], rows):
            chunk = slice(start, start + rows)
            h, mask = h_TH[chunk], mask_T[chunk].unsqueeze(1)
            labels = labels_T[chunk].unsqueeze(1).masked_fill(~mask, 0)
            logits = (h @ w_VH.t()).to(dtype)
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (normaliser - logits.gather(1, labels)).masked_fill(~mask, 0.0).sum()
            if grad_h is None and grad_w is None:
                continue
            # An infinite normaliser makes the softmax of tokens that do not count zero.
            grad_logits = logits.sub_(normaliser.masked_fill(~mask, torch.inf)).exp_()
            grad_logits.scatter_add_(1, labels, -mask.to(dtype))
            grad_logits = grad_logits.to(h.dtype)
            if grad_h is not None:
                torch.mm(grad_logits, w_VH, out=grad_h[chunk])
            if grad_w is not None:
                if grad_w.dtype is h.dtype:
                    grad_w.addmm_(grad_logits.t(), h)
                else:
                    grad_w += grad_logits.t() @ h
        ctx.save_for_backward(grad_h, grad_w)
        ctx.weight_dtype = w_VH.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        grad_h, grad_w = ctx.saved_tensors
        return (
            # Not rounded to bf16 first: that would scale every gradient by the same wrong factor.
            None if grad_h is None else grad_h * grad,
            None if grad_w is None else (grad_w * grad).to(ctx.weight_dtype),
            None,
            None,
        )


def linear_cross_entropy(
    h_TH: torch.Tensor, w_VH: torch.Tensor, labels_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    """Sum over the masked-in tokens of the cross entropy of logits h W^T.

    Logits, their softmax and the sum are fp32 (or the inputs' dtype, if wider). Gradients are
    computed in the forward pass, chunk by chunk, and scaled in the backward one.

    Args:
        h_TH: [T, H] normed hidden states.
        w_VH: [V, H] output matrix.
        labels_T: int64 [T]; not read where the token does not count.
        mask_T: bool [T], tokens that count.

    Returns:
        Scalar.
    """
    if not torch.is_grad_enabled():
        # A Function's needs_input_grad ignores the grad mode: evaluation must not pay for gradients.
        h_TH, w_VH = h_TH.detach(), w_VH.detach()
    return _LinearCrossEntropy.apply(h_TH, w_VH, labels_T, mask_T)
