"""Runs of flattened tensors as rectangles: every run of small tensors, against the elements' indices."""

from __future__ import annotations

import math

import pytest
import torch

from steptron.checkpoint.boxes import boxes

SHAPES = [(7,), (1,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (1, 1, 3), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_tile_every_run(shape: tuple[int, ...]) -> None:
    """Ascending and without a gap, successive in memory, and no more of them than a run can need."""
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)
    for start in range(size):
        for stop in range(start + 1, size + 1):
            found = list(boxes(shape, start, stop))
            assert 0 < len(found) <= 2 * len(shape) - 1
            position = start
            for box in found:
                inside = numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
                assert inside.shape == box.shape and box.start == position
                assert inside.flatten().tolist() == list(range(position, position + math.prod(box.shape)))
                position += math.prod(box.shape)
            assert position == stop


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_fewer_rectangles_would_do(shape: tuple[int, ...]) -> None:
    """The number of rectangles against the fewest, found by trying every next cut."""
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)

    def is_rectangle(start: int, stop: int) -> bool:
        places = ((numbers >= start) & (numbers < stop)).nonzero()
        extents = places.max(dim=0).values - places.min(dim=0).values + 1
        return int(extents.prod()) == stop - start

    rectangle = {(a, b): is_rectangle(a, b) for a in range(size) for b in range(a + 1, size + 1)}
    for start in range(size):
        fewest = {start: 0}
        for stop in range(start + 1, size + 1):
            fewest[stop] = min(fewest[cut] + 1 for cut in range(start, stop) if rectangle[cut, stop])
            assert len(list(boxes(shape, start, stop))) == fewest[stop]


def test_an_empty_run_has_none() -> None:
    assert list(boxes((3, 4), 5, 5)) == []
