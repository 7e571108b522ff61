"""Queries, keys, values and gates out of one fused projection in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.qk_norm_rope.plain import part_sizes
from steptron_kernels.qk_norm_rope.rope import check_rotation


def qk_norm_rope(
    projected_SBP: Tensor,
    query_weight_D: Tensor,
    key_weight_D: Tensor,
    cos_SB1R: Tensor,
    sin_SB1R: Tensor,
    num_heads: int,
    num_groups: int,
    eps: float,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As :func:`steptron_kernels.qk_norm_rope.plain.qk_norm_rope`, for float32."""
    head_dim = query_weight_D.shape[0]
    check_rotation(cos_SB1R, head_dim)
    sizes = part_sizes(projected_SBP, head_dim, num_heads, num_groups, gated)
    q, k, v, gate = _QkNormRope.apply(
        projected_SBP.contiguous(),
        query_weight_D.contiguous(),
        key_weight_D.contiguous(),
        _rows(cos_SB1R),
        _rows(sin_SB1R),
        sizes,
        eps,
    )
    return q, k, v, gate


def _rows(table_SB1R: Tensor) -> Tensor:
    return table_SB1R if table_SB1R.stride(-1) == 1 else table_SB1R.contiguous()


class _QkNormRope(torch.autograd.Function):
    """The values and gates are views of the projection; the backward writes one gradient of the whole projection."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        sizes: list[int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        head_dim = query_weight.shape[0]
        q, k, scale = torch.ops.steptron_kernels.qk_norm_rope(
            projected, query_weight, key_weight, cos, sin, sizes[0] // head_dim, sizes[1] // head_dim, eps
        )
        ctx.save_for_backward(projected, query_weight, key_weight, cos, sin, scale)
        _, _, v, *gate = projected.detach().split(sizes, dim=-1)
        return q, k, v.unflatten(-1, (-1, head_dim)), gate[0] if gate else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor, d_gate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        d_projected, d_query_weight, d_key_weight = torch.ops.steptron_kernels.qk_norm_rope_backward(
            d_q.contiguous(),
            d_k.contiguous(),
            d_v.contiguous(),
            None if d_gate is None else d_gate.contiguous(),
            *ctx.saved_tensors,
        )
        return d_projected, d_query_weight, d_key_weight, None, None, None, None
