"""Attention of a few new tokens of each of many sequences to what is cached of theirs, as torch operations.

The mathematics is that of :mod:`steptron_kernels.attention.plain`. Keys and values of a sequence lie in rows of a
pool that follow each other in no order; a table says which. There is no backward: this is for inference.

Shape suffixes: R sequences, Q new tokens of each, n query heads, g key-value groups, D head size, N rows of the pool,
L rows of a table.

Bytes moved: (2 g D rows seen) per sequence read once, and with these operations copied once more.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cached_attention(
    q_RQnD: Tensor,
    k_NgD: Tensor,
    v_NgD: Tensor,
    table_RL: Tensor,
    first_R: Tensor,
    places_RQ: Tensor,
    window: int | None,
    sink_n: Tensor | None = None,
) -> Tensor:
    """Attention over cached keys and values.

    The query at place i of its sequence sees the keys at places j with ``0 <= i - j`` and, with a window,
    ``i - j < window``. Scores are scaled by 1/sqrt(D); scores and softmax are float32 (float64 for float64 inputs).

    Args:
        q_RQnD: queries.
        k_NgD: keys of all sequences, those of the queries' own places included.
        v_NgD: values.
        table_RL: int64, the row of the pool for each place of a sequence from ``first_R`` on. Columns beyond the
            sequence's last place may name any row.
        first_R: int64, the place of each sequence that its table begins with.
        places_RQ: int64, places of the queries.
        window: visible keys, the token itself included; None means all.
        sink_n: sink logits; None means no sink.

    Returns:
        [R, Q, n, D] in the dtype of the queries.
    """
    R, Q, n, D = q_RQnD.shape
    g, L = k_NgD.shape[1], table_RL.shape[1]
    dtype = torch.promote_types(q_RQnD.dtype, torch.float32)
    k_RgLD, v_RgLD = (x_NgD[table_RL].to(dtype).transpose(1, 2) for x_NgD in (k_NgD, v_NgD))
    # The heads of a group fold into the query axis: one product per group.
    q_RgXD = q_RQnD.to(dtype).unflatten(2, (g, n // g)).permute(0, 2, 1, 3, 4).reshape(R, g, Q * (n // g), D)
    distance_RQL = places_RQ[:, :, None] - (first_R[:, None] + torch.arange(L, device=first_R.device))[:, None, :]
    visible_RQL = distance_RQL >= 0
    if window is not None:
        visible_RQL &= distance_RQL < window
    bias_RQL = torch.zeros(visible_RQL.shape, dtype=dtype, device=q_RQnD.device).masked_fill_(~visible_RQL, -math.inf)
    scores_RgXL = (q_RgXD @ k_RgLD.transpose(2, 3)) / math.sqrt(D)
    scores_RgXL = (scores_RgXL.unflatten(2, (Q, n // g)) + bias_RQL[:, None, :, None, :]).flatten(2, 3)
    if sink_n is not None:
        sink_gX = sink_n.to(dtype).view(g, 1, n // g).expand(g, Q, n // g).reshape(g, -1)
        scores_RgXL = torch.cat([scores_RgXL, sink_gX[None, :, :, None].expand(R, -1, -1, 1)], dim=-1)
    weights_RgXL = torch.softmax(scores_RgXL, dim=-1)[..., :L]
    o_RgXD = weights_RgXL @ v_RgLD
    return o_RgXD.unflatten(2, (Q, n // g)).permute(0, 2, 1, 3, 4).reshape(R, Q, n, D).to(q_RQnD.dtype)
