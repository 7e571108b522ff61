"""Blends: shares within one sample for every prefix, any position without the ones before it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.blend import MAX_PERIOD, Blend
from steptron.data.errors import DataError


def _largest_deviation(blend: Blend, count: int) -> Fraction:
    """Largest |samples dealt - share x prefix| over datasets and prefixes up to ``count``, exactly."""
    datasets_N, _ = blend.locate(0, count)
    positions_N = np.arange(1, count + 1)
    worst = 0
    for number, share in enumerate(blend.counts_per_period):
        dealt_N = np.cumsum(datasets_N == number)
        worst = max(worst, int(np.abs(dealt_N * blend.period - positions_N * share).max()))
    return Fraction(worst, blend.period)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_one_sample_of_the_shares(weights: list[int]) -> None:
    blend = Blend(weights)
    # The shares are the weights, exactly.
    assert [Fraction(count, blend.period) for count in blend.counts_per_period] == [
        Fraction(weight, sum(weights)) for weight in weights
    ]
    assert _largest_deviation(blend, 2 * blend.period + 3) < 1


def test_groups_of_light_and_heavy_weights_stay_within_one_sample() -> None:
    weights = [1] * 10 + [9] * 10
    assert _deviation_of_largest_deficit(weights, 100) > 1.3  # the common rule does not
    assert _largest_deviation(Blend(weights), 200) < 1


def _deviation_of_largest_deficit(weights: list[int], count: int) -> float:
    """Largest deviation when each sample goes to the dataset that lags its share most."""
    shares_D = np.array(weights) / np.sum(weights)
    dealt_D = np.zeros(len(weights))
    worst = 0.0
    for position in range(1, count + 1):
        dealt_D[np.argmax(shares_D * position - dealt_D)] += 1
        worst = max(worst, float(np.abs(dealt_D - shares_D * position).max()))
    return worst


def test_weights_of_no_short_period_stay_within_one_sample_over_a_period() -> None:
    weights = [0.3141592653589793, 0.2718281828459045, 0.1414213562373095]
    blend = Blend(weights)
    shares = np.array(blend.counts_per_period) / blend.period
    assert blend.period <= MAX_PERIOD
    np.testing.assert_allclose(shares, np.array(weights) / sum(weights), rtol=0, atol=1e-7)
    assert _largest_deviation(blend, blend.period) < 1


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([1.0], [1]), ([1, 3], [1, 3]), ([0.1, 0.2, 0.7], [1, 2, 7]), ([2, 2, 2], [1, 1, 1]), ([0.35, 0.65], [7, 13])],
)
def test_the_period_is_the_smallest_that_fits(weights: list[float], counts: list[int]) -> None:
    assert Blend(weights).counts_per_period == counts


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 10**12), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_any_position_is_found_without_the_ones_before(weights: list[int], first: int, count: int) -> None:
    blend = Blend(weights)
    datasets_N, samples_N = blend.locate(first, count)
    for offset in range(count):
        dataset, sample = blend.locate(first + offset, 1)
        assert (dataset[0], sample[0]) == (datasets_N[offset], samples_N[offset])
        # The number within the dataset is the number of times it was dealt before.
        share = Fraction(blend.counts_per_period[int(dataset[0])], blend.period)
        assert abs(int(sample[0]) - share * (first + offset)) < 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_samples_of_a_dataset_are_numbered_without_gaps(weights: list[int]) -> None:
    blend = Blend(weights)
    datasets_N, samples_N = blend.locate(0, 3 * blend.period + 1)
    for number in range(len(weights)):
        own_N = samples_N[datasets_N == number]
        np.testing.assert_array_equal(own_N, np.arange(own_N.size))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_longest_prefix_within_what_is_available(cases: list[tuple[int, int]]) -> None:
    blend = Blend([weight for weight, _ in cases])
    available = [samples for _, samples in cases]
    length = blend.prefix_within(available)
    datasets_N, _ = blend.locate(0, length + 1)
    used = np.bincount(datasets_N[:length], minlength=len(cases))
    assert all(used <= available)
    assert np.bincount(datasets_N, minlength=len(cases))[datasets_N[-1]] == available[datasets_N[-1]] + 1


def test_a_share_too_small_to_honour_is_refused() -> None:
    with pytest.raises(DataError, match=r"dataset 1 of the blend has a share of 1e-07"):
        Blend([1.0, 1e-7])
