"""Keys and values that a context-parallel rank's queries see and other ranks hold.

Full and sliding layers share one mechanism. A rank receives exactly the rows of other ranks that some
query of its shard can see, in one all-to-all whose sizes a static plan fixes: the queries of a range
[a, b) see the rows [a - (W - 1), b), without a window [0, b). So a sliding layer moves W - 1 rows per
range however long the sequence is. Documents are not looked at: the sizes would depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron.parallel.sequence_shard import SequenceShard

Run = tuple[int, int]
"""(start, stop) of successive rows."""


@dataclass(frozen=True)
class KeyExchange:
    """What one rank sends, receives and keeps. Runs are ascending; those of two ranks in the same order.

    "Local rows" are those of the rank's shard in its order; "seen rows" those of the result: every row
    that some query of the shard can see, own rows included, each once, by ascending place in the sequence.

    Attributes:
        local_rows: rows of the shard.
        seen_rows: rows of the result.
        keys: for each range of the shard, the seen rows that its queries can see; the last are its own.
        own: for each range of the shard, its seen rows.
        sent: for each rank, the local rows that it receives.
        received: for each rank, the seen rows that it sends.
    """

    local_rows: int
    seen_rows: int
    keys: tuple[Run, ...]
    own: tuple[Run, ...]
    sent: tuple[tuple[Run, ...], ...]
    received: tuple[tuple[Run, ...], ...]


@lru_cache(maxsize=1024)
def plan_exchange(length: int, size: int, rank: int, window: int | None) -> KeyExchange:
    """The exchange of one of ``size`` ranks that share sequences as :meth:`SequenceShard.balanced` says.

    Args:
        length: tokens of the whole sequence.
        size: context-parallel ranks.
        rank: the rank's place among them.
        window: visible keys, the token itself included; None means all.

    Raises:
        ValueError: ``window`` is below 1, or the length cannot be shared by so many ranks.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself and must be at least 1")
    shards = [SequenceShard.balanced(length, r, size).ranges for r in range(size)]
    own, seen = shards[rank], _seen(shards[rank], window)
    return KeyExchange(
        local_rows=_rows(own),
        seen_rows=_rows(seen),
        keys=_places([(_first_seen(start, window), stop) for start, stop in own], seen),
        own=_places(own, seen),
        sent=tuple(
            () if other == rank else _places(_common(own, _seen(shards[other], window)), own) for other in range(size)
        ),
        received=tuple(() if other == rank else _places(_common(shards[other], seen), seen) for other in range(size)),
    )


def rows_sent(length: int, size: int, rank: int, window: int | None) -> int:
    """Rows that the rank sends to others in one layer's forward pass; the backward receives as many.

    A row is B x groups x 2 x head_dim elements in the dtype of the keys. Arguments as of :func:`plan_exchange`.
    """
    return _rows(chain.from_iterable(plan_exchange(length, size, rank, window).sent))


def rows_received(length: int, size: int, rank: int, window: int | None) -> int:
    """Rows that the rank receives from others in one layer's forward pass; see :func:`rows_sent`."""
    return _rows(chain.from_iterable(plan_exchange(length, size, rank, window).received))


