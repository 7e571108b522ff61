"""Routed experts as torch operations: grouped matrix products, no padding to the largest, no loop per expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.experts.plan import RowPlan
from steptron_kernels.recompute import not_kept, recomputed
from steptron_kernels.swiglu.plain import swiglu


def row_plan(experts_TK: Tensor, num_experts: int) -> tuple[RowPlan, Tensor]:
    """Sorts selections by expert (stable), once for a layer's dispatch and combination.

    Args:
        experts_TK: int64 [T, K], the experts of each token.
        num_experts: E.

    Returns:
        The plan, and int64 [E]: the rows of each expert.
    """
    selections = experts_TK.flatten()
    slot_N = torch.argsort(selections, stable=True)
    row_N = torch.empty_like(slot_N)
    row_N[slot_N] = torch.arange(slot_N.numel(), device=slot_N.device)
    # Not bincount, which reads its result's size back from a GPU.
    tokens_per_expert_E = selections.new_zeros(num_experts).scatter_add_(0, selections, torch.ones_like(selections))
    return RowPlan(slot_N, row_N.view_as(experts_TK)), tokens_per_expert_E


def experts(
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
    """Outputs of the experts, each times its routing weight.

    The routing weight multiplies the intermediate activations: the same product as weighting the output, over F
    instead of H columns.

    Args:
        x: [N, H], rows sorted by expert; with a plan [T, H], tokens.
        gate_up_EMH: [E, 2F, H]: gate, then up.
        down_EHF: [E, H, F].
        tokens_per_expert_E: int64 [E], rows of each expert; zeros are allowed.
        weights: fp32 [N], by row; with a plan [T, K], by token.
        plan: which token each row is a copy of; None: the rows are given as they are.
        limit: clamp of the activations, None for none.
        clamp_after_silu: where the gate is clamped (:func:`steptron_kernels.swiglu.plain.swiglu`).
        recompute_rows: gather the rows that a plan says again in the backward, instead of keeping them.
        recompute_product: do so with the weighted activations, the input of the second product.
        squared_norms: fp32 [N, 2], gets, if given, of each row ||h||^2 of the activations and ||y||^2 of the output,
            both before the routing weight (computed from the weighted ones, divided by w^2; -1 where w is 0).

    Returns:
        [N, H]; with a plan [T, H], summed over each token's experts.
    """
    if plan is None:
        x_NH, weights_N = x, weights
    else:
        token_N = plan.token_N
        rows_TK = plan.rows_TK
        x_NH = recomputed(lambda x_TH: _Scatter.apply(x_TH, token_N, rows_TK), x, when=recompute_rows)
        weights_N = weights.flatten().index_select(0, plan.slot_N)
    with not_kept(x_NH):
        gate_up = grouped_linear(x_NH, gate_up_EMH, tokens_per_expert_E)

    def product(gate_up: Tensor, weights_N: Tensor) -> Tensor:
        return (swiglu(gate_up, limit, clamp_after_silu) * weights_N.unsqueeze(-1)).to(gate_up.dtype)

    hidden = recomputed(product, gate_up, weights_N, when=recompute_product)
    if squared_norms is not None:
        _squared_norms(hidden, weights_N, squared_norms[:, 0])
    with not_kept(hidden):
        y_NH = grouped_linear(hidden, down_EHF, tokens_per_expert_E)
    if squared_norms is not None:
        _squared_norms(y_NH, weights_N, squared_norms[:, 1])
    if plan is None:
        return y_NH
    y_TH: Tensor = _Gather.apply(y_NH, token_N, plan.rows_TK)
    return y_TH


@torch.no_grad()
def _squared_norms(rows: Tensor, weights_N: Tensor, out_N: Tensor) -> None:
    norms_N = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))
    out_N.copy_((norms_N / weights_N).square().masked_fill(weights_N == 0, -1.0))


class _Scatter(torch.autograd.Function):
    """x[token of row]; backward sums a token's K rows (a gather-sum, not an atomic add)."""

    @staticmethod
    def forward(ctx, h_TH: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(row_TK)
        return h_TH.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NH: Tensor):  # type: ignore[no-untyped-def]
        (row_TK,) = ctx.saved_tensors
        return F.embedding_bag(row_TK, grad_NH.contiguous(), mode="sum"), None, None


class _Gather(torch.autograd.Function):
    """Sum of a token's K rows; backward copies its gradient to each of them."""

    @staticmethod
    def forward(ctx, y_NH: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(token_N)
        return F.embedding_bag(row_TK, y_NH, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH: Tensor):  # type: ignore[no-untyped-def]
        (token_N,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_N), None, None


def _grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    if a.dtype is torch.float64:
        return _grouped_mm_by_loop(a, b, ends_E)
    if a.dtype is torch.bfloat16 and a.device.type == "cpu":
        # torch builds a new oneDNN primitive for every group size it has not seen in bfloat16, which
        # takes longer than the product. The same operands in float32 give the same sums.
        return F.grouped_mm(a.float(), b.float(), offs=ends_E).to(a.dtype)
    return F.grouped_mm(a, b, offs=ends_E)


def _grouped_mm_by_loop(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """float64, which torch's grouped_mm does not have: groups are rows of ``a``, or the summed dimension of both."""
    ends = ends_E.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if b.dim() == 3:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(groups, b, strict=True)])
    return torch.stack([a[:, rows] @ b[rows] for rows in groups])


class GroupedLinear(torch.autograd.Function):
    """y[rows of group e] = x[rows of group e] @ W_e^T, on torch's grouped_mm.

    An own Function because grouped_mm's backward rejects gradients that are not contiguous, and
    leaves rows past the last offset (and, without any row, the whole weight gradient) undefined.
    """

    @staticmethod
    def forward(ctx, x_NK: Tensor, w_EMK: Tensor, ends_E: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_NK, w_EMK, ends_E)
        if x_NK.shape[0] == 0:
            return x_NK.new_empty(0, w_EMK.shape[1])
        return _grouped_mm(x_NK, w_EMK.transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NM: Tensor):  # type: ignore[no-untyped-def]
        x_NK, w_EMK, ends_E = ctx.saved_tensors
        if x_NK.shape[0] == 0:
            return torch.zeros_like(x_NK), torch.zeros_like(w_EMK), None
        grad_NM = grad_NM.contiguous()
        grad_x = _grouped_mm(grad_NM, w_EMK, ends_E) if ctx.needs_input_grad[0] else None
        grad_w = _grouped_mm(grad_NM.t(), x_NK, ends_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def grouped_linear(x_NK: Tensor, w_EMK: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Multiplies consecutive groups of rows by their expert's matrix.

    Args:
        x_NK: [N, K] rows sorted by expert, contiguous; fp32, bf16 or fp16.
        w_EMK: [E, M, K]; K and M rows must be multiples of 16 bytes.
        tokens_per_expert_E: int64 [E], summing to N; zeros are allowed.

    Returns:
        [N, M]
    """
    ends_E = tokens_per_expert_E.cumsum(0).to(device=x_NK.device, dtype=torch.int32)
    return GroupedLinear.apply(x_NK, w_EMK, ends_E)
