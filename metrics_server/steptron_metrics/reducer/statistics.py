"""Statistics of many items at once. Rows of results are those of ``results.STATISTICS``."""

from __future__ import annotations

import numpy as np

QUANTILES = (0.5, 0.99)
"""Median and p99, interpolated linearly between order statistics, as numpy's default does."""
_COLUMNS = 1 << 16
"""Samples of an item that are summed at a time, which bounds what float64 copies take up."""
# Sorting rows costs 1.2 ns a value up to 512 of them, from where numpy has no sorting network, and 8.5 at 2,048;
# sorting runs of 512 and looking for the quantiles around the same share of each 2.1. np.partition for the four order
# statistics costs 14 to 16, for one at a time 3 to 10 (AVX-512, numpy 2.4).
_RUN = 512
_AROUND = 48
"""To each side of where a quantile is expected in a run: four standard deviations for the median of a random one."""


class Moments:
    """What is summed over samples, float64 [items] each; samples that are NaN do not count."""

    def __init__(self, items: int) -> None:
        self.count = np.zeros(items)
        self.total = np.zeros(items)
        self.squares = np.zeros(items)
        self.low = np.full(items, np.inf)
        self.high = np.full(items, -np.inf)

    def add_samples(self, samples: np.ndarray) -> None:
        """Adds samples, float32 [items, n]."""
        for start in range(0, samples.shape[1], _COLUMNS):
            part = samples[:, start : start + _COLUMNS]
            exact = part.astype(np.float64)
            count = valid_counts(part)
            if (count == part.shape[1]).all():
                low, high = part.min(axis=1), part.max(axis=1)
            else:
                low, high = np.fmin.reduce(part, axis=1), np.fmax.reduce(part, axis=1)
                exact[np.isnan(exact)] = 0.0
            self.count += count
            self.total += exact.sum(axis=1)
            self.squares += np.vecdot(exact, exact)
            self.low, self.high = np.fmin(self.low, low), np.fmax(self.high, high)

    def add_folded(self, moments: np.ndarray, where: slice | np.ndarray) -> np.ndarray:
        """Adds what ranks have folded.

        Where the count is not positive, the minimum or the maximum is NaN, or a sum is NaN though all samples are
        finite, a rank has not measured the item.

        Args:
            moments: float32 [ranks, 5, width], rows as in ``description.MOMENTS``.
            where: which items these are.

        Returns:
            The ranks' means, float32 [ranks, width], NaN where a rank has not measured the item.
        """
        count, total, squares, low, high = moments.astype(np.float64).swapaxes(0, 1)
        broken = (np.isnan(total) | np.isnan(squares)) & np.isfinite(low) & np.isfinite(high)
        valid = (count > 0) & np.isfinite(count) & ~np.isnan(low) & ~np.isnan(high) & ~broken
        self.count[where] += np.where(valid, count, 0.0).sum(axis=0)
        self.total[where] += np.where(valid, total, 0.0).sum(axis=0)
        self.squares[where] += np.where(valid, squares, 0.0).sum(axis=0)
        self.low[where] = np.fmin(self.low[where], np.where(valid, low, np.inf).min(axis=0))
        self.high[where] = np.fmax(self.high[where], np.where(valid, high, -np.inf).max(axis=0))
        means: np.ndarray = np.divide(total, count, out=np.full(total.shape, np.nan), where=valid).astype(np.float32)
        return means

    def add(self, other: Moments) -> None:
        """Adds the moments of other samples of the same items."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.low, self.high = np.fmin(self.low, other.low), np.fmax(self.high, other.high)

    def statistics(self, quantiles: np.ndarray) -> np.ndarray:
        """float32 [7, items], with median and p99 as [2, items]."""
        measured = self.count > 0
        number = np.where(measured, self.count, np.nan)
        values = np.empty((7, len(measured)), np.float32)
        values[0] = self.count
        values[1], values[2] = self.total / number, np.sqrt(self.squares / number)
        values[3], values[5] = np.where(measured, self.low, np.nan), np.where(measured, self.high, np.nan)
        values[4], values[6] = quantiles
        return values


def valid_counts(samples: np.ndarray) -> np.ndarray:
    """int64 [items], how many of samples [items, n] are not NaN."""
    items, n = samples.shape
    absent = np.isnan(samples)
    return n - absent.sum(axis=1) if absent.any() else np.full(items, n)


def quantiles(samples: np.ndarray) -> np.ndarray:
    """float64 [2, items], median and p99 of samples, NaN without any.

    Args:
        samples: float32 [items, n], C-contiguous; their order is changed.
    """
    items, n = samples.shape
    count = valid_counts(samples)
    if n <= _RUN:
        return _by_sorting(samples, count)
    runs = -(-n // _RUN)
    length = n // runs
    ordered = samples[:, : runs * length].reshape(items, runs, length)
    ordered.sort(axis=2)
    rest = samples[:, runs * length :]
    both = np.empty((len(QUANTILES), items))
    missed = count < n
    for row, share in enumerate(QUANTILES):
        below = int(share * (n - 1))
        start = max(below * length // n - _AROUND, 0)
        end = min(start + 2 * _AROUND, length)
        window = np.concatenate([ordered[:, :, start:end].reshape(items, -1), rest], axis=1)
        window.sort(axis=1)
        first = below - runs * start
        both[row] = _interpolate(window[:, first], window[:, first + 1], share * (n - 1) - below)
        # Right where nothing to the left of the windows is larger, and nothing to their right smaller.
        if start > 0:
            missed |= ordered[:, :, start - 1].max(axis=1) > window[:, first]
        if end < length:
            missed |= ordered[:, :, end].min(axis=1) < window[:, first + 1]
    again = np.flatnonzero(missed)
    if again.size:
        both[:, again] = _by_sorting(samples[again], count[again])
    return both


def ragged(items: int, item: np.ndarray, values: np.ndarray) -> tuple[Moments, np.ndarray]:
    """Statistics of samples in any order.

    Args:
        items: their number.
        item: int64 [N], which item each sample is of.
        values: float32 [N], samples.

    Returns:
        moments, and float64 [2, items], median and p99.
    """
    present = ~np.isnan(values)
    item, values = item[present], values[present]
    order = np.lexsort((values, item))
    item, values = item[order], values[order]
    exact = values.astype(np.float64)
    moments = Moments(items)
    count = np.bincount(item, minlength=items)
    moments.count += count
    moments.total += np.bincount(item, weights=exact, minlength=items)
    moments.squares += np.bincount(item, weights=np.square(exact), minlength=items)
    first = np.cumsum(count) - count
    measured = np.flatnonzero(count)
    moments.low[measured] = values[first[measured]]
    moments.high[measured] = values[first[measured] + count[measured] - 1]
    return moments, _of_ordered(values, first, count)


def _by_sorting(samples: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``quantiles`` of samples of which ``count`` are not NaN."""
    items, n = samples.shape
    samples.sort(axis=1)
    return _of_ordered(samples.ravel(), np.arange(items) * n, count)


def _of_ordered(ordered: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Quantiles of items whose ``count`` samples lie in order from ``first`` on: float64 [2, items]."""
    both = np.full((len(QUANTILES), len(count)), np.nan)
    measured = np.flatnonzero(count)
    first, last = first[measured], count[measured] - 1
    for row, share in enumerate(QUANTILES):
        position = share * last
        below = position.astype(np.int64)
        low, high = ordered[first + below], ordered[first + np.minimum(below + 1, last)]
        both[row, measured] = _interpolate(low, high, position - below)
    return both


def _interpolate(low: np.ndarray, high: np.ndarray, fraction: np.ndarray | float) -> np.ndarray:
    """Not by the difference, which infinite neighbours would make NaN of."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    return np.where(np.equal(fraction, 0), low, (1 - fraction) * low + fraction * high)
