"""Checks what clients have folded: a count that is none, or a minimum above the maximum, would spoil an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from steptron_metrics.protocol.description import MOMENTS, Folding, Series

MAX_COUNT = 1 << 24
"""Counts are exact in float32 up to here."""


class Moments:
    """Where a description has folded values. Descriptions that have them in the same places share one.

    Attributes:
        index: int64 [4, items]: where, from the first, counts, sums of squares, minima and maxima lie.
    """

    __slots__ = ("__weakref__", "index")

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        """
        Args:
            spans: of each series, where it begins and its number of items.
        """
        starts = np.repeat([start for start, _ in spans], [count for _, count in spans])
        strides = np.repeat([count for _, count in spans], [count for _, count in spans])
        items = np.concatenate([np.arange(count) for _, count in spans])
        rows = np.array([[MOMENTS.index(name)] for name in ("count", "sum_of_squares", "min", "max")])
        self.index = starts + rows * strides + items

    def are_possible(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Whether values can be moments; NaN is not measured.

        Args:
            values: of each frame, float32, from the first folded one on.

        Returns:
            bool [frames].
        """
        count, squares, low, high = np.stack([one.take(self.index) for one in values], axis=1)
        # Each of these is false for NaN.
        wrong = (count < 0) | (count > MAX_COUNT) | (np.floor(count) < count)
        wrong |= (squares < 0) | ((low > high) & (count > 0))
        possible: np.ndarray = ~wrong.any(axis=1)
        return possible


_known: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], Moments] = weakref.WeakValueDictionary()


def folded_of(series: Sequence[Series]) -> tuple[int, Moments] | None:
    """The first folded value of a description, and where all are from there on; None where there is none."""
    spans = []
    at = 0
    for one in series:
        if one.folding is Folding.MOMENTS:
            spans.append((at, one.count))
        at += one.size
    if not spans:
        return None
    first = spans[0][0]
    key = tuple((start - first, count) for start, count in spans)
    moments = _known.get(key)
    if moments is None:
        moments = _known.setdefault(key, Moments(key))
    return first, moments


def what_is_wrong(series: Sequence[Series], values: np.ndarray) -> str:
    """In words, of values that ``are_possible`` does not like, float32 [sizes of the series]."""
    at = 0
    for one in series:
        if one.folding is Folding.MOMENTS:
            moments = values[at : at + one.size].reshape(len(MOMENTS), one.count)
            for item, (count, _, squares, low, high) in enumerate(moments.T.tolist(), one.first):
                where = f"values: {one.metric} of layer {one.layer}, item {item}"
                if count < 0 or count > MAX_COUNT or count % 1 > 0:
                    return f"{where}: a count of {count:g}, expected an integer from 0 to 2^24"
                if squares < 0:
                    return f"{where}: a sum of squares of {squares:g}"
                if count > 0 and low > high:
                    return f"{where}: a minimum of {low:g} and a maximum of {high:g}"
        at += one.size
    return "values: impossible moments"
