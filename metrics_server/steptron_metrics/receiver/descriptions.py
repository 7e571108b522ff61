"""Descriptions that open connections have sent; equal ones are kept once."""

from __future__ import annotations

import weakref

from steptron_metrics.protocol.description import Limits, Series, parse
from steptron_metrics.receiver.moments import folded_of

MAX_BYTES = 512 << 20


class NoRoom(Exception):
    """The process holds as many descriptions as it may."""


class Known:
    """A description that has been checked: its bytes, and what they come to.

    Attributes:
        series: what it says, until somebody has taken that; it takes up much more room than the bytes.
    """

    __slots__ = ("__weakref__", "content", "folded", "num_bytes", "series")

    def __init__(self, content: bytes, series: tuple[Series, ...]) -> None:
        self.content = content
        self.num_bytes = 4 * sum(one.size for one in series)
        self.folded = folded_of(series)
        self.series: tuple[Series, ...] | None = series


class Descriptions:
    """All of a process; each lives as long as somebody holds it.

    Args:
        limits: of a description.
        max_bytes: of all of them.
    """

    def __init__(self, limits: Limits, max_bytes: int = MAX_BYTES) -> None:
        self._limits = limits
        self._max_bytes = max_bytes
        self._known: weakref.WeakValueDictionary[bytes, Known] = weakref.WeakValueDictionary()
        self._num_bytes = 0

    def find(self, content: bytes) -> Known | None:
        return self._known.get(content)

    def check(self, content: bytes) -> Known:
        """Reads a description, which is not kept yet; to be called by any thread.

        Raises:
            ValueError: it is malformed or beyond the limits.
        """
        return Known(content, parse(content, self._limits))

    def series(self, known: Known) -> tuple[Series, ...]:
        """What a description says; to be called by any thread."""
        return known.series or parse(known.content, self._limits)

    def add(self, checked: Known) -> Known:
        """Keeps one that ``check`` has passed; the one to be used, which may have come meanwhile.

        Raises:
            NoRoom: there are too many.
        """
        known = self._known.get(checked.content)
        if known is None:
            size = len(checked.content)
            if self._num_bytes + size > self._max_bytes:
                raise NoRoom("too many descriptions over all connections: try again later")
            known = self._known[checked.content] = checked
            self._num_bytes += size
            weakref.finalize(known, self._released, size)
        return known

    def _released(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
