"""Arithmetic on intervals of time, nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""Start and end; the end is not part of it."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as ascending intervals that neither overlap nor touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Moments in both; the arguments and the result are as `union` returns them."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Moments in the first alone; the arguments and the result are as `union` returns them."""
    left, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """Nanoseconds in intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
