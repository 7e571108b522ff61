"""Attention of one layer over a micro-batch: what the context says, as arguments of the attention operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from steptron.model.sequence import SequenceContext
from steptron_kernels.attention.plain import attention as plain_attention


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

    Args:
        q_SBnD: [S, B, n, D] queries, after norm and RoPE.
        k_SBgD: [S, B, g, D] keys, after norm and RoPE.
        v_SBgD: [S, B, g, D] values.
        context: documents and shard of the micro-batch.
        window: visible keys, the token itself included; None means all.
        sink_n: [n] sink logits; None means no sink.
        attention: the version of :func:`steptron_kernels.attention.plain.attention` to call.

    Returns:
        [S, B, n, D] in the dtype of the queries.

    Raises:
        ValueError: shapes do not fit together, or ``window`` is below 1.
        NotImplementedError: the context holds a part of the sequence only.
    """
    if not context.shard.is_whole:
        raise NotImplementedError(
            f"attention needs whole sequences, but this process holds the token ranges {context.shard.ranges} "
            f"of {context.shard.length}: context parallelism is not supported yet (set parallel.context to 1)"
        )
    S, B = q_SBnD.shape[:2]
    if context.documents_BS is not None and context.documents_BS.shape != (B, S):
        raise ValueError(f"context.documents_BS has shape {tuple(context.documents_BS.shape)}, expected {(B, S)}")
    documents_BS = context.once("attention: documents", lambda: _several_documents(context.documents_BS))
    if documents_BS is None:
        return attention(q_SBnD, k_SBgD, v_SBgD, window=window, sink_n=sink_n)
    first_keys = None
    if window is None or window >= S:
        first_keys = context.once("attention: first keys", lambda: _first_keys(documents_BS))
    return attention(
        q_SBnD, k_SBgD, v_SBgD, window=window, sink_n=sink_n, documents_BT=documents_BS, first_keys=first_keys
    )


def _several_documents(documents_BS: Tensor | None) -> Tensor | None:
    """The documents where some row has several (or padding), otherwise None."""
    if documents_BS is None or bool((documents_BS == documents_BS[:, :1]).all()):
        return None
    return documents_BS


def _first_keys(documents_BS: Tensor) -> list[int]:
    """For each place, the first place that any row's document there, or a later one, begins at."""
    places_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0))
    starts_BS = torch.where(begins_BS, places_S, 0).cummax(dim=1).values
    first_keys: list[int] = starts_BS.amin(dim=0).tolist()
    return first_keys
