"""A rule's eyes on one run: what it sees in an iteration, for the run's book of alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from steptron_metrics.alerts import text
from steptron_metrics.alerts.book import MANY, Book, Change, Sighting
from steptron_metrics.alerts.detector import Detector
from steptron_metrics.alerts.figures import events_of, figure_of
from steptron_metrics.alerts.loading import FIELDS
from steptron_metrics.alerts.rule import BLOCK, DerivedWatch, EventWatch, ItemsWatch, IterationWatch, Rule
from steptron_metrics.alerts.series import Block, Cells, HistorySource, IterationSource
from steptron_metrics.results import Alert, Iteration
from steptron_metrics.storage.base import Store

_MOST_LEVELS = 256
"""That are read of before what a state is made anew from, when the server has been restarted."""


class SeriesWatcher:
    """Watches items, or a derived figure, of all layers."""

    def __init__(self, rule: Rule) -> None:
        assert isinstance(rule.watch, ItemsWatch | DerivedWatch)
        self._rule, self._watch = rule, rule.watch
        self._cells, self._detector = Cells(), Detector(rule)

    def judge(self, iteration: Iteration, source: IterationSource, book: Book) -> list[Change]:
        blocks, companions = self._read(source)
        values, about, companion = self._row(blocks, companions, 0)
        step = self._detector.step(
            iteration.iteration, values, self._holds(companion), about if self._has_one_item else None
        )
        sight = partial(self._sighting, iteration.iteration, values, about, companion)
        ongoing = np.setdiff1d(np.flatnonzero(self._detector.active), step.began, assume_unique=True)
        return book.record(
            self._rule,
            iteration.iteration,
            iteration.ended_ns,
            [sight(cell) for cell in step.began.tolist()],
            [sight(cell) for cell in ongoing.tolist()],
            [sight(cell) for cell in step.ended.tolist()],
        )

    def restore(self, store: Store, run: str, last: int, alerts: Sequence[Alert], book: Book) -> None:
        """Makes the state anew as of the iteration ``last``, from what is stored of the run."""
        first = max(1, (last - self._rule.look_back) // BLOCK * BLOCK)
        own = [alert for alert in alerts if alert.rule == self._rule.name and alert.subject != MANY]
        own = [alert for alert in own if alert.ended_iteration is None or alert.ended_iteration >= first]
        self._remember(store, run, first)
        before = {alert.number: self._level_before(store, run, alert) for alert in own if alert.since_iteration < first}
        blocks, companions = self._read(HistorySource(store, run, first, last))
        for iteration in range(first, last + 1):
            for alert in own:
                if max(alert.since_iteration, first) == iteration:
                    self._hold(alert, before.get(alert.number))
            values, about, companion = self._row(blocks, companions, iteration - first)
            self._detector.step(iteration, values, self._holds(companion), about if self._has_one_item else None)
        for alert in book.open_alerts(self._rule.name):
            if alert.subject != MANY and not self._is_active(alert):
                self._hold(alert)
        if not book.is_open(self._rule.name, MANY):
            for cell in np.flatnonzero(self._detector.active).tolist():
                if not book.is_open(self._rule.name, self._subject(cell)):
                    # It cleared in the iteration that is not stored yet, or begins in the next one.
                    self._detector.active[cell] = False

    # ------------------------------------------------------------------------------------ values

    @property
    def _has_one_item(self) -> bool:
        return isinstance(self._watch, DerivedWatch) and self._watch.same_item

    def _read(self, source: IterationSource | HistorySource) -> tuple[list[Block], list[Block]]:
        blocks = source.items(self._watch) if isinstance(self._watch, ItemsWatch) else source.derived(self._watch)
        self._place(blocks)
        companion = self._rule.companion
        return blocks, [] if companion is None else source.items(companion.watch)

    def _place(self, blocks: Sequence[Block]) -> None:
        self._cells.place(blocks)
        self._detector.grow(len(self._cells))

    def _row(
        self, blocks: Sequence[Block], companions: Sequence[Block], row: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        values, about = self._cells.gather(blocks, row)
        return values, about, None if self._rule.companion is None else self._cells.align(companions, row)

    def _holds(self, values: np.ndarray | None) -> np.ndarray | None:
        companion = self._rule.companion
        if companion is None or values is None:
            return None
        return values > companion.above if companion.above is not None else values < (companion.below or 0.0)

    # ----------------------------------------------------------------------------------- sightings

    def _item(self, cell: int) -> int:
        """What the cell is about now: of a derived figure that follows one item, that item."""
        if isinstance(self._watch, ItemsWatch):
            return self._cells.item(cell)
        return int(self._detector.items[cell]) if self._has_one_item else -1

    def _subject(self, cell: int) -> str:
        metric = self._cells.metric(cell)
        with_role = isinstance(self._watch, ItemsWatch) and metric != self._watch.metric
        return text.subject(metric, self._cells.layer(cell), self._item(cell), with_role)

    def _sighting(
        self, iteration: int, values: np.ndarray, about: np.ndarray, companion: np.ndarray | None, cell: int
    ) -> Sighting:
        detector, layer, item = self._detector, self._cells.layer(cell), self._item(cell)
        value, threshold = float(values[cell]), float(detector.thresholds[cell])
        since = int(detector.since[cell])
        kind = text.item_kind(self._cells.metric(cell))
        # Named in the text even where the alert is the layer's.
        named = item if item >= 0 or not isinstance(self._watch, DerivedWatch) else int(about[cell])

        def fields() -> Mapping[str, str]:
            return dict.fromkeys(FIELDS, "") | {
                "value": text.figure(value),
                "threshold": text.figure(threshold),
                "baseline": text.figure(float(detector.baselines[cell])),
                "companion": "" if companion is None else text.figure(float(companion[cell])),
                "metric": self._cells.metric(cell),
                "where": text.where(self._cells.metric(cell), layer, item),
                "layer": str(layer),
                "item": str(named),
                "items": str(self._cells.siblings(cell)),
                "iteration": str(iteration),
                "since": str(since),
                "lasted": str(iteration - since + 1),
            }

        return Sighting(
            subject=self._subject(cell),
            layer=None if layer < 0 else layer,
            item=None if named < 0 or kind is None else named,
            since=since,
            value=None if np.isnan(value) else value,
            threshold=threshold,
            shows=detector.shows(cell),
            fields=fields,
        )

    # ------------------------------------------------------------------------------------ restore

    def _remember(self, store: Store, run: str, first: int, layer: int | None = None) -> None:
        """Takes in the levels of before ``first``."""
        begin = self._rule.warm_up + 1
        if self._rule.baseline is None or self._rule.baseline.best is None or first - begin < BLOCK:
            return
        # In blocks of 16 where these are not too many; coarser ones are levels on their own.
        number = (first - begin) // BLOCK + 2
        blocks = HistorySource(store, run, begin, first - 1, layer).levels(self._watch, min(number, _MOST_LEVELS))
        self._place(blocks)
        rows = [
            self._cells.gather([block for block in blocks if row < len(block.values)], row)[0]
            for row in range(max((len(block.values) for block in blocks), default=0))
        ]
        if rows:
            self._detector.remember(np.array(rows), are_blocks=number <= _MOST_LEVELS)

    def _level_before(self, store: Store, run: str, alert: Alert) -> float:
        """What the level was when an alert began, before all that the state is made anew from."""
        if self._rule.baseline is None:
            return float("nan")
        layer = -1 if alert.layer is None else alert.layer
        own, begin = SeriesWatcher(self._rule), alert.since_iteration
        first = max(1, (begin - self._rule.look_back) // BLOCK * BLOCK)
        own._remember(store, run, first, layer)
        blocks, companions = own._read(HistorySource(store, run, first, begin, layer))
        for iteration in range(first, begin + 1):
            values, about, companion = own._row(blocks, companions, iteration - first)
            own._detector.step(iteration, values, own._holds(companion), about if own._has_one_item else None)
        cells = own._cells_of(alert)
        return float(own._detector.baselines[cells[0]]) if cells else float("nan")

    def _cells_of(self, alert: Alert) -> list[int]:
        item = alert.item if isinstance(self._watch, ItemsWatch) else 0
        cells = self._cells.find(alert.layer, item)
        return [cell for cell in cells if self._has_one_item or self._subject(cell) == alert.subject]

    def _hold(self, alert: Alert, level: float | None = None) -> None:
        """``level``: before it began; None: the present one."""
        item = -1 if alert.item is None or not self._has_one_item else alert.item
        for cell in self._cells_of(alert):
            before = float(self._detector.baselines[cell]) if level is None else level
            self._detector.hold(cell, alert.threshold, alert.since_iteration, item, before)

    def _is_active(self, alert: Alert) -> bool:
        cells = [cell for cell in self._cells_of(alert) if self._detector.active[cell]]
        return any(self._subject(cell) == alert.subject for cell in cells)


class FigureWatcher:
    """Watches a figure of the iteration as a whole, or its events."""

    def __init__(self, rule: Rule) -> None:
        assert isinstance(rule.watch, IterationWatch | EventWatch)
        self._rule, self._watch = rule, rule.watch
        self._detector = Detector(rule)
        self._detector.grow(1)

    def judge(self, iteration: Iteration, source: IterationSource, book: Book) -> list[Change]:
        del source
        if isinstance(self._watch, EventWatch):
            name = self._watch.event
            value, detail = events_of(name, iteration)
        else:
            name = self._watch.iteration
            value, detail = figure_of(self._watch.iteration, iteration)
        step = self._detector.step(iteration.iteration, np.array([value], np.float64))
        detector = self._detector
        since, threshold = int(detector.since[0]), float(detector.thresholds[0])
        fields = dict.fromkeys(FIELDS, "") | {
            "value": text.figure(value),
            "threshold": text.figure(threshold),
            "metric": name,
            "where": "the run",
            "iteration": str(iteration.iteration),
            "since": str(since),
            "lasted": str(iteration.iteration - since + 1),
            "detail": detail,
        }
        measured = None if np.isnan(value) else value
        seen = [Sighting("run", None, None, since, measured, threshold, detector.shows(0), lambda: fields)]
        began, ended, active = bool(len(step.began)), bool(len(step.ended)), bool(detector.active[0])
        return book.record(
            self._rule,
            iteration.iteration,
            iteration.ended_ns,
            seen if began and not ended else [],
            seen if active and not began else [],
            seen if ended else [],
        )

    def restore(self, store: Store, run: str, last: int, alerts: Sequence[Alert], book: Book) -> None:
        """Nothing but whether its alert is open: a streak begins anew."""
        del store, run, last, alerts
        for alert in book.open_alerts(self._rule.name):
            self._detector.hold(0, alert.threshold, alert.since_iteration)


def watcher(rule: Rule) -> SeriesWatcher | FigureWatcher:
    return FigureWatcher(rule) if isinstance(rule.watch, IterationWatch | EventWatch) else SeriesWatcher(rule)
