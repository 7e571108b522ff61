"""What attention layers see of a step: new tokens of many sequences, and what is cached of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from steptron.engine.cache import Blocks, LayerGroup
from steptron_kernels.cached_attention.plain import cached_attention

T = TypeVar("T")

_ALONE = 8
"""New tokens of a sequence from which on it is computed alone, as training does."""


@dataclass(frozen=True)
class Work:
    """New tokens of a sequence.

    Attributes:
        blocks: what the sequence holds in each group of layers, in the order of the groups.
        start: place of its first new token.
        count: how many there are.
    """

    blocks: Sequence[Blocks]
    start: int
    count: int


@dataclass(frozen=True)
class _Segment:
    """Sequences with equally many new tokens, which lie one after the other.

    Attributes:
        tokens: of the step's.
        count: new tokens of each sequence.
        table_RL, first_R, places_RQ: see ``cached_attention``.
    """

    tokens: slice
    count: int
    table_RL: Tensor
    first_R: Tensor
    places_RQ: Tensor


@dataclass(frozen=True)
class _GroupView:
    """A group of layers, as one step sees it.

    Attributes:
        rows_T: int64, where the keys and values of the step's tokens go.
        segments: the sequences.
    """

    rows_T: Tensor
    segments: list[_Segment]


@dataclass
class Step:
    """New tokens of some sequences, one sequence after the other.

    Args:
        groups: the cache.
        work: the sequences; those with equally many new tokens should stand together.
        device: of the model.
    """

    groups: Sequence[LayerGroup]
    work: Sequence[Work]
    device: torch.device
    _memo: dict[Hashable, object] = field(default_factory=dict)

    @property
    def places_T(self) -> Tensor:
        """int64, the place of each token in its sequence."""
        return self.once(
            "places",
            lambda: torch.cat([torch.arange(own.start, own.start + own.count) for own in self.work]).to(self.device),
        )

    def layer(self, name: str) -> LayerStep:
        """What a layer of the cache sees."""
        for number, group in enumerate(self.groups):
            if name in group.layers:
                return LayerStep(self, number, *group.layers[name])
        raise KeyError(f"{name} has no cache; there are {', '.join(n for group in self.groups for n in group.layers)}")

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Computes a value that several layers need once."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[return-value]

    def view(self, number: int) -> _GroupView:
        """The tables of a group of layers."""
        return self.once(("view", number), lambda: self._view(number))

    def _view(self, number: int) -> _GroupView:
        size = self.groups[number].block_size
        tables = [_table(own.blocks[number], size, own.start + own.count) for own in self.work]
        firsts = [own.blocks[number].first * size for own in self.work]
        rows = [
            table[own.start - first : own.start - first + own.count]
            for own, table, first in zip(self.work, tables, firsts, strict=True)
        ]
        segments = []
        begin = token = 0
        while begin < len(self.work):
            count = self.work[begin].count
            end = begin + 1
            while count < _ALONE and end < len(self.work) and self.work[end].count == count:
                end += 1
            length = max(len(table) for table in tables[begin:end])
            table_RL = torch.zeros(end - begin, length, dtype=torch.int64)
            for row, table in enumerate(tables[begin:end]):
                table_RL[row, : len(table)] = table
            starts_R = torch.tensor([own.start for own in self.work[begin:end]])
            tokens = slice(token, token + count * (end - begin))
            segments.append(
                _Segment(
                    tokens,
                    count,
                    table_RL.to(self.device),
                    torch.tensor(firsts[begin:end]).to(self.device),
                    (starts_R[:, None] + torch.arange(count)).to(self.device),
                )
            )
            begin, token = end, tokens.stop
        return _GroupView(torch.cat(rows).to(self.device), segments)


def _table(blocks: Blocks, size: int, places: int) -> Tensor:
    """int64, the rows of the pool for the places from the first block that is held up to so many."""
    rows = torch.tensor(blocks.held)[:, None] * size + torch.arange(size)
    return rows.flatten()[: places - blocks.first * size]


@dataclass(frozen=True)
class LayerStep:
    """A step as one layer sees it; an ``AttentionContext`` of one row with all tokens."""

    step: Step
    group: int
    k_NgD: Tensor
    v_NgD: Tensor

    @property
    def own_positions_BS(self) -> Tensor:
        return self.step.places_T[None]

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        return self.step.once(key, compute)

    def attend(
        self,
        q_SBnD: Tensor,
        k_SBgD: Tensor,
        v_SBgD: Tensor,
        window: int | None,
        sink_n: Tensor | None,
        attention: Callable[..., Tensor],
    ) -> Tensor:
        """Writes the new keys and values to the cache, and attends to what is there."""
        view = self.step.view(self.group)
        self.k_NgD[view.rows_T] = k_SBgD[:, 0]
        self.v_NgD[view.rows_T] = v_SBgD[:, 0]
        outputs = []
        for segment in view.segments:
            q_TnD = q_SBnD[segment.tokens, 0]
            if segment.count >= _ALONE:
                rows = segment.table_RL[0]
                output = attention(
                    q_TnD[:, None],
                    self.k_NgD[rows][:, None],
                    self.v_NgD[rows][:, None],
                    window=window,
                    sink_n=sink_n,
                    query_offset=len(rows) - segment.count,
                )[:, 0]
            else:
                output = cached_attention(
                    q_TnD.unflatten(0, (-1, segment.count)),
                    self.k_NgD,
                    self.v_NgD,
                    segment.table_RL,
                    segment.first_R,
                    segment.places_RQ,
                    window,
                    sink_n,
                ).flatten(0, 1)
            outputs.append(output)
        return torch.cat(outputs)[:, None] if len(outputs) > 1 else outputs[0][:, None]
