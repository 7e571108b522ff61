"""Whether there is room for more frames."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from steptron_metrics.journal import retention

_ONE_RUN = 0.5
_LAST_PART = (1 + retention.FILL) / 2
"""Where the journal is filled so far, a run that has more than half of what it may hold is to wait, so that others need
not."""
_PAUSE_SECONDS = 1.0
"""After an error of the disk nothing is tried for so long."""


class Room:
    """Knows how full journal and disk are, as of the last look plus what this process has written since.

    The journal's bytes count whole: pruning keeps what is done below ``retention.FILL`` of the limit, so that only what
    is not done yet can reach it.

    Args:
        folder: of the journal.
        max_bytes: of the journal.
        min_free_bytes: to be left on its disk.
        clock: seconds.
    """

    def __init__(
        self, folder: Path, max_bytes: int, min_free_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._runs: dict[str, int] = {}
        self._journal_bytes = 0
        self._free_bytes = 0
        self._failed_at = -float("inf")
        self._failure = ""
        self.look()

    def look(self) -> None:
        """Measures; for any thread, once a second."""
        runs = retention.journal_bytes(self._folder)
        status = os.statvfs(self._folder)
        self._runs, self._journal_bytes = runs, sum(runs.values())
        self._free_bytes = status.f_bavail * status.f_frsize

    @property
    def is_short(self) -> bool:
        """Pruning should find as much as it can."""
        return self._journal_bytes >= retention.FILL * self._max_bytes

    def why_not(self, run: str, num_bytes: int) -> str | None:
        """Why so many bytes more, the next ones a run's, are not taken now; None when they are."""
        if self._clock() - self._failed_at < _PAUSE_SECONDS:
            return self._failure
        if self._journal_bytes + num_bytes > self._max_bytes:
            return f"the journal holds {self._journal_bytes} bytes that are not reduced yet, of {self._max_bytes}"
        of_run = self._runs.get(run, 0)
        if self._journal_bytes > _LAST_PART * self._max_bytes and of_run > _ONE_RUN * self._max_bytes:
            return (
                f"the journal holds {of_run} bytes of this run that are not reduced yet, of {self._max_bytes} for all"
            )
        if self._free_bytes - num_bytes < self._min_free_bytes:
            return f"the server's disk has {self._free_bytes} bytes left, {self._min_free_bytes} of which stay free"
        return None

    def took(self, run: str, num_bytes: int) -> None:
        self._runs[run] = self._runs.get(run, 0) + num_bytes
        self._journal_bytes += num_bytes
        self._free_bytes -= num_bytes

    def failed(self, error: OSError) -> None:
        self._failure = f"the server cannot write to its disk: {error.strerror or error}"
        self._failed_at = self._clock()
