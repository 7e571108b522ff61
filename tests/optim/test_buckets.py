"""How a gradient buffer is cut."""

from __future__ import annotations

from steptron.optim.buckets import BUCKET_ELEMENTS, bucket_runs


def test_a_bucket_ends_with_the_parameter_that_fills_it() -> None:
    size = BUCKET_ELEMENTS
    assert bucket_runs([1, size - 3, 3, size, 5]) == [(0, 3), (3, 4), (4, 5)]
    assert bucket_runs([3 * size, 1]) == [(0, 1), (1, 2)]
    assert bucket_runs([1, 2, 3]) == [(0, 3)]
    assert bucket_runs([]) == []
