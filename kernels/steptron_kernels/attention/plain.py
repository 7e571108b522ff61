"""Causal and sliding-window attention over grouped queries as torch operations, exact, with a backward of its own.

Without a window every earlier key of a document is seen; with one, ``window`` keys, the token
itself included (facts of the release, 2.3). Work proceeds in chunks: a chunk of queries against
just the keys it can see, with the query heads of a group folded into the query axis, so that it is
a few large batched products. A window costs S x W (:class:`_SlidingPlan`), none half of S x S
(:class:`_CausalPlan`); neither ever holds more than one chunk of scores. Only q, k, v and o are
kept for the backward, which recomputes the probabilities.

:func:`dense_masked_attention` states the same mathematics without any of this.

Shape suffixes: S query tokens, T key tokens, B sequences, n query heads, g key-value groups, r = n/g
heads per group, D head size; inside a chunk b batches, R query rows (token-major, then head), K keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_SCORES = 1 << 19
"""Scores held at once: the fastest size on CPU, where the chunk and its gradient stay in the cache."""


def attention(
    q_SBnD: Tensor,
    k_TBgD: Tensor,
    v_TBgD: Tensor,
    *,
    window: int | None,
    sink_n: Tensor | None = None,
    documents_BT: Tensor | None = None,
    query_offset: int = 0,
    first_keys: list[int] | None = None,
) -> Tensor:
    """Attention of S queries to T = query_offset + S keys; the query of row i has the key of row query_offset + i.

    A query at key row i sees the key of row j where ``0 <= i - j``, with a window ``i - j < window``, and with
    documents both have the same number. Query head h reads group ``h // (n / g)``. Scores are scaled by
    1/sqrt(D); scores and softmax are float32 (float64 for float64 inputs). The keys before ``query_offset``
    come from elsewhere (another shard, a cache).

    Args:
        q_SBnD: [S, B, n, D] queries.
        k_TBgD: [T, B, g, D] keys.
        v_TBgD: [T, B, g, D] values.
        window: visible keys, the token itself included; None means all.
        sink_n: [n] sink logits b: ``o = sum_j e^{s_j} v_j / (e^b + sum_j e^{s_j})``; None means no sink.
        documents_BT: [B, T] document numbers of the keys (the last S are the queries'); None means one document.
        query_offset: keys before the first query's own.
        first_keys: T numbers: no query from key row t on, in any sequence, sees a key before ``first_keys[t]``.
            Only spares work on full layers.

    Returns:
        [S, B, n, D] in the dtype of the queries.

    Raises:
        ValueError: shapes do not fit together, or ``window`` is below 1.
    """
    check_shapes(q_SBnD, k_TBgD, v_TBgD, window, sink_n, documents_BT, query_offset)
    T = k_TBgD.shape[0]
    full = window is None or window >= T
    if full and documents_BT is None and sink_n is None and query_offset == 0 and q_SBnD.is_cuda:
        return _fused_causal_attention(q_SBnD, k_TBgD, v_TBgD)
    shape = _Shape(q_SBnD, k_TBgD)
    plan: _Plan
    if window is None or window >= T:
        plan = _CausalPlan(shape, query_offset, documents_BT, first_keys)
    else:
        plan = _SlidingPlan(shape, query_offset, documents_BT, window)
    output: Tensor = _ChunkedAttention.apply(q_SBnD, k_TBgD, v_TBgD, sink_n, plan)
    return output


def visible_keys(
    num_queries: int,
    num_keys: int,
    window: int | None = None,
    documents_BT: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The mask in one piece: bool [B or 1, S, T], true where a query sees a key.

    The last S of the T keys are the queries' own.
    """
    rows_T = torch.arange(num_keys, device=device if documents_BT is None else documents_BT.device)
    distance_ST = rows_T[num_keys - num_queries :, None] - rows_T
    visible_ST = distance_ST >= 0
    if window is not None:
        visible_ST &= distance_ST < window
    if documents_BT is None:
        return visible_ST[None]
    return visible_ST & (documents_BT[:, num_keys - num_queries :, None] == documents_BT[:, None, :])


def dense_masked_attention(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgD: Tensor, visible_BST: Tensor, sink_n: Tensor | None = None
) -> Tensor:
    """The plain reference: every score, an explicit mask (:func:`visible_keys`), a softmax.

    Returns:
        [S, B, n, D]. Accumulates in the dtype of the inputs, so give it float32 or float64.
    """
    repeats = q_SBnD.shape[2] // k_TBgD.shape[2]
    k_TBnD = k_TBgD.repeat_interleave(repeats, dim=2)
    v_TBnD = v_TBgD.repeat_interleave(repeats, dim=2)
    scores_BnST = torch.einsum("sbnd,tbnd->bnst", q_SBnD, k_TBnD) / math.sqrt(q_SBnD.shape[-1])
    scores_BnST = scores_BnST.masked_fill(~visible_BST[:, None], -math.inf)
    if sink_n is not None:
        sink_BnS1 = sink_n.view(1, -1, 1, 1).expand(*scores_BnST.shape[:3], 1)
        scores_BnST = torch.cat([scores_BnST, sink_BnS1], dim=-1)
    weights_BnST = torch.softmax(scores_BnST, dim=-1)[..., : k_TBgD.shape[0]]
    return torch.einsum("bnst,tbnd->sbnd", weights_BnST, v_TBnD)


class _ChunkedAttention(torch.autograd.Function):
    """Softmax attention, chunk by chunk as a plan lays out.

    The sink enters through one factor per query and head, ``f = sigmoid(log Z - b)`` with
    ``Z = sum_j e^{s_j}``: ``o = f softmax(s) v``. With dO' = f dO the gradients are
    ``dV = P^T dO'``, ``dS = P (dO' V^T - dO'.o)`` and ``db = -sum (1 - f) dO.o``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_n: Tensor | None, plan: _Plan) -> Tensor:
        scale = 1.0 / math.sqrt(q.shape[-1])
        keys, values = plan.lay_out_keys(k), plan.lay_out_keys(v)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        factor_SBn1 = None
        if sink_n is not None:
            sink_SBn1 = sink_n.to(plan.shape.dtype).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
            factor_SBn1 = torch.empty_like(sink_SBn1, memory_format=torch.contiguous_format)
        for chunk in plan.chunks():
            q_bRD = plan.query_rows(q, chunk)
            k_bKD, v_bKD = plan.key_rows(keys, chunk), plan.key_rows(values, chunk)
            scores_bRK = plan.masking_bias(chunk).baddbmm_(q_bRD, k_bKD.transpose(1, 2), alpha=scale)
            p_bRK = torch.softmax(scores_bRK, dim=-1)
            o_bRD = torch.bmm(p_bRK, v_bKD)
            if factor_SBn1 is not None:
                # The largest probability is e^{max s} / Z, so log Z costs two maxima.
                log_z_bR1 = scores_bRK.amax(-1, keepdim=True) - p_bRK.amax(-1, keepdim=True).log()
                factor_bR1 = torch.sigmoid(log_z_bR1 - plan.query_rows(sink_SBn1, chunk))
                plan.write_query_rows(factor_SBn1, chunk, factor_bR1)
                o_bRD *= factor_bR1
            plan.write_query_rows(output, chunk, o_bRD)
        ctx.save_for_backward(q, k, v, output, sink_n, factor_SBn1)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, sink_n, factor_SBn1 = ctx.saved_tensors
        plan: _Plan = ctx.plan
        scale = 1.0 / math.sqrt(q.shape[-1])
        d_sink_n = None
        if factor_SBn1 is not None:
            dot_SBn1 = _row_dot(d_output, output, plan.shape.dtype)
            d_sink_n = ((factor_SBn1 - 1.0) * dot_SBn1).sum(dim=(0, 1, 3)).to(sink_n.dtype)
            d_output = d_output * factor_SBn1
        minus_dot_SBn1 = _row_dot(d_output, output, plan.shape.dtype).neg_()
        keys, values = plan.lay_out_keys(k), plan.lay_out_keys(v)
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for chunk in plan.chunks():
            q_bRD, d_o_bRD = plan.query_rows(q, chunk), plan.query_rows(d_output, chunk)
            k_bKD, v_bKD = plan.key_rows(keys, chunk), plan.key_rows(values, chunk)
            scores_bRK = plan.masking_bias(chunk).baddbmm_(q_bRD, k_bKD.transpose(1, 2), alpha=scale)
            p_bRK = torch.softmax(scores_bRK, dim=-1)
            plan.add_key_product(d_values, chunk, p_bRK, d_o_bRD, 1.0)
            minus_dot_bR1 = plan.query_rows(minus_dot_SBn1, chunk)
            d_scores_bRK = torch.baddbmm(minus_dot_bR1, d_o_bRD, v_bKD.transpose(1, 2), out=scores_bRK).mul_(p_bRK)
            plan.write_query_rows(d_q, chunk, torch.bmm(d_scores_bRK, k_bKD).mul_(scale))
            plan.add_key_product(d_keys, chunk, d_scores_bRK, q_bRD, scale)
        d_k = plan.take_back_keys(d_keys).to(k.dtype)
        d_v = plan.take_back_keys(d_values).to(v.dtype)
        return d_q, d_k, d_v, d_sink_n, None


class _Shape:
    """Sizes of one call, with the dtype it computes in."""

    def __init__(self, q_SBnD: Tensor, k_TBgD: Tensor) -> None:
        self.queries, self.batch, heads, self.head_dim = q_SBnD.shape
        self.keys, _, self.groups, _ = k_TBgD.shape
        self.heads_per_group = heads // self.groups
        self.dtype = torch.promote_types(q_SBnD.dtype, torch.float32)
        self.device = q_SBnD.device

    def rows(self, x_SBnX: Tensor) -> Tensor:
        """View of [tokens, B, n, X] as [B, g, tokens, r, X]."""
        return x_SBnX.unflatten(2, (self.groups, self.heads_per_group)).permute(1, 2, 0, 3, 4)

    def empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class _Plan(Protocol):
    """How the work is cut: which queries meet which keys in a chunk (a range of the plan's own units)."""

    shape: _Shape

    def chunks(self) -> Iterator[range]: ...

    def lay_out_keys(self, x_TBgD: Tensor) -> Tensor:
        """Keys or values in the layout that the plan reads, in the dtype of the computation."""

    def take_back_keys(self, laid_out: Tensor) -> Tensor:
        """Inverse of :meth:`lay_out_keys`: [T, B, g, D]."""

    def key_rows(self, laid_out: Tensor, chunk: range) -> Tensor:
        """[b, K, D]"""

    def add_key_product(self, laid_out: Tensor, chunk: range, a_bRK: Tensor, x_bRD: Tensor, alpha: float) -> None:
        """Adds ``alpha * a^T x`` to the chunk's rows of a laid-out gradient."""

    def query_rows(self, x_SBnX: Tensor, chunk: range) -> Tensor:
        """[b, R, X] in the dtype of the computation; rows past the sequence are zero."""

    def write_query_rows(self, x_SBnX: Tensor, chunk: range, rows_bRX: Tensor) -> None:
        """Inverse of :meth:`query_rows`."""

    def masking_bias(self, chunk: range) -> Tensor:
        """A new [b, R, K] of 0 where a query sees a key, -inf elsewhere."""


class _CausalPlan:
    """Full layers: chunks of successive query tokens against every key from the first visible one."""

    def __init__(
        self, shape: _Shape, query_offset: int, documents_BT: Tensor | None, first_keys: list[int] | None
    ) -> None:
        self.shape = shape
        self._offset = query_offset
        self._documents_BT = documents_BT
        self._first_keys = first_keys
        scores_per_token = shape.batch * shape.groups * shape.heads_per_group * shape.keys
        self._chunk_tokens = min(128, max(32, _CHUNK_SCORES // max(1, scores_per_token) // 16 * 16))

    def chunks(self) -> Iterator[range]:
        for start in range(0, self.shape.queries, self._chunk_tokens):
            yield range(start, min(start + self._chunk_tokens, self.shape.queries))

    def _key_range(self, chunk: range) -> slice:
        first = self._first_keys[self._offset + chunk.start] if self._first_keys is not None else 0
        return slice(first, self._offset + chunk.stop)

    def lay_out_keys(self, x_TBgD: Tensor) -> Tensor:
        shape = self.shape
        laid_out = shape.empty(shape.batch, shape.groups, shape.keys, shape.head_dim)
        return laid_out.copy_(x_TBgD.permute(1, 2, 0, 3)).flatten(0, 1)

    def take_back_keys(self, laid_out: Tensor) -> Tensor:
        return laid_out.unflatten(0, (self.shape.batch, self.shape.groups)).permute(2, 0, 1, 3)

    def key_rows(self, laid_out: Tensor, chunk: range) -> Tensor:
        return laid_out[:, self._key_range(chunk)]

    def add_key_product(self, laid_out: Tensor, chunk: range, a_bRK: Tensor, x_bRD: Tensor, alpha: float) -> None:
        laid_out[:, self._key_range(chunk)].baddbmm_(a_bRK.transpose(1, 2), x_bRD, alpha=alpha)

    def query_rows(self, x_SBnX: Tensor, chunk: range) -> Tensor:
        source = self.shape.rows(x_SBnX[chunk.start : chunk.stop])
        return self.shape.empty(*source.shape).copy_(source).flatten(2, 3).flatten(0, 1)

    def write_query_rows(self, x_SBnX: Tensor, chunk: range, rows_bRX: Tensor) -> None:
        target = self.shape.rows(x_SBnX[chunk.start : chunk.stop])
        target.copy_(rows_bRX.view(target.shape))

    def masking_bias(self, chunk: range) -> Tensor:
        shape, keys = self.shape, self._key_range(chunk)
        query_rows_C = torch.arange(chunk.start, chunk.stop, device=shape.device) + self._offset
        visible_BCK = (query_rows_C[:, None] >= torch.arange(keys.start, keys.stop, device=shape.device))[None]
        if self._documents_BT is not None:
            query_documents_BC = self._documents_BT[:, self._offset :][:, chunk.start : chunk.stop]
            visible_BCK = visible_BCK & (query_documents_BC[:, :, None] == self._documents_BT[:, None, keys])
        bias_BCK = shape.zeros(*visible_BCK.shape).masked_fill_(~visible_BCK, -math.inf)
        C, K = bias_BCK.shape[1:]
        bias = shape.empty(shape.batch, shape.groups, C, shape.heads_per_group, K)
        return bias.copy_(bias_BCK[:, None, :, None, :]).view(-1, C * shape.heads_per_group, K)


class _SlidingPlan:
    """Sliding layers: blocks of C tokens against their own block and the p blocks before it.

    Chunks are runs of blocks. Keys are laid out in blocks too, with p blocks before the first
    query's: from the keys before ``query_offset`` where there are any, zeros (never seen) otherwise.
    """

    def __init__(self, shape: _Shape, query_offset: int, documents_BT: Tensor | None, window: int) -> None:
        self.shape = shape
        self._block = _block_size(window)
        self._blocks = -(-shape.queries // self._block)
        self._blocks_before = -(-(window - 1) // self._block)
        self._window_keys = (self._blocks_before + 1) * self._block
        self._first_key = query_offset - self._blocks_before * self._block
        rows = shape.batch * shape.groups * shape.heads_per_group * self._block
        chunks = -(-self._blocks // max(1, _CHUNK_SCORES // (rows * self._window_keys)))
        self._chunk_blocks = -(-self._blocks // chunks)
        offsets_K = torch.arange(self._window_keys, device=shape.device)
        distance_CK = offsets_K[-self._block :, None] - offsets_K
        self._visible_CK = (distance_CK >= 0) & (distance_CK < window)
        self._documents = None if documents_BT is None else self._pad(documents_BT.T, documents_BT.dtype)

    def chunks(self) -> Iterator[range]:
        for start in range(0, self._blocks, self._chunk_blocks):
            yield range(start, min(start + self._chunk_blocks, self._blocks))

    def _pad(self, x_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows from ``first_key`` on, in whole blocks, zeros where there are no keys."""
        size = (self._blocks_before + self._blocks) * self._block
        padded = torch.zeros((size, *x_T.shape[1:]), dtype=dtype, device=x_T.device)
        source = x_T[max(0, self._first_key) :]
        start = max(0, -self._first_key)
        padded[start : start + len(source)] = source
        return padded

    def _windows(self, padded: Tensor, chunk: range) -> Tensor:
        """[blocks, ..., K]: a view of the rows that each block of the chunk may see."""
        rows = padded[chunk.start * self._block : (chunk.stop + self._blocks_before) * self._block]
        return rows.unfold(0, self._window_keys, self._block)

    def lay_out_keys(self, x_TBgD: Tensor) -> Tensor:
        return self._pad(x_TBgD, self.shape.dtype)

    def take_back_keys(self, laid_out: Tensor) -> Tensor:
        start = max(0, -self._first_key)
        unseen = max(0, self._first_key)
        taken = laid_out[start : start + self.shape.keys - unseen]
        return F.pad(taken, (0, 0, 0, 0, 0, 0, unseen, 0)) if unseen else taken

    def key_rows(self, laid_out: Tensor, chunk: range) -> Tensor:
        return self._windows(laid_out, chunk).transpose(-1, -2).flatten(0, 2)

    def add_key_product(self, laid_out: Tensor, chunk: range, a_bRK: Tensor, x_bRD: Tensor, alpha: float) -> None:
        shape = self.shape
        product_bKD = torch.bmm(a_bRK.transpose(1, 2), x_bRD)
        product = product_bKD.view(len(chunk), shape.batch, shape.groups, -1, self._block, shape.head_dim)
        blocks = laid_out.unflatten(0, (-1, self._block)).permute(0, 2, 3, 1, 4)
        for place in range(self._blocks_before + 1):
            blocks[chunk.start + place : chunk.stop + place].add_(product[:, :, :, place], alpha=alpha)

    def query_rows(self, x_SBnX: Tensor, chunk: range) -> Tensor:
        rows = x_SBnX[chunk.start * self._block : chunk.stop * self._block]
        missing = len(chunk) * self._block - len(rows)
        if missing:
            rows = F.pad(rows, (0, 0, 0, 0, 0, 0, 0, missing))
        source = self._as_blocks(rows, len(chunk))
        return self.shape.empty(*source.shape).copy_(source).flatten(3, 4).flatten(0, 2)

    def write_query_rows(self, x_SBnX: Tensor, chunk: range, rows_bRX: Tensor) -> None:
        target = x_SBnX[chunk.start * self._block : chunk.stop * self._block]
        if len(target) == len(chunk) * self._block:
            blocks = self._as_blocks(target, len(chunk))
            blocks.copy_(rows_bRX.view(blocks.shape))
            return
        padded = rows_bRX.new_empty(len(chunk) * self._block, *x_SBnX.shape[1:])
        blocks = self._as_blocks(padded, len(chunk))
        blocks.copy_(rows_bRX.view(blocks.shape))
        target.copy_(padded[: len(target)])

    def _as_blocks(self, rows: Tensor, count: int) -> Tensor:
        """View of [count C, B, n, X] as [count, B, g, C, r, X]."""
        heads = rows.unflatten(2, (self.shape.groups, self.shape.heads_per_group))
        return heads.unflatten(0, (count, self._block)).permute(0, 2, 3, 1, 4, 5)

    def masking_bias(self, chunk: range) -> Tensor:
        shape = self.shape
        first_keys_m = torch.arange(chunk.start, chunk.stop, device=shape.device) * self._block + self._first_key
        is_key_mK = first_keys_m[:, None] + torch.arange(self._window_keys, device=shape.device) >= 0
        visible_mBCK = (self._visible_CK & is_key_mK[:, None, :])[:, None]
        if self._documents is not None:
            documents_mBK = self._windows(self._documents, chunk)
            documents_mBC = documents_mBK[:, :, -self._block :]
            visible_mBCK = visible_mBCK & (documents_mBC[:, :, :, None] == documents_mBK[:, :, None, :])
        bias_mBCK = shape.zeros(*visible_mBCK.shape).masked_fill_(~visible_mBCK, -math.inf)
        bias = shape.empty(len(chunk), shape.batch, shape.groups, self._block, shape.heads_per_group, self._window_keys)
        bias.copy_(bias_mBCK[:, :, None, :, None, :])
        return bias.view(-1, self._block * shape.heads_per_group, self._window_keys)


def _block_size(window: int) -> int:
    """Query tokens per block, by measurement on CPU.

    Smaller blocks meet fewer keys in vain, larger ones make better use of a matrix product.
    """
    return min(64, max(16, 1 << max(0, (window // 4).bit_length() - 1)))


def _row_dot(x_SBnD: Tensor, y_SBnD: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, B, n, 1]: products summed over the head dimension."""
    return (x_SBnD.to(dtype) * y_SBnD.to(dtype)).sum(dim=-1, keepdim=True)


def _fused_causal_attention(q_SBnD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor) -> Tensor:
    q_BnSD, k_BgSD, v_BgSD = (x.permute(1, 2, 0, 3) for x in (q_SBnD, k_SBgD, v_SBgD))
    return F.scaled_dot_product_attention(q_BnSD, k_BgSD, v_BgSD, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


def check_shapes(
    q_SBnD: Tensor,
    k_TBgD: Tensor,
    v_TBgD: Tensor,
    window: int | None,
    sink_n: Tensor | None,
    documents_BT: Tensor | None,
    query_offset: int,
) -> None:
    """Raises ValueError where the arguments of an attention do not fit together."""
    S, B, n, D = q_SBnD.shape
    T, _, g, _ = k_TBgD.shape
    if k_TBgD.shape != (query_offset + S, B, g, D) or v_TBgD.shape != k_TBgD.shape:
        raise ValueError(
            f"keys {tuple(k_TBgD.shape)} and values {tuple(v_TBgD.shape)} do not fit queries {tuple(q_SBnD.shape)}: "
            f"expected [{query_offset + S}, {B}, groups, {D}] for both"
        )
    if n % g:
        raise ValueError(f"{n} query heads cannot be shared out over {g} key-value groups: not a multiple")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself and must be at least 1")
    if sink_n is not None and sink_n.shape != (n,):
        raise ValueError(f"sink has shape {tuple(sink_n.shape)}, expected {(n,)}: one logit per query head")
    if documents_BT is not None and documents_BT.shape != (B, T):
        raise ValueError(f"documents have shape {tuple(documents_BT.shape)}, expected {(B, T)}")
