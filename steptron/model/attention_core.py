"""Attention of one layer over a micro-batch: what the context says, as arguments of the attention operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from steptron.parallel.key_exchange import exchange_keys, plan_exchange
from steptron.parallel.sequence_shard import SequenceShard
from steptron_kernels.attention.plain import attention as plain_attention

if TYPE_CHECKING:
    from steptron.model.sequence import SequenceContext


def attend(
    q_SBnD: Tensor,
    k_SBgD: Tensor,
    v_SBgD: Tensor,
    context: SequenceContext,
    window: int | None,
    sink_n: Tensor | None = None,
    attention: Callable[..., Tensor] = plain_attention,
) -> Tensor:
    """Attention of one layer over the tokens of a micro-batch.

    Token i sees token j of its own document where ``0 <= i - j`` and, with a window,
    ``i - j < window``; i and j are places in the row, not RoPE positions. Padding tokens see
    each other. Heads, scores and sink are as ``attention`` defines them.

    Where the process holds a part of each sequence, the keys and values of other ranks come from the context
    group, and each range of the shard is one call of ``attention``: a collective, in forward and backward.

    Args:
        q_SBnD: [S, B, n, D] queries of the shard's tokens, after norm and RoPE.
        k_SBgD: [S, B, g, D] keys, after norm and RoPE.
        v_SBgD: [S, B, g, D] values.
        context: documents and shard of the micro-batch.
        window: visible keys, the token itself included; None means all.
        sink_n: [n] sink logits; None means no sink.
        attention: the version of :func:`steptron_kernels.attention.plain.attention` to call.

    Returns:
        [S, B, n, D] in the dtype of the queries.

    Raises:
        ValueError: shapes do not fit together or do not fit the context, ``window`` is below 1, or the context's
            shard is not the one that this rank of its group should hold.
    """
    shard = context.shard
    S, B = q_SBnD.shape[:2]
    if shard.size != S:
        raise ValueError(f"queries have {S} tokens, but context.shard holds {shard.size}")
    documents_BS = context.documents_BS
    if documents_BS is not None and documents_BS.shape != (B, shard.length):
        raise ValueError(
            f"context.documents_BS has shape {tuple(documents_BS.shape)}, expected {(B, shard.length)}: whole rows"
        )
    if shard.is_whole:
        return _attend_range(q_SBnD, k_SBgD, v_SBgD, context, S, window, sink_n, attention)
    group = context.context_group
    if group is None:
        raise ValueError(
            f"context.shard holds the token ranges {shard.ranges} of {shard.length} only, "
            "but context.context_group is None: nobody to get the other keys from"
        )
    rank, size = group.rank(), group.size()
    if shard != SequenceShard.balanced(shard.length, rank, size):
        raise ValueError(f"context.shard {shard.ranges} is not SequenceShard.balanced of rank {rank} of {size}")
    keys = exchange_keys(k_SBgD, v_SBgD, plan_exchange(shard.length, size, rank, window), group)
    queries = q_SBnD.split([stop - start for start, stop in shard.ranges])
    outputs = [
        _attend_range(q, k, v, context, stop, window, sink_n, attention)
        for q, (k, v), (_, stop) in zip(queries, keys, shard.ranges, strict=True)
    ]
    return torch.cat(outputs)


def _attend_range(
    q_SBnD: Tensor,
    k_TBgD: Tensor,
    v_TBgD: Tensor,
    context: SequenceContext,
    stop: int,
    window: int | None,
    sink_n: Tensor | None,
    attention: Callable[..., Tensor],
) -> Tensor:
    """Attention of the successive queries before place ``stop`` of the row to the keys of the T places before it."""
    T = len(k_TBgD)
    start = stop - T
    query_offset = T - len(q_SBnD)
    documents_BT = context.once(
        ("attention: documents", start, stop), lambda: _several_documents(context.documents_BS, start, stop)
    )
    if documents_BT is None:
        return attention(q_SBnD, k_TBgD, v_TBgD, window=window, sink_n=sink_n, query_offset=query_offset)
    first_keys = None
    if window is None or window >= T:
        first_keys = context.once(("attention: first keys", start, stop), lambda: _first_keys(documents_BT))
    return attention(
        q_SBnD,
        k_TBgD,
        v_TBgD,
        window=window,
        sink_n=sink_n,
        documents_BT=documents_BT,
        query_offset=query_offset,
        first_keys=first_keys,
    )


def _several_documents(documents_BS: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The documents of some places where some row has several there (or padding), otherwise None."""
    if documents_BS is None:
        return None
    documents_BT = documents_BS[:, start:stop].contiguous()
    return None if bool((documents_BT == documents_BT[:, :1]).all()) else documents_BT


def _first_keys(documents_BT: Tensor) -> list[int]:
    """For each place, the first place that any row's document there, or a later one, begins at."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    starts_BT = torch.where(begins_BT, places_T, 0).cummax(dim=1).values
    first_keys: list[int] = starts_BT.amin(dim=0).tolist()
    return first_keys
