"""Queries, keys, values and gates out of one fused projection, as torch operations."""

from __future__ import annotations

from torch import Tensor

from steptron_kernels.qk_norm_rope.rope import apply_rope
from steptron_kernels.rms_norm.plain import rms_norm


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
    """Splits the projection, normalises every query and key head, then rotates them.

    Args:
        projected_SBP: [S, B, P = (n + 2 g) D (+ n if gated)]: queries, keys, values (and gates) one after the other.
        query_weight_D: [D], gamma - 1 of the queries' norm, shared by the heads.
        key_weight_D: [D], gamma - 1 of the keys' norm.
        cos_SB1R: [S, B, 1, R] cosines; dimension m is rotated with m + R, dimensions from 2R on pass.
        sin_SB1R: [S, B, 1, R] sines.
        num_heads: n.
        num_groups: g.
        eps: added to the mean square of a head.
        gated: whether the projection ends in one gate logit per head.

    Returns:
        Queries [S, B, n, D] and keys [S, B, g, D], contiguous; values [S, B, g, D] and gate logits [S, B, n]
        (None if not gated), which may be views of the projection. No gradient reaches the tables.

    Raises:
        ValueError: P is not the sum of the parts, or the tables rotate more dimensions than a head has.
    """
    sizes = part_sizes(projected_SBP, query_weight_D.shape[0], num_heads, num_groups, gated)
    q, k, v, *gate = projected_SBP.split(sizes, dim=-1)
    q_SBnD, k_SBgD, v_SBgD = (x.unflatten(-1, (-1, query_weight_D.shape[0])) for x in (q, k, v))
    q_SBnD = apply_rope(rms_norm(q_SBnD, query_weight_D, eps), cos_SB1R, sin_SB1R)
    k_SBgD = apply_rope(rms_norm(k_SBgD, key_weight_D, eps), cos_SB1R, sin_SB1R)
    return q_SBnD, k_SBgD, v_SBgD, gate[0] if gated else None


def part_sizes(projected_SBP: Tensor, head_dim: int, num_heads: int, num_groups: int, gated: bool) -> list[int]:
    """Widths of the queries, keys, values (and gates).

    Raises:
        ValueError: they do not add up to the projection's last dimension.
    """
    sizes = [num_heads * head_dim, num_groups * head_dim, num_groups * head_dim, *([num_heads] if gated else [])]
    if sum(sizes) != projected_SBP.shape[-1]:
        raise ValueError(
            f"the projection has {projected_SBP.shape[-1]} columns, but {num_heads} heads and {num_groups} groups of "
            f"{head_dim} {'with' if gated else 'without'} gates need {sum(sizes)}"
        )
    return sizes
