"""What goes wrong, told without flooding the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("steptron_metrics.client")


class Reports:
    """The last error, and warnings.

    Args:
        warn: gets each warning, on a thread of the client's; None: the log of ``steptron_metrics.client``.
        every: seconds between two warnings of one kind at least.
    """

    def __init__(self, warn: Callable[[str], None] | None, every: float) -> None:
        self._warn = warn or logger.warning
        self._every = every
        self._last: dict[str, float] = {}
        self.last_error: str | None = None

    def error(self, kind: str, message: str) -> None:
        """Remembers what went wrong, and warns unless the last warning of this kind is fresh."""
        self.last_error = message
        self.warn(kind, message)

    def warn(self, kind: str, message: str, always: bool = False) -> bool:
        """Warns unless the last warning of this kind is fresh; returns whether it did."""
        now = time.monotonic()
        if not always and now - self._last.get(kind, -self._every) < self._every:
            return False
        self._last[kind] = now
        try:
            self._warn(message)
        except Exception:
            # The trainer's callback must not stop what sends its frames.
            logger.exception("the callback for warnings failed")
        return True
