"""What rules look at: the values of their series, of an iteration that was just reduced or of stored ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steptron_metrics.alerts.rule import DerivedWatch, ItemsWatch, Relative
from steptron_metrics.catalogue import Statistic
from steptron_metrics.reducer.peers import over_others
from steptron_metrics.results import STATISTICS, Aggregate, Iteration
from steptron_metrics.storage.base import Store

_STAGE = "rank.stage"
_UNKNOWN = np.empty(0, np.float32)


@dataclass(frozen=True)
class Block:
    """Values of neighbouring series.

    Attributes:
        metric, layer: which.
        values: float32 [iterations, items] as stored, NaN where nothing was measured.
        relative_to: what they are to be divided by.
        about: int64 [iterations, items], the item that a derived figure is about, -1 where that is unknown; None of
            items.
    """

    metric: str
    layer: int
    values: np.ndarray
    relative_to: Relative = "none"
    about: np.ndarray | None = None

    @property
    def width(self) -> int:
        return int(self.values.shape[1])


class IterationSource:
    """The iteration that is being judged."""

    def __init__(self, iteration: Iteration) -> None:
        self._by_metric: dict[str, list[Aggregate]] = defaultdict(list)
        for aggregate in iteration.aggregates:
            self._by_metric[aggregate.metric].append(aggregate)
        self._derived = {derived.name: derived for derived in iteration.derived}
        self._stages = {one.layer: _row(one, "mean") for one in self._by_metric.get(_STAGE, ())}

    def items(self, watch: ItemsWatch) -> list[Block]:
        blocks = []
        for metric in _matching(watch.metric, self._by_metric):
            for aggregate in self._by_metric[metric]:
                values = _row(aggregate, watch.statistic)[np.newaxis]
                if watch.relative_to == "stage":
                    values = _beside(values, self._stages.get(aggregate.layer, _UNKNOWN)[np.newaxis])
                blocks.append(Block(metric, aggregate.layer, values, watch.relative_to))
        return blocks

    def derived(self, watch: DerivedWatch) -> list[Block]:
        found = self._derived.get(watch.derived)
        if found is None:
            return []
        items = found.items.astype(np.int64)
        return [
            Block(found.name, int(layer), found.values[[index], np.newaxis], about=items[[index], np.newaxis])
            for index, layer in enumerate(found.layers)
        ]


class HistorySource:
    """Stored iterations ``first`` to ``last`` of a run, of all layers or one."""

    def __init__(self, store: Store, run: str, first: int, last: int, layer: int | None = None) -> None:
        self._store, self._run, self._first, self._last = store, run, first, last
        self._layers = {
            info.metric: tuple(one for one in info.layers if layer in (None, one)) for info in store.metrics(run)
        }
        self._layer = layer
        self._names = set(store.derived_names(run))

    def items(self, watch: ItemsWatch) -> list[Block]:
        blocks = []
        for metric in _matching(watch.metric, self._layers):
            for layer in self._layers[metric]:
                points = self._store.points(
                    self._run, metric, layer, watch.statistic, self._first, self._last, self._length
                )
                values = self._spread(points.first, points.values)
                if watch.relative_to == "stage":
                    values = _beside(values, self._stages(layer))
                blocks.append(Block(metric, layer, values, watch.relative_to))
        return blocks

    def levels(self, watch: ItemsWatch | DerivedWatch, most: int) -> list[Block]:
        """Rolled up to at most so many rows."""
        if isinstance(watch, DerivedWatch):
            if watch.derived not in self._names:
                return []
            points = self._store.derived(self._run, watch.derived, self._first, self._last, most)
            return [
                Block(watch.derived, int(layer), points.values[:, [index]]) for index, layer in enumerate(points.layers)
            ]
        return [
            Block(
                metric,
                layer,
                self._store.points(self._run, metric, layer, watch.statistic, self._first, self._last, most).values,
                watch.relative_to,
            )
            for metric in _matching(watch.metric, self._layers)
            for layer in self._layers[metric]
        ]

    def _stages(self, layer: int) -> np.ndarray:
        if layer not in self._layers.get(_STAGE, ()):
            return np.broadcast_to(_UNKNOWN, (self._length, 0))
        points = self._store.points(self._run, _STAGE, layer, "mean", self._first, self._last, self._length)
        return self._spread(points.first, points.values)

    def derived(self, watch: DerivedWatch) -> list[Block]:
        if watch.derived not in self._names:
            return []
        points = self._store.derived(self._run, watch.derived, self._first, self._last, self._length)
        values = self._spread(points.first, points.values)
        unknown = np.full((self._length, 1), -1, np.int64)
        return [
            Block(watch.derived, int(layer), values[:, [index]], about=unknown)
            for index, layer in enumerate(points.layers)
            if self._layer in (None, int(layer))
        ]

    @property
    def _length(self) -> int:
        return self._last - self._first + 1

    def _spread(self, iterations: np.ndarray, values: np.ndarray) -> np.ndarray:
        """A row for every iteration, NaN for those that are not stored."""
        spread = np.full((self._length, values.shape[1]), np.nan, np.float32)
        spread[iterations - self._first] = values
        return spread


Source = IterationSource | HistorySource


class Cells:
    """Places of a rule's series in its detector's arrays, in the order in which they first appear."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self._metrics: list[str] = []
        self._layers: list[int] = []
        self._items: list[int] = []

    def __len__(self) -> int:
        return len(self._metrics)

    def place(self, blocks: Iterable[Block]) -> None:
        """Gives places to series that have none."""
        for block in blocks:
            segments = self._runs.setdefault((block.metric, block.layer), [])
            known = sum(number for _, _, number in segments)
            more = block.width - known
            if more > 0:
                segments.append((len(self), known, more))
                self._metrics += [block.metric] * more
                self._layers += [block.layer] * more
                self._items += range(known, known + more)

    def gather(self, blocks: Sequence[Block], row: int) -> tuple[np.ndarray, np.ndarray]:
        """Of one of the blocks' iterations: float64 [cells] values, and int64 [cells] of what they are about or -1."""
        values, about = np.full(len(self), np.nan), np.full(len(self), -1, np.int64)
        for block in blocks:
            own = relate(block.values[row], block.relative_to)
            for start, first, number in self._runs[block.metric, block.layer]:
                end = min(first + number, block.width)
                if first < end:
                    values[start : start + end - first] = own[first:end]
                    if block.about is not None:
                        about[start : start + end - first] = block.about[row, first:end]
        return values, about

    def align(self, blocks: Sequence[Block], row: int) -> np.ndarray:
        """float64 [cells]: of another metric the values of the same layers and items."""
        by_layer = {block.layer: relate(block.values[row], block.relative_to) for block in blocks}
        values = np.full(len(self), np.nan)
        for (_, layer), segments in self._runs.items():
            other = by_layer.get(layer, values[:0])
            for start, first, number in segments:
                end = min(first + number, len(other))
                if first < end:
                    values[start : start + end - first] = other[first:end]
        return values

    def find(self, layer: int | None, item: int | None) -> list[int]:
        """Cells of a layer and item of any metric."""
        wanted, place = -1 if layer is None else layer, item or 0
        return [
            start + place - first
            for (_, own), segments in self._runs.items()
            if own == wanted
            for start, first, number in segments
            if first <= place < first + number
        ]

    def metric(self, cell: int) -> str:
        return self._metrics[cell]

    def layer(self, cell: int) -> int:
        return self._layers[cell]

    def item(self, cell: int) -> int:
        return self._items[cell]

    def siblings(self, cell: int) -> int:
        """Number of items of the cell's metric and layer."""
        return sum(number for _, _, number in self._runs[self._metrics[cell], self._layers[cell]])


