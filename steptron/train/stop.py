"""Stopping a run from outside: the current step is finished and a checkpoint written first.

Light on purpose: the command line listens before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
from types import FrameType, TracebackType

STOPPED_EXIT_CODE = 75
"""Exit code of a run that was asked to stop and can be continued (sysexits' EX_TEMPFAIL)."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_INTERRUPTED = (
    b"\nsteptron: SIGINT: asked to stop; a run that has begun finishes its step and writes a checkpoint "
    b"(Ctrl-C once more ends it at once)\n"
)


class StopRequest:
    """A context in which SIGINT, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP only raise a flag.

    Those that follow change nothing, but for a second SIGINT (Ctrl-C), which raises KeyboardInterrupt. SIGHUP stays
    ignored where it was (nohup). Outside of the context, an object of this class is a request that never comes.

    Leaving the context restores the handlers; after a request, the signals are ignored instead: the process only has
    to end, with the exit code that it has decided on, and signals to stop come in twos (SLURM's).

    Attributes:
        received: the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self.received)

    def requested_anywhere(self) -> bool:
        """Whether any process of the run was asked to stop. Collective."""
        from steptron.platform.distributed import gather_to_all

        return any(gather_to_all(self.requested))

    def ignore_further(self) -> None:
        """From here on the process only has to end: whatever still comes must not change its exit code."""
        for number in self._previous:
            # Not the handler, which is gone before the interpreter has ended. The second Ctrl-C keeps its effect.
            if number != signal.SIGINT or number not in self.received:
                self._replace(number, signal.SIG_IGN)

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.requested:
            self.ignore_further()
        for number, handler in self._previous.items():
            self._replace(number, handler)

    def _replace(self, number: signal.Signals, handler: object) -> None:
        """Sets another handler, unless someone has done so before."""
        if signal.getsignal(number) == self._handle:
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.received:
            raise KeyboardInterrupt
        self.received.append(number)
        _let_go_of_lost_terminal()
        if number == signal.SIGINT:
            # Not print, which may be what was interrupted.
            with contextlib.suppress(OSError):
                os.write(2, _INTERRUPTED)


def _let_go_of_lost_terminal() -> None:
    """After a hang-up, what is printed goes nowhere: to fail there would cost the checkpoint."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
