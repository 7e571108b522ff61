"""What attention layers see of a step: new tokens of many sequences, and what is cached of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from steptron.engine.cache import Blocks, LayerGroup
from steptron_kernels.select import Kernels

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
        segments, rows = [], []
        begin = token = 0
        while begin < len(self.work):
            count = self.work[begin].count
            end = begin + 1
            while count < _ALONE and end < len(self.work) and self.work[end].count == count:
                end += 1
            own = self.work[begin:end]
            firsts_R = np.array([item.blocks[number].first * size for item in own])
            starts_R = np.array([item.start for item in own])
            places_RQ = starts_R[:, None] + np.arange(count)
            table_RL = _table([item.blocks[number].held for item in own], size)
            columns_RQ = places_RQ - firsts_R[:, None]
            rows.append(np.take_along_axis(table_RL, columns_RQ, axis=1).flatten())
            # A sequence may hold blocks beyond its last place.
            table_RL = table_RL[:, : int(columns_RQ.max()) + 1]
            tokens = slice(token, token + places_RQ.size)
            segments.append(_Segment(tokens, count, *map(self._tensor, (table_RL, firsts_R, places_RQ))))
            begin, token = end, tokens.stop
        return _GroupView(self._tensor(np.concatenate(rows)), segments)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)


def _table(held: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """int64 [R, L], the rows of the pool that the blocks of each sequence hold, padded with any."""
    longest = max(map(len, held))
    blocks_RM = np.zeros((len(held), longest), np.int64)
    for row, own in enumerate(held):
        blocks_RM[row, : len(own)] = own
    return (blocks_RM[:, :, None] * size + np.arange(size)).reshape(len(held), -1)


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
        kernels: Kernels,
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
                output = kernels.attention(
                    q_TnD[:, None],
                    self.k_NgD[rows][:, None],
                    self.v_NgD[rows][:, None],
                    window=window,
                    sink_n=sink_n,
                    query_offset=len(rows) - segment.count,
                )[:, 0]
            else:
                output = kernels.cached_attention(
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