def relate(values: np.ndarray, relative_to: Relative) -> np.ndarray:
    """float64 [items]: divided by the median or mean of the known ones.

    All NaN where half of them or fewer are known, or their median or mean is not greater than zero.
    """
    values = values.astype(np.float64)
    if relative_to in ("none", "stage"):  # the latter are so already
        return values
    known = values[~np.isnan(values)]
    if len(known) * 2 <= len(values):
        return np.full_like(values, np.nan)
    level = float(np.median(known) if relative_to == "median" else np.mean(known))
    if not (0 < level < np.inf):
        return np.full_like(values, np.nan)
    return values / level


def _row(aggregate: Aggregate, statistic: Statistic) -> np.ndarray:
    """float32 [items], NaN where nothing was measured."""
    return np.where(aggregate.values[0] > 0, aggregate.values[STATISTICS.index(statistic)], np.nan)


def _beside(values: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """[iterations, ranks]: over the median of the other ranks of the same stage; ``stages`` may have fewer ranks."""
    width = values.shape[1]
    known = np.full(values.shape, np.nan)
    known[:, : min(width, stages.shape[1])] = stages[:, :width]
    return np.array([over_others(*both) for both in zip(values, known, strict=True)]).reshape(values.shape)


def _matching(wanted: str, metrics: Iterable[str]) -> list[str]:
    """The metric, or those by role whose name begins with it."""
    return sorted(metric for metric in metrics if metric == wanted or metric.rpartition(".")[0] == wanted)
