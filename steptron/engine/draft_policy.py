"""How many tokens to draft: as many as pay, which depends on how often they are right and how busy the engine is.

Drafts cost time for the MTP depths and for verifying; with few sequences a step is so small that this is cheap, with
many it may cost more than it brings. So the rate of tokens is measured with each number of drafts, apart for different
numbers of sequences, and the best one is taken; now and then another is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

_RUN = 16
"""Steps for which a number of drafts is kept."""
_EXPLORE = 16
"""Every so many runs another number of drafts is tried."""
_WEIGHT = 0.3
"""Of the newest run in the average."""


class DraftPolicy(Protocol):
    """Chooses how many tokens to draft."""

    def choose(self, sequences: int) -> int:
        """For the next step of so many sequences."""

    def observe(self, sequences: int, drafts: int, tokens: int, seconds: float) -> None:
        """What a step of so many sequences, with so many drafts each, brought and took."""


@dataclass(frozen=True)
class FixedDrafts:
    """Always the same number: what is sampled does not depend on time."""

    drafts: int

    def choose(self, sequences: int) -> int:
        return self.drafts

    def observe(self, sequences: int, drafts: int, tokens: int, seconds: float) -> None:
        """Changes nothing."""


@dataclass
class _Arm:
    rate: float = 0.0
    last_run: int = -1


@dataclass
class _Load:
    """What is known for a number of sequences."""

    arms: list[_Arm]
    current: int = 0
    runs: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class MeasuredDrafts:
    """The number with the highest rate of tokens.

    Attributes:
        most: tokens to draft, at most.
    """

    most: int
    _loads: dict[int, _Load] = field(default_factory=dict)

    def choose(self, sequences: int) -> int:
        return self._load(sequences).current

    def observe(self, sequences: int, drafts: int, tokens: int, seconds: float) -> None:
        """Steps between two numbers of drafts, and those that took no time, say nothing."""
        load = self._load(sequences)
        if drafts != load.current or seconds <= 0:
            return
        load.steps += 1
        load.tokens += tokens
        load.seconds += seconds
        if load.steps < _RUN:
            return
        arm, rate = load.arms[load.current], load.tokens / load.seconds
        arm.rate = rate if arm.last_run < 0 else arm.rate + _WEIGHT * (rate - arm.rate)
        arm.last_run = load.runs
        load.runs, load.steps, load.tokens, load.seconds = load.runs + 1, 0, 0, 0.0
        load.current = self._next(load)

    def _next(self, load: _Load) -> int:
        numbers = range(self.most + 1)
        best = max(numbers, key=lambda number: load.arms[number].rate)
        oldest = min(numbers, key=lambda number: load.arms[number].last_run)
        if load.arms[oldest].last_run < 0 or load.runs % _EXPLORE == 0:
            return oldest
        return best

    def _load(self, sequences: int) -> _Load:
        bucket = sequences.bit_length()
        if bucket not in self._loads:
            self._loads[bucket] = _Load([_Arm() for _ in range(self.most + 1)])
        return self._loads[bucket]
