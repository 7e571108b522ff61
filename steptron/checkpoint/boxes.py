"""A run of a flattened tensor as rectangles of the tensor. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangle whose elements are successive in memory.

    Attributes:
        offset, shape: where it lies in the tensor.
        start: its first element in the flattened tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The fewest rectangles that elements [start, stop) of a row-major tensor consist of, ascending.

    They are at most 2 n - 1 for n dimensions: part of a slice, whole slices, part of another one.
    """
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one slice
        yield from _inside(shape, start // inner, start, stop)
        return
    if start < first * inner:
        yield from _inside(shape, first - 1, start, first * inner)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * inner)
    if last * inner < stop:
        yield from _inside(shape, last, last * inner, stop)


def _inside(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Of one slice along the first axis."""
    base = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - base, stop - base):
        yield Box((index, *box.offset), (1, *box.shape), base + box.start)
