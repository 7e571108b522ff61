"""What a reducer is given to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptron_metrics.results import Event

FRAME = np.dtype([("rank", "<u4"), ("segment", "<u4"), ("description", "<u4"), ("length", "<u4"), ("offset", "<u8")])
"""Where a frame's values lie: ``segment`` and ``description`` are indices, ``offset`` and ``length`` bytes."""


@dataclass(frozen=True)
class Job:
    """An iteration's frames, by reference.

    Attributes:
        run, session_ns, iteration, world_size, missing, ended_ns, seconds, consumed_tokens, dropped, events: of
            :class:`~steptron_metrics.results.Iteration`.
        frames: of ``FRAME`` [ranks], by rank.
        segments: paths.
        descriptions: serialized.
    """

    run: str
    session_ns: int
    iteration: int
    world_size: int
    missing: tuple[int, ...]
    ended_ns: int
    seconds: float
    consumed_tokens: int
    dropped: int
    events: tuple[Event, ...]
    frames: np.ndarray
    segments: tuple[str, ...]
    descriptions: tuple[bytes, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """Run, session and iteration."""
        return self.run, self.session_ns, self.iteration

    def __str__(self) -> str:
        return f"iteration {self.iteration} of run {self.run} ({len(self.frames)} of {self.world_size} ranks)"
