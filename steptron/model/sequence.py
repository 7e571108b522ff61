"""What a forward pass knows about its tokens: positions, documents, and its share of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")

PADDING = -1
"""Document number of padding tokens."""


@dataclass(frozen=True)
class SequenceShard:
    """The part of each sequence that this process holds, as ranges of token indices.

    Without context parallelism there is one range, the whole sequence.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, length: int) -> SequenceShard:
        return cls(length, ((0, length),))

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.length),)


@dataclass(frozen=True)
class SequenceContext:
    """Positions and documents of the tokens of one micro-batch, shared by all layers.

    Attributes:
        positions_BS: int64 [B, S], RoPE positions.
        documents_BS: int64 [B, S], document numbers, non-decreasing along a row before padding;
            ``PADDING`` marks padding. None: every row is one document without padding.
        shard: the ranges of the sequence that the S columns stand for.
    """

    positions_BS: torch.Tensor
    documents_BS: torch.Tensor | None
    shard: SequenceShard
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Computes a value that several layers of the same micro-batch need (RoPE tables, masks) once."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[return-value]


def shift_left(values_BS: torch.Tensor, places: int, fill: int | bool) -> torch.Tensor:
    """values[:, t + places] at t; ``fill`` past the end of the row."""
    if places == 0:
        return values_BS
    shifted = torch.full_like(values_BS, fill)
    shifted[:, :-places] = values_BS[:, places:]
    return shifted
