"""Blending datasets by weight: which dataset sample n comes from, for any n, without drift."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from steptron.data.errors import DataError

# Longest period of the schedule, samples. A longer one follows odd weights more closely but takes
# longer to lay out (about 0.3 s for this one).
MAX_PERIOD = 2**18


class Blend:
    """Deals samples out to datasets so that every prefix keeps the weighted shares within one sample.

    The j-th sample of a dataset with share p (j from 0) may be dealt from position floor(j/p) on, when
    one more does not put the dataset a whole sample ahead, and must be dealt by position
    ceil((j+1)/p) - 1, before it is a whole sample behind. Dealing the sample with the earliest
    deadline among those that may be dealt keeps every window, whatever the shares (S. K. Baruah et
    al., "Proportionate progress", Algorithmica 15 (1996); R. Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32 (1980)). Taking the dataset with the largest deficit, as is
    common, does not: ten weights of 1 and ten of 9 take it 1.3 samples off.

    Shares are fractions with one common denominator, the period: the schedule repeats, so position n
    follows from n modulo the period. The denominator is the smallest up to ``MAX_PERIOD`` that
    represents the weights exactly (1:3 repeats after 4 samples), else the one nearest to them.

    Attributes:
        counts_per_period: samples of each dataset in a period; ``counts_per_period[d] / period`` is
            its share.
        period: their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """
        Args:
            weights: positive, any scale.

        Raises:
            DataError: a weight is so small that its dataset would hardly ever be used.
        """
        shares_D = np.asarray(weights, np.float64) / np.sum(weights)
        self.counts_per_period = _common_fractions(shares_D)
        self.period = sum(self.counts_per_period)
        if min(self.counts_per_period) == 0:
            number = self.counts_per_period.index(0)
            raise DataError(
                f"dataset {number} of the blend has a share of {shares_D[number]:.2g}; "
                f"shares below 1/{MAX_PERIOD} cannot be honoured: raise its weight or leave it out"
            )

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where samples [first, first + count) come from.

        Returns:
            int64 [count], the dataset, and int64 [count], the number of the sample within the dataset.
        """
        periods_N, phases_N = np.divmod(np.arange(first, first + count), self.period)
        datasets_P, occurrences_P = self._schedule
        datasets_N = datasets_P[phases_N].astype(np.int64)
        return datasets_N, periods_N * np.array(self.counts_per_period)[datasets_N] + occurrences_P[phases_N]

    def taken(self, count: int) -> list[int]:
        """Samples of each dataset among the first ``count``."""
        periods, phase = divmod(count, self.period)
        begun = np.bincount(self._schedule[0][:phase], minlength=len(self.counts_per_period)).tolist()
        return [periods * whole + part for whole, part in zip(self.counts_per_period, begun, strict=True)]

    def prefix_within(self, available: Sequence[int]) -> int:
        """Length of the longest prefix that takes no more than ``available[d]`` samples of each dataset d."""
        ends = []
        for number, samples in enumerate(available):
            # The prefix ends where sample number `samples` of this dataset would be dealt.
            periods, occurrence = divmod(samples, self.counts_per_period[number])
            ends.append(periods * self.period + int(np.flatnonzero(self._schedule[0] == number)[occurrence]))
        return min(ends)

    @cached_property
    def _schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """Dataset, int16, and number of the sample within dataset and period, int32, by position in the period."""
        datasets_P = np.empty(self.period, np.int16)
        occurrences_P = np.empty(self.period, np.int32)
        dealt = [0] * len(self.counts_per_period)
        waiting = [(0, number) for number in range(len(dealt))]  # heap of (first position, dataset)
        ready: list[tuple[int, int]] = []  # heap of (last position, dataset)
        for position in range(self.period):
            while waiting and waiting[0][0] <= position:
                _, number = heapq.heappop(waiting)
                # ceil((j+1)/p) - 1 with p = counts/period
                last = -(-(dealt[number] + 1) * self.period // self.counts_per_period[number]) - 1
                heapq.heappush(ready, (last, number))
            _, number = heapq.heappop(ready)
            datasets_P[position] = number
            occurrences_P[position] = dealt[number]
            dealt[number] += 1
            heapq.heappush(waiting, (dealt[number] * self.period // self.counts_per_period[number], number))
        return datasets_P, occurrences_P


def _common_fractions(shares_D: np.ndarray) -> list[int]:
    """Numerators of the fractions nearest to the shares with a common denominator, their sum, up to ``MAX_PERIOD``."""
    rounding = 1e-15
    # Most weights are short decimals: the first search is over quickly and finds them.
    for longest in (1024, MAX_PERIOD):
        errors_Q = _errors_by_denominator(shares_D, longest)
        if longest == MAX_PERIOD or errors_Q.min() <= rounding:
            break
    if not np.isfinite(errors_Q).any():
        return _largest_remainders(shares_D)
    best = int(np.flatnonzero(errors_Q <= max(errors_Q.min(), rounding))[0]) + 1
    return [int(value) for value in np.rint(shares_D * best)]


def _errors_by_denominator(shares_D: np.ndarray, longest: int) -> np.ndarray:
    """Largest error of any share, rounded to the denominators 1, ..., ``longest``; infinite where the
    rounded shares do not add up to 1 or leave a dataset out."""
    denominators_Q = np.arange(1, longest + 1)
    errors_Q = np.zeros(longest)
    sums_Q = np.zeros(longest)
    for share in shares_D:
        numerators_Q = np.rint(share * denominators_Q)
        errors_Q = np.maximum(errors_Q, np.abs(numerators_Q / denominators_Q - share))
        errors_Q[numerators_Q == 0] = np.inf
        sums_Q += numerators_Q
    errors_Q[sums_Q != denominators_Q] = np.inf
    return errors_Q


def _largest_remainders(shares_D: np.ndarray) -> list[int]:
    """Fractions with denominator ``MAX_PERIOD`` when rounding alone does not add up for any denominator."""
    exact_D = shares_D * MAX_PERIOD
    counts_D = np.floor(exact_D).astype(np.int64)
    missing = MAX_PERIOD - int(counts_D.sum())
    counts_D[np.argsort(counts_D - exact_D, kind="stable")[:missing]] += 1
    return [int(value) for value in counts_D]
