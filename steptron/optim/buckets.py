"""How a gradient buffer is cut into the parts that are reduced at once."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_ELEMENTS = 1 << 24
"""Elements of one reduction (64 MiB in fp32): large enough for bandwidth, small enough to overlap."""


def bucket_runs(sizes: Sequence[int], at_least: int = 0) -> list[tuple[int, int]]:
    """Runs (first, stop) of successive parameters; each ends with the parameter that fills its bucket.

    Args:
        sizes: elements of the parameters, in the order in which they lie in the buffer.
        at_least: elements of a bucket, where that is more than usual.
    """
    runs, first, filled = [], 0, 0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= max(BUCKET_ELEMENTS, at_least) or index == len(sizes) - 1:
            runs.append((first, index + 1))
            first, filled = index + 1, 0
    return runs
