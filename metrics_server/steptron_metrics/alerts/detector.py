"""Decides which of many series are beyond a rule's threshold, and for how long.

A series ("cell") is an item of a layer, or a layer; all cells of a rule go through the same few array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptron_metrics.alerts.rule import BLOCK, Rule

_BEST_OF = 4
"""Blocks whose median may be the best level: one alone may be so by chance."""


@dataclass(frozen=True)
class Step:
    """What an iteration changed.

    Attributes:
        began, ended: int64 indices of cells whose condition began to hold for good, or ended for good.
    """

    began: np.ndarray
    ended: np.ndarray


class Detector:
    """The state of one rule for one run: arrays over cells.

    Its state after an iteration follows from the values of the last ``rule.look_back`` iterations, from which cells
    were active in them, and from the levels before, so that it can be made anew from stored values.

    Attributes:
        active: bool [cells], the condition holds until it has cleared.
        thresholds: float64 [cells], of active cells what they are held against; of others, what they would be.
        baselines: float64 [cells], the level that decides, of active cells as it was when they became so; NaN without.
        since: int64 [cells], the iteration in which the latest streak began.
        items: int64 [cells], what the streak or the active condition is about where that can change; -1: unknown.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._block = -1
        self._blocks = 0 if rule.baseline is None else rule.baseline.blocks
        self.active = np.zeros(0, bool)
        self.thresholds, self.baselines = np.zeros(0), np.zeros(0)
        self.since = np.zeros(0, np.int64)
        self.items = np.zeros(0, np.int64)
        self._streak, self._calm = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._sums, self._counts = np.zeros(0), np.zeros(0, np.int32)
        self._ring = np.zeros((self._blocks, 0), np.float32)
        self._following, self._best = np.zeros(0), np.zeros(0)

    @property
    def cells(self) -> int:
        return len(self.active)

    def grow(self, cells: int) -> None:
        """Makes room for more cells behind those that are there."""
        more = cells - self.cells
        if more <= 0:
            return

        def longer(array: np.ndarray, fill: float) -> np.ndarray:
            return np.concatenate([array, np.full(more, fill, array.dtype)])

        self.active = longer(self.active, False)
        self.thresholds, self.baselines = longer(self.thresholds, np.nan), longer(self.baselines, np.nan)
        self.since, self.items = longer(self.since, 0), longer(self.items, -1)
        self._streak, self._calm = longer(self._streak, 0), longer(self._calm, 0)
        self._sums, self._counts = longer(self._sums, 0), longer(self._counts, 0)
        self._following, self._best = longer(self._following, np.nan), longer(self._best, np.nan)
        self._ring = np.concatenate([self._ring, np.full((self._blocks, more), np.nan, np.float32)], axis=1)

    def hold(self, cell: int, threshold: float, since: int, item: int = -1, baseline: float = np.nan) -> None:
        """Makes a cell active, as it was before a restart."""
        self.active[cell] = True
        self.baselines[cell] = baseline
        self.thresholds[cell] = threshold
        self.since[cell] = since
        self.items[cell] = item
        self._calm[cell] = 0

    def remember(self, levels: np.ndarray, are_blocks: bool) -> None:
        """Takes in the best of levels from before the iterations that it is made anew from.

        Args:
            levels: float64 [levels, cells] in order.
            are_blocks: each is of 16 iterations, else of many more.
        """
        together = _BEST_OF if are_blocks else 1
        for end in range(together, len(levels) + 1):
            with np.errstate(invalid="ignore", divide="ignore"):
                self._keep_best(np.log(levels[end - together : end]))

    def shows(self, cell: int) -> bool:
        """Whether the condition is seen still, that is, its value has not come back."""
        return bool(self._calm[cell] == 0)

    def step(
        self,
        iteration: int,
        values: np.ndarray,
        holds: np.ndarray | None = None,
        items: np.ndarray | None = None,
    ) -> Step:
        """Takes in an iteration; later ones have larger numbers.

        Args:
            values: float64 [cells]; NaN where nothing was measured, which neither adds to a streak nor ends it.
            holds: bool [cells], whether the companion's condition holds.
            items: int64 [cells], the item that each value is about, where that can change: a streak is of one item. -1:
                unknown.
        """
        rule = self._rule
        self._enter_block(iteration)
        measured = ~np.isnan(values)
        limits, levels = self._limits(iteration)
        beyond = measured & (values < limits if rule.is_below else values > limits)
        counted = beyond if holds is None else beyond & holds
        elsewhere = np.zeros(self.cells, bool)
        if items is not None:
            elsewhere = measured & (items != self.items) & (items >= 0) & (self.items >= 0)
            self._streak[elsewhere & ~self.active] = 0
            self.items = np.where(measured & (items >= 0) & ~self.active, items, self.items)
        self.since[counted & (self._streak == 0) & ~self.active] = iteration
        self._streak = np.where(counted, self._streak + 1, np.where(measured, 0, self._streak)).astype(np.int32)
        began = ~self.active & (self._streak >= rule.for_iterations)
        self.thresholds = np.where(self.active, self.thresholds, limits)
        self.baselines = np.where(self.active, self.baselines, levels)

        # It ends when its value is back, or when the figure is about something else now.
        back = values >= self.thresholds / rule.clear_at if rule.is_below else values <= self.thresholds * rule.clear_at
        calm = self.active & measured & (back | elsewhere)
        self._calm = np.where(calm, self._calm + 1, np.where(self.active & ~measured, self._calm, 0)).astype(np.int32)
        ended = self.active & (self._calm >= rule.clear_for)

        self.active = (self.active | began) & ~ended
        self._streak[ended] = 0
        self._collect(iteration, values, measured & ~beyond & ~self.active)
        return Step(np.flatnonzero(began), np.flatnonzero(ended))

    def _limits(self, iteration: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [cells] each: what a value has to be beyond, NaN where nothing is, and the level that decides it."""
        rule = self._rule
        levels = np.full(self.cells, np.nan)
        if rule.baseline is None:
            limits = np.full(self.cells, np.nan if rule.threshold is None else rule.threshold)
        else:
            times, levels = self._beyond(rule.baseline.times), self._following
            limits = levels * times
            if rule.baseline.best is not None:
                long_ago = self._best * self._beyond(rule.baseline.best)
                nearer = (long_ago > limits if rule.is_below else long_ago < limits) | np.isnan(limits)
                levels, limits = np.where(nearer, self._best, levels), np.where(nearer, long_ago, limits)
            if rule.threshold is not None:
                # NaN stays: without a level only `before` and `regardless` decide.
                limits = np.minimum(limits, rule.threshold) if rule.is_below else np.maximum(limits, rule.threshold)
            if rule.baseline.before is not None:
                limits = np.where(np.isnan(limits), rule.baseline.before, limits)
        if iteration <= rule.warm_up:
            limits = np.full(self.cells, np.nan)
        if rule.regardless is not None:
            limits = (np.fmax if rule.is_below else np.fmin)(limits, rule.regardless)
        return limits, levels

    def _beyond(self, times: float) -> float:
        return 1 / times if self._rule.is_below else times

    def _enter_block(self, iteration: int) -> None:
        """Closes the block before this iteration's, if it is another one."""
        if self._rule.baseline is None:
            return
        block = iteration // BLOCK
        if block == self._block:
            return
        if self._block >= 0:
            with np.errstate(invalid="ignore", divide="ignore"):
                # Half a block at least: fewer values are no level.
                level = np.where(self._counts * 2 >= BLOCK, self._sums / self._counts, np.nan)
            for skipped in range(max(self._block, block - self._blocks), block):
                self._ring[skipped % self._blocks] = level if skipped == self._block else np.nan
            median = _median_of_known(self._ring)
            enough = np.isfinite(self._ring).sum(axis=0) >= 2
            self._following = np.where(enough, np.exp(median), np.nan)
            self._keep_best(self._ring[np.arange(block - _BEST_OF, block) % self._blocks])
        self._sums[:] = 0
        self._counts[:] = 0
        self._block = block

    def _keep_best(self, latest: np.ndarray) -> None:
        """``latest``: float [blocks, cells], logarithms of levels."""
        level = np.exp(_median_of_known(latest))
        level = np.where(np.isfinite(latest).sum(axis=0) > len(latest) // 2, level, np.nan)
        self._best = (np.fmax if self._rule.is_below else np.fmin)(self._best, level)

    def _collect(self, iteration: int, values: np.ndarray, usable: np.ndarray) -> None:
        if self._rule.baseline is None or iteration <= self._rule.warm_up:
            return
        usable = usable & np.isfinite(values) & (values > 0)
        self._sums += np.where(usable, np.log(np.where(usable, values, 1.0)), 0.0)
        self._counts += usable


def _median_of_known(values: np.ndarray) -> np.ndarray:
    """float64 [...]: median over the first axis of the values that are not NaN; NaN where all are.

    Like ``numpy.nanmedian``, which takes ten times as long for many short columns.
    """
    known = np.sum(~np.isnan(values), axis=0)
    ordered = np.sort(values, axis=0).astype(np.float64)  # NaN last
    middle = np.maximum(known, 1)
    low, high = (np.take_along_axis(ordered, index[np.newaxis], 0)[0] for index in ((middle - 1) // 2, middle // 2))
    # Not their mean where they are the same: infinity and itself.
    return np.where(known > 0, np.where(low == high, low, (low + high) / 2), np.nan)
