"""Stopping a run from outside: the current step is finished and a checkpoint written first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOPPED_EXIT_CODE = 75
"""Exit code of a run that was asked to stop and can be continued (sysexits' EX_TEMPFAIL)."""


class StopRequest:
    """A context in which the first SIGINT, SIGTERM or SIGUSR1 (SLURM's warning) only raises a flag for the loop.

    A second one has its usual effect.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
