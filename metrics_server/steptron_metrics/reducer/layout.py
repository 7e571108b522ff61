"""Where series lie in a frame's values, for many ranks at once.

Most of what a rank measures its replicas measure too: their frames have *runs* of the same series, which are reduced
together. What it says of the matrices that it owns is its own: under ZeRO-1 each rank sends a few values for items that
no other rank has. These *own* series are small and many, and different in every description; they are kept as arrays,
to be reduced value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from steptron_metrics import catalogue
from steptron_metrics.protocol.description import Combination, Folding, Series

_OWN_SIZE = 64
"""A series of more values is worth being looked at as one."""
_OWN_SAMPLES = 2048
"""Of a description; beyond that they are no longer few. Parts of sums are added up as they come, and not limited."""


class Body:
    """A run of series that many descriptions have in common, but for the item of single values.

    Such as ``rank.compute_seconds``, of which each rank may send its own item: ranks of one body are reduced together.

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
        self.of_rank = np.array(
            [i for i, index in enumerate(self.singles) if _is_of_rank(series[index].metric)], np.int64
        )


class Run(NamedTuple):
    """A body in a description: where it begins among a frame's values, and int64 [len(body.singles)], which item the
    series with one item are of."""

    body: Body
    start: int
    firsts: np.ndarray


class Own(NamedTuple):
    """Own series of a description that are combined alike, each with one row.

    Attributes:
        keys: of each series, metric and layer.
        ends: int64 [series], the largest item, plus 1.
        series, items, at: int64 [values], which series and item a value is of, and where it lies in the frame.
    """

    keys: tuple[tuple[str, int], ...]
    ends: np.ndarray
    series: np.ndarray
    items: np.ndarray
    at: np.ndarray


class Layout(NamedTuple):
    """A description: number of values, runs, and own series by how they are combined."""

    size: int
    runs: tuple[Run, ...]
    own: dict[Combination, Own]


class Layouts:
    """Makes layouts; equal bodies are the same object.

    Args:
        parse: reads a serialized description.
        max_bytes: of serialized descriptions whose layouts are remembered; 4,096 ranks may have 20 MB of them.
    """

    def __init__(self, parse: Callable[[bytes], tuple[Series, ...]], max_bytes: int = 256 << 20) -> None:
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
        *offsets, size = accumulate((one.size for one in series), initial=0)
        own: dict[Combination, list[int]] = {}
        runs: list[Run] = []
        begin = samples = 0
        for index, one in enumerate(series):
            if not _is_own(one):
                continue
            if one.combination is Combination.SAMPLES:
                if samples + one.size > _OWN_SAMPLES:
                    continue
                samples += one.size
            own.setdefault(one.combination, []).append(index)
            if begin < index:
                runs.append(self._run(series[begin:index], offsets[begin]))
            begin = index + 1
        if begin < len(series):
            runs.append(self._run(series[begin:], offsets[begin]))
        return Layout(size, tuple(runs), {kind: _own(series, offsets, indices) for kind, indices in own.items()})

    def _run(self, series: Sequence[Series], start: int) -> Run:
        common = tuple(replace(one, first=0) if one.count == 1 and one.first else one for one in series)
        body = self._bodies.get(common)
        if body is None:
            body = self._bodies[common] = Body(common)
        return Run(body, start, np.array([series[index].first for index in body.singles], np.int64))


def _is_own(series: Series) -> bool:
    if series.rows > 1 or series.folding is not Folding.NONE or series.count > _OWN_SIZE:
        return False
    if series.count == 1 and _is_of_rank(series.metric):
        return False
    metric = catalogue.find(series.metric)
    return series.combination is not Combination.SAMPLES or (metric is not None and metric.by_role)


def _is_of_rank(name: str) -> bool:
    metric = catalogue.find(name)
    return metric is not None and metric.items == "rank"


def _own(series: Sequence[Series], offsets: Sequence[int], indices: Sequence[int]) -> Own:
    among = [series[index] for index in indices]
    count = np.array([one.count for one in among], np.int64)
    first = np.array([one.first for one in among], np.int64)
    of = np.repeat(np.arange(len(among)), count)
    within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    start = np.array([offsets[index] for index in indices], np.int64)
    return Own(
        tuple((one.metric, one.layer) for one in among), first + count, of, first[of] + within, start[of] + within
    )
