"""What a command does when it is asked to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Lets SIGTERM unwind like Ctrl-C does, so that nothing half-written stays."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
