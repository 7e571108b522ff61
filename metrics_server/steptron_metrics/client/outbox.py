"""Frames in memory, and the books: what came in is somewhere, or was stored, refused or dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from steptron_metrics.client.frame import Pending


@dataclass(frozen=True)
class Counts:
    """Frames. ``accepted + found == queued + spooled + stored + superseded + refused + dropped``."""

    accepted: int
    found: int
    queued: int
    spooled: int
    stored: int
    superseded: int
    refused: int
    dropped: int


class Outbox:
    """The bounded queue between the trainer's thread and the client's, and the counts. All methods may be called by any
    thread; none waits for anything but another's few instructions.

    Args:
        max_bytes: that frames in memory take up at most; to let a new one in, the oldest that waits is dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[Pending] = deque()
        self._woken = self._pressed = False
        self._bytes = 0
        self._accepted = self._found = self._queued = self._spooled = 0
        self._stored = self._superseded = self._refused = self._dropped = 0
        # Drops to be said in the next frame of a rank, and those that no frame has said which is stored or spooled.
        self._owed: dict[int, int] = {}
        self._unreported: dict[int, int] = {}

    # The trainer's thread.

    def put(self, frame: Pending) -> bool:
        """Takes a frame; returns whether the sender has to be woken."""
        with self._lock:
            self._accepted += 1
            self._queued += 1
            self._bytes += frame.room
            self._waiting.append(frame)
            while self._bytes > self.max_bytes and self._waiting:
                self._drop(self._waiting.popleft())
            if not self._woken or (self.pressed and not self._pressed):
                self._woken = True
                self._pressed = self.pressed
                return True
            return False

    # The client's threads.

    @property
    def pressed(self) -> bool:
        """Whether it is half full."""
        return self._bytes > self.max_bytes // 2

    def take(self, fits: Callable[[Pending], bool]) -> list[Pending]:
        """Removes waiting frames from the front while they fit. They stay counted."""
        taken = []
        with self._lock:
            self._woken = False
            while self._waiting and fits(self._waiting[0]):
                taken.append(self._waiting.popleft())
        return taken

    def take_due(self, before: float, max_bytes: int) -> list[Pending]:
        """Removes waiting frames that are older than ``before``, and all that are beyond half of the room, up to a
        number of bytes. They stay counted."""
        taken: list[Pending] = []
        with self._lock:
            excess = self._bytes - self.max_bytes // 2
            self._pressed = False
            while self._waiting and max_bytes > 0 and (self._waiting[0].since < before or excess > 0):
                frame = self._waiting.popleft()
                taken.append(frame)
                excess -= frame.room
                max_bytes -= frame.room
        return taken

    def put_back(self, frames: list[Pending]) -> None:
        """Puts frames that were taken to the front again."""
        with self._lock:
            self._waiting.extendleft(reversed(frames))

    def attach(self, frame: Pending) -> None:
        """Lets a frame report the drops of its rank."""
        with self._lock:
            frame.dropped += self._owed.pop(frame.rank, 0)

    # What becomes of frames.

    def spooled(self, frames: Iterable[Pending]) -> None:
        """They are in the spool now, with the drops that they report."""
        with self._lock:
            for frame in frames:
                self._leave(frame)
                self._reported(frame)
                frame.recorded = frame.dropped
                self._spooled += 1

    def stored(self, frames: Iterable[Pending]) -> None:
        """The server has them."""
        with self._lock:
            for frame in frames:
                self._gone(frame)
                self._reported(frame)
                self._stored += 1

    def superseded(self, frames: Iterable[Pending]) -> None:
        """The server has others in their place."""
        with self._lock:
            for frame in frames:
                self._refuse(frame)
                self._superseded += 1

    def refused(self, frames: Iterable[Pending]) -> None:
        """The server will never have them."""
        with self._lock:
            for frame in frames:
                self._refuse(frame)
                self._refused += 1

    def dropped(self, frames: Iterable[Pending]) -> None:
        """They are given up."""
        with self._lock:
            for frame in frames:
                self._drop(frame)

    def found(self, frames: int, unreported: Mapping[int, int]) -> None:
        """An earlier process left frames in the spool, and drops that it had not reported."""
        with self._lock:
            self._found += frames
            self._spooled += frames
            for rank, count in unreported.items():
                _add(self._owed, rank, count)
                _add(self._unreported, rank, count)

    def dropped_unread(self, frames: int, by_rank: Mapping[int, int]) -> None:
        """Frames in the spool that are given up without having been read; per rank with what they reported."""
        with self._lock:
            self._spooled -= frames
            self._dropped += frames
            for rank, count in by_rank.items():
                _add(self._owed, rank, count)
                _add(self._unreported, rank, count)

    def lost(self, frames: int) -> None:
        """Frames that damage of the spool's files has taken, whose ranks cannot be told."""
        with self._lock:
            self._found += frames
            self._dropped += frames

    # Reading.

    def unreported(self) -> dict[int, int]:
        """Drops by rank that no frame says which the server or the spool has."""
        with self._lock:
            return dict(self._unreported)

    def counts(self) -> Counts:
        with self._lock:
            return Counts(
                self._accepted,
                self._found,
                self._queued,
                self._spooled,
                self._stored,
                self._superseded,
                self._refused,
                self._dropped,
            )

    @property
    def bytes(self) -> int:
        """What the frames in memory take up; not counted are those read from the spool to be sent."""
        return self._bytes

    def _drop(self, frame: Pending) -> None:
        self._gone(frame)
        self._dropped += 1
        _add(self._owed, frame.rank, 1 + frame.dropped)
        _add(self._unreported, frame.rank, 1 + frame.recorded)

    def _refuse(self, frame: Pending) -> None:
        self._gone(frame)
        if frame.dropped:
            _add(self._owed, frame.rank, frame.dropped)
            _add(self._unreported, frame.rank, frame.recorded)

    def _gone(self, frame: Pending) -> None:
        if frame.segment is None:
            self._leave(frame)
        else:
            self._spooled -= 1

    def _leave(self, frame: Pending) -> None:
        self._queued -= 1
        self._bytes -= frame.room

    def _reported(self, frame: Pending) -> None:
        extra = frame.dropped - frame.recorded
        if extra:
            _add(self._unreported, frame.rank, -extra)


def _add(counts: dict[int, int], rank: int, count: int) -> None:
    total = counts.get(rank, 0) + count
    if total:
        counts[rank] = total
    else:
        counts.pop(rank, None)