def exchange_keys(
    k_SBgD: Tensor, v_SBgD: Tensor, exchange: KeyExchange, group: dist.ProcessGroup
) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that the queries of each range of the shard see; differentiable.

    A collective: every rank of the group calls it at the same time, whether it has rows to send or not. All
    results are views of one buffer of the seen rows, the only memory that stays for the backward; the exchange
    itself keeps nothing. The backward returns gradients to the owners, who add them up in float32 (float64 for
    float64 gradients), own rows first, then rank by rank.

    Args:
        k_SBgD: [S_local, B, g, D] keys of the shard.
        v_SBgD: [S_local, B, g, D] values of the shard, in the dtype of the keys.
        exchange: this rank's plan.
        group: the context-parallel ranks, in the order of the plan's.

    Returns:
        For each range, keys and values [T, B, g, D] of its successive rows of the sequence; the last are its own.

    Raises:
        ValueError: the number of rows is not the shard's, or the group has another number of ranks than the plan.
    """
    if k_SBgD.shape != v_SBgD.shape or len(k_SBgD) != exchange.local_rows:
        raise ValueError(
            f"keys {tuple(k_SBgD.shape)} and values {tuple(v_SBgD.shape)} must have the same shape, "
            f"with the {exchange.local_rows} rows of the shard"
        )
    if group.size() != len(exchange.sent):
        raise ValueError(f"the group has {group.size()} ranks, the exchange is planned for {len(exchange.sent)}")
    flat: tuple[Tensor, ...] = _KeyExchange.apply(k_SBgD, v_SBgD, exchange, group)
    return list(zip(flat[::2], flat[1::2], strict=True))


class _KeyExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: KeyExchange, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.group = exchange, group
        local = torch.cat([k, v], dim=-1)
        seen = local.new_empty(exchange.seen_rows, *local.shape[1:])
        for (start, stop), rows in zip(exchange.own, local.split(_lengths(exchange.own)), strict=True):
            seen[start:stop] = rows
        for (start, stop), rows in _swap(local, exchange.sent, exchange.received, group):
            seen[start:stop] = rows
        halves = seen.split(k.shape[-1], dim=-1)
        return tuple(half[start:stop] for start, stop in exchange.keys for half in halves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_keys: Tensor) -> tuple[Tensor | None, ...]:
        exchange: KeyExchange = ctx.exchange
        batch, groups, head_dim = d_keys[0].shape[1:]
        # Several ranges of several ranks add to a row: a 16-bit dtype is for what travels and for the final sum.
        narrow = d_keys[0].dtype
        wide = torch.promote_types(narrow, torch.float32)
        d_seen = d_keys[0].new_zeros(exchange.seen_rows, batch, groups, 2 * head_dim, dtype=wide)
        for (start, stop), d_k, d_v in zip(exchange.keys, d_keys[::2], d_keys[1::2], strict=True):
            d_seen[start:stop, ..., :head_dim] += d_k
            d_seen[start:stop, ..., head_dim:] += d_v
        d_local = torch.cat([d_seen[start:stop] for start, stop in exchange.own])
        for (start, stop), rows in _swap(d_seen.to(narrow), exchange.received, exchange.sent, ctx.group):
            d_local[start:stop] += rows
        d_k, d_v = (half.to(narrow) for half in d_local.split(head_dim, dim=-1))
        return d_k, d_v, None, None


def _swap(
    rows: Tensor, sent: Sequence[Sequence[Run]], received: Sequence[Sequence[Run]], group: dist.ProcessGroup
) -> Iterator[tuple[Run, Tensor]]:
    """Sends each rank its runs of ``rows``; what arrives, run by run, rank after rank."""
    # The empty slice gives shape and dtype where there is nothing to send.
    outgoing = torch.cat([rows[:0], *(rows[start:stop] for start, stop in chain.from_iterable(sent))])
    runs = list(chain.from_iterable(received))
    incoming = rows.new_empty(_rows(runs), *rows.shape[1:])
    dist.all_to_all_single(incoming, outgoing, [_rows(r) for r in received], [_rows(r) for r in sent], group=group)
    return zip(runs, incoming.split(_lengths(runs)), strict=True)


def _first_seen(start: int, window: int | None) -> int:
    """The first row that the query of row ``start`` sees."""
    return 0 if window is None else max(0, start - (window - 1))


def _seen(own: Sequence[Run], window: int | None) -> list[Run]:
    """What the queries of the runs see: merged, ascending."""
    merged: list[Run] = []
    for start, stop in own:
        first = _first_seen(start, window)
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((first, stop))
    return merged


def _common(a: Sequence[Run], b: Sequence[Run]) -> list[Run]:
    """The rows in both; ascending where ``a`` and ``b`` are."""
    overlaps = ((max(s, t), min(e, f)) for s, e in a for t, f in b)
    return [(start, stop) for start, stop in overlaps if start < stop]


def _places(runs: Sequence[Run], holder: Sequence[Run]) -> tuple[Run, ...]:
    """Where runs, each inside one of the holder's, stand among the holder's rows."""
    places = []
    for start, stop in runs:
        before = 0
        for held_start, held_stop in holder:
            if held_start <= start and stop <= held_stop:
                places.append((before + start - held_start, before + stop - held_start))
                break
            before += held_stop - held_start
        else:
            raise AssertionError(f"the rows {start} to {stop} are not held together in {holder}")
    return tuple(places)


def _lengths(runs: Sequence[Run]) -> list[int]:
    return [stop - start for start, stop in runs]


def _rows(runs: Sequence[Run] | Iterator[Run]) -> int:
    return sum(stop - start for start, stop in runs)
