from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from steptron.profiling.intervals import Interval, intersect, length, subtract, union

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_as_sets_of_moments(first: list[Interval], second: list[Interval]) -> None:
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a))
    assert moments(intersect(a, b)) == moments(a) & moments(b)
    assert moments(subtract(a, b)) == moments(a) - moments(b)
    assert length(subtract(a, b)) + length(intersect(a, b)) == length(a)
