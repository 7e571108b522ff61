"""Descriptions that open connections have sent; equal ones are kept once."""

from __future__ import annotations

import weakref

from steptron_metrics.protocol.description import Limits, parse

MAX_BYTES = 512 << 20


class NoRoom(Exception):
    """The process holds as many descriptions as it may."""


class Known:
    """A description that has been checked: its bytes, and how many bytes of values it stands for."""

    __slots__ = ("__weakref__", "content", "num_bytes")

    def __init__(self, content: bytes, num_bytes: int) -> None:
        self.content = content
        self.num_bytes = num_bytes


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

    def check(self, content: bytes) -> int:
        """Bytes of the values of a description; to be called by any thread.

        Raises:
            ValueError: it is malformed or beyond the limits.
        """
        return 4 * sum(series.size for series in parse(content, self._limits))

    def add(self, content: bytes, num_bytes: int) -> Known:
        """Keeps one that ``check`` has passed.

        Raises:
            NoRoom: there are too many.
        """
        known = self._known.get(content)
        if known is None:
            if self._num_bytes + len(content) > self._max_bytes:
                raise NoRoom("too many descriptions over all connections: try again later")
            known = Known(content, num_bytes)
            self._known[content] = known
            self._num_bytes += len(content)
            weakref.finalize(known, self._released, len(content))
        return known

    def _released(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
