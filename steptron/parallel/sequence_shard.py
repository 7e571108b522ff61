"""Which tokens of every sequence a context-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceShard:
    """A part of each sequence, as ascending ranges of token places.

    Attributes:
        length: tokens of the whole sequence.
        ranges: (start, stop) of each run of tokens that the part holds.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, length: int) -> SequenceShard:
        """The whole sequence."""
        return cls(length, ((0, length),))

    @classmethod
    def balanced(cls, length: int, rank: int, size: int) -> SequenceShard:
        """The share of one of ``size`` ranks: of 2 x size equal chunks the one at ``rank`` from either end.

        An early chunk sees few keys and its late partner many, so that every rank has the same work under
        causal attention.

        Raises:
            ValueError: the length is no multiple of 2 x size (with more than one rank).
        """
        if size == 1:
            return cls.whole(length)
        if length % (2 * size):
            raise ValueError(
                f"a sequence of {length} tokens cannot be shared by {size} ranks: no multiple of {2 * size}"
            )
        chunk = length // (2 * size)
        late = 2 * size - 1 - rank
        return cls(length, ((rank * chunk, (rank + 1) * chunk), (late * chunk, (late + 1) * chunk)))

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.length),)

    @property
    def size(self) -> int:
        """Tokens of one sequence that the part holds."""
        return sum(stop - start for start, stop in self.ranges)

    def take(self, values_BS: torch.Tensor) -> torch.Tensor:
        """This part's columns of values for whole sequences: [B, S] -> [B, size]."""
        if self.is_whole:
            return values_BS
        return torch.cat([values_BS[:, start:stop] for start, stop in self.ranges], dim=1)
