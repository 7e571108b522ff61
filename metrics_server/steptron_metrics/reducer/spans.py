"""What is known of many iterations that mostly follow each other, in little room."""

from __future__ import annotations

from bisect import bisect_right


class Spans:
    """A number for each of many integers; neighbours of the same number take up the room of one.

    A run of a million iterations all of which were made from 4,096 ranks is one span.
    """

    __slots__ = ("_firsts", "_lasts", "_numbers")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        """Spans."""
        return len(self._firsts)

    def get(self, key: int) -> int | None:
        """The number of ``key``; None when it has none."""
        at = bisect_right(self._firsts, key) - 1
        return self._numbers[at] if at >= 0 and key <= self._lasts[at] else None

    def first(self) -> int | None:
        """The least key."""
        return self._firsts[0] if self._firsts else None

    def put(self, key: int, number: int) -> None:
        """Gives ``key`` a number, in place of the one it has."""
        at = bisect_right(self._firsts, key) - 1
        if at >= 0 and key <= self._lasts[at]:
            first, last, before = self._firsts[at], self._lasts[at], self._numbers[at]
            if before == number:
                return
            rest = [(first, key - 1, before), (key, key, number), (key + 1, last, before)]
            self._replace(at, at + 1, [span for span in rest if span[0] <= span[1]])
            at += first < key
        else:
            at += 1
            self._replace(at, at, [(key, key, number)])
        # The neighbours may go on with the same number.
        start = at - 1 if at > 0 and self._joins(at - 1) else at
        end = at + 1 if at + 1 < len(self._firsts) and self._joins(at) else at
        if start < end:
            self._replace(start, end + 1, [(self._firsts[start], self._lasts[end], number)])

    def _joins(self, at: int) -> bool:
        return self._lasts[at] + 1 == self._firsts[at + 1] and self._numbers[at] == self._numbers[at + 1]

    def _replace(self, start: int, end: int, spans: list[tuple[int, int, int]]) -> None:
        self._firsts[start:end] = [span[0] for span in spans]
        self._lasts[start:end] = [span[1] for span in spans]
        self._numbers[start:end] = [span[2] for span in spans]
