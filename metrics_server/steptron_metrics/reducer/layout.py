"""Where series lie in a frame's values, for many ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from steptron_metrics import catalogue
from steptron_metrics.protocol.description import Series


class Body:
    """What descriptions have in common that differ in nothing but the item of single values.

    Such as ``rank.compute_seconds``, of which each rank sends its own item: ranks of one body are reduced together.

    Attributes:
        series: those with one item have ``first`` 0.
        offsets: where each begins among the values.
        size: number of values.
        singles: indices of the series with one item.
        of_rank: int64, indices in ``singles`` of those whose item is the rank that sends them, by the catalogue.
    """

    __slots__ = ("of_rank", "offsets", "series", "singles", "size")

    def __init__(self, series: tuple[Series, ...]) -> None:
        self.series = series
        *self.offsets, self.size = accumulate((one.size for one in series), initial=0)
        self.singles = [index for index, one in enumerate(series) if one.count == 1]
        metrics = [catalogue.find(series[index].metric) for index in self.singles]
        self.of_rank = np.array([i for i, metric in enumerate(metrics) if metric and metric.items == "rank"], np.int64)


class Layout(NamedTuple):
    """A description: its body, and int64 [len(body.singles)], which item the series with one item are of."""

    body: Body
    firsts: np.ndarray


class Layouts:
    """Makes layouts; equal bodies are the same object.

    Args:
        parse: reads a serialized description.
        max_bytes: of serialized descriptions whose layouts are remembered.
    """

    def __init__(self, parse: Callable[[bytes], tuple[Series, ...]], max_bytes: int = 64 << 20) -> None:
        self._parse = parse
        self._max_bytes = max_bytes
        self._bytes = 0
        self._layouts: dict[bytes, Layout] = {}
        self._bodies: dict[tuple[Series, ...], Body] = {}

    def read(self, serialized: bytes) -> Layout:
        """The layout of a serialized description.

        Raises:
            ValueError: it is malformed.
        """
        layout = self._layouts.get(serialized)
        if layout is None:
            if self._bytes + len(serialized) > self._max_bytes:
                self._layouts.clear()
                self._bodies.clear()
                self._bytes = 0
            layout = self._layouts[serialized] = self.make(self._parse(serialized))
            self._bytes += len(serialized)
        return layout

    def make(self, series: tuple[Series, ...]) -> Layout:
        """The layout of a description."""
        common = tuple(replace(one, first=0) if one.count == 1 and one.first else one for one in series)
        body = self._bodies.get(common)
        if body is None:
            body = self._bodies[common] = Body(common)
        return Layout(body, np.array([series[index].first for index in body.singles], np.int64))
