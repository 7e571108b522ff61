"""Which steps and ranks to profile, as the command line names them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from steptron.errors import UserError

_RANGE = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", re.ASCII)


@dataclass(frozen=True)
class Window:
    """Consecutive steps that are profiled together.

    Attributes:
        first: first step, counted from 1 as on the console.
        last: last step, included.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    @property
    def folder_name(self) -> str:
        """``step-20`` or ``steps-20-22``."""
        return str(self).replace(" ", "-")


@dataclass(frozen=True)
class ProfileRequest:
    """What to profile.

    Attributes:
        windows: ascending, without overlap.
        ranks: processes that write a profile, ascending.
    """

    windows: tuple[Window, ...]
    ranks: tuple[int, ...] = (0,)

    def after(self, step: int) -> tuple[ProfileRequest, list[str]]:
        """What is left of the request when ``step`` steps are done, and one line for each part that is not."""
        left, notes = [], []
        for window in self.windows:
            done = Window(window.first, min(window.last, step))
            if window.last > step:
                left.append(Window(max(window.first, step + 1), window.last))
            if window.first <= step:
                verb = "is" if done.first == done.last else "are"
                notes.append(f"--profile: {done} {verb} already done and cannot be profiled; --fresh starts over")
        return ProfileRequest(tuple(left), self.ranks), notes


def parse_request(steps: str, ranks: str | None, total_steps: int, world_size: int) -> ProfileRequest:
    """Reads ``--profile`` and ``--profile-ranks``.

    Args:
        steps: such as ``20``, ``20-22`` or ``20-22,100``.
        ranks: such as ``0,8`` or ``0-7``; rank 0 when None.
        total_steps: of the whole run.
        world_size: processes of the run.

    Raises:
        UserError: unreadable, empty, overlapping, or beyond the run's steps or ranks.
    """
    windows = tuple(Window(*pair) for pair in _ranges("--profile", steps, "20, 20-22 or 20-22,100"))
    if windows[0].first < 1:
        raise UserError(f"--profile {steps}: steps are counted from 1, as on the console")
    if windows[-1].last > total_steps:
        raise UserError(f"--profile {steps}: the run ends with step {total_steps} (train.steps)")
    pairs = _ranges("--profile-ranks", ranks, "0, 0,8 or 0-7") if ranks is not None else [(0, 0)]
    if pairs[-1][1] >= world_size:
        raise UserError(
            f"--profile-ranks {ranks}: the run has {world_size} process{'es' if world_size > 1 else ''}, "
            f"the last of them is rank {world_size - 1}"
        )
    return ProfileRequest(windows, tuple(rank for first, last in pairs for rank in range(first, last + 1)))


def _ranges(option: str, text: str, examples: str) -> list[tuple[int, int]]:
    """Ascending ranges, both ends included."""
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise UserError(f"{option} {text!r}: {part.strip()!r} is neither a number nor a range; write {examples}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"{option} {text!r}: {part.strip()} ends before it begins")
        ranges.append((first, last))
    ranges.sort()
    for (_, last), (first, _) in itertools.pairwise(ranges):
        if first <= last:
            raise UserError(f"{option} {text!r}: {first} is named twice")
    return ranges
