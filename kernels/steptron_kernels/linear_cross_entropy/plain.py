"""Cross entropy of a linear head as torch operations, without the full logits in memory.

The rows of the output matrix may be shared by the ranks of a group (vocabulary parallelism); what these exchange
are two numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 22
"""Logits alive at once (16 MiB in fp32, which fits a CPU's cache), unless the vocabulary is so large
that fewer rows than ``_FEWEST_ROWS`` would be left: a product needs those to be fast."""
_FEWEST_ROWS = {"cpu": 128, "cuda": 1024}
# The name from torch 2.13 on, and the one before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        h_TH: torch.Tensor,
        w_VH: torch.Tensor,
        labels_T: torch.Tensor,
        mask_T: torch.Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
    ) -> torch.Tensor:
        padded_VH, first = w_VH, 0
        if group is not None:
            first = group.rank() * w_VH.shape[0]
            # Rows that fill the last rank up are no tokens: they take no part in the softmax.
            w_VH = w_VH[: vocab_size - first]
        dtype = torch.promote_types(h_TH.dtype, torch.float32)
        needs_h, needs_w = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(h_TH) if needs_h else None
        grad_padded = torch.zeros(padded_VH.shape, dtype=dtype, device=w_VH.device) if needs_w else None
        grad_w = None if grad_padded is None else grad_padded[: w_VH.shape[0]]
        total = torch.zeros((), dtype=dtype, device=h_TH.device)
        # By the padded size: all ranks cut the tokens alike, or their exchanges would not match.
        rows = max(_CHUNK_ELEMENTS // padded_VH.shape[0], _FEWEST_ROWS[h_TH.device.type])
        for start in range(0, h_TH.shape[0], rows):
            chunk = slice(start, start + rows)
            h, mask = h_TH[chunk], mask_T[chunk].unsqueeze(1)
            labels, here = labels_T[chunk].unsqueeze(1), mask
            if group is not None:
                labels = labels - first
                here = mask & (labels >= 0) & (labels < w_VH.shape[0])
            labels = labels.masked_fill(~here, 0)
            logits = (h @ w_VH.t()).to(dtype)
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            target = logits.gather(1, labels)
            if group is not None:
                normaliser, target = _over_ranks(normaliser, target.masked_fill(~here, 0.0), group)
            total += (normaliser - target).masked_fill(~mask, 0.0).sum()
            if grad_h is None and grad_w is None:
                continue
            # An infinite normaliser makes the softmax of tokens that do not count zero.
            grad_logits = logits.sub_(normaliser.masked_fill(~mask, torch.inf)).exp_()
            grad_logits.scatter_add_(1, labels, -here.to(dtype))
            grad_logits = grad_logits.to(h.dtype)
            if grad_h is not None:
                torch.mm(grad_logits, w_VH, out=grad_h[chunk])
            if grad_w is not None:
                if grad_w.dtype is h.dtype:
                    grad_w.addmm_(grad_logits.t(), h)
                else:
                    grad_w += grad_logits.t() @ h
        ctx.save_for_backward(grad_h, grad_padded)
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
            None,
            None,
        )


def _over_ranks(
    normaliser_T1: torch.Tensor, target_T1: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normaliser over all logits and the target's logit, from those of each rank; the same bits on every rank.

    Args:
        normaliser_T1: [T, 1] logarithm of the sum of the exponentials of this rank's logits.
        target_T1: [T, 1] the target's logit on the rank that has it, 0 on the others.
        group: the ranks.
    """
    own = torch.stack([normaliser_T1, target_T1])
    parts_R2T1 = own.new_empty(group.size(), *own.shape)
    _all_gather(parts_R2T1.view(-1, *own.shape[1:]), own, group=group)
    # One summand is not 0, so that the sum is exact.
    return torch.logsumexp(parts_R2T1[:, 0], dim=0), parts_R2T1[:, 1].sum(dim=0)


def linear_cross_entropy(
    h_TH: torch.Tensor,
    w_VH: torch.Tensor,
    labels_T: torch.Tensor,
    mask_T: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Sum over the masked-in tokens of the cross entropy of logits h W^T.

    Logits, their softmax and the sum are fp32 (or the inputs' dtype, if wider). Gradients are
    computed in the forward pass, chunk by chunk, and scaled in the backward one.

    With a group of R > 1 ranks each rank holds equally many rows of the matrix, in rank order; rows at the end that
    only fill it up are left out, and their gradient is 0. Per chunk of tokens
    one all-gather of two numbers per token makes the sum whole, with the same bits on every rank. The gradient of
    h is then this rank's part; the whole one is the sum over the group.

    Args:
        h_TH: [T, H] normed hidden states, the same on all ranks of the group.
        w_VH: [V, H] output matrix; with a group this rank's rows, [V / R, H].
        labels_T: int64 [T], rows of the whole matrix, the same on all ranks; not read where the token does not count.
        mask_T: bool [T], tokens that count, the same on all ranks.
        group: ranks that share the matrix; this process alone when None.
        vocab_size: rows of the whole matrix without those that fill it up, with a group; all of them when None. Every
            rank must hold at least one.

    Returns:
        Scalar, the whole sum on every rank.

    Raises:
        RuntimeError: a label of a token that counts is not in the vocabulary (on CUDA: a device-side assertion).
    """
    if group is not None and group.size() == 1:
        group = None
    if group is not None:
        vocab_size = vocab_size or group.size() * w_VH.shape[0]
        # Without the group's other rows nothing else would notice; a group's ranks see the same labels.
        fits_T = (labels_T >= 0) & (labels_T < vocab_size)
        torch._assert_async((fits_T | ~mask_T).all(), f"a label is not among the {vocab_size} rows of the vocabulary")
    if not torch.is_grad_enabled():
        # A Function's needs_input_grad ignores the grad mode: evaluation must not pay for gradients.
        h_TH, w_VH = h_TH.detach(), w_VH.detach()
    return _LinearCrossEntropy.apply(h_TH, w_VH, labels_T, mask_T, group, vocab_size or w_VH.shape[0])
