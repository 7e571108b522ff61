"""All iterations of a range, read a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from steptron_metrics.reading.source import Source, windows
from steptron_metrics.results import Points, Run

MAX_POINTS = 2000
MAX_VALUES = 4_000_000
"""A server reads no more than twice this for one request."""
LAYERS = 4096
"""For derived figures, whose layers are not known before."""


def points_at_once(items: int) -> int:
    """Of so many items or layers."""
    return max(1, min(MAX_POINTS, MAX_VALUES // max(items, 1)))


def run_of(source: Source, name: str) -> Run:
    """Raises:
    KeyError: there is no such run.
    """
    for run in source.runs():
        if run.name == name:
            return run
    raise KeyError(name)


def parts(run: Run, read: Callable[[int, int, int], Points], first: int, last: int, items: int) -> Iterator[Points]:
    """Points of one iteration each."""
    size = points_at_once(items)
    for begin, end in windows(first, last, run, size):
        points = read(begin, end, size)
        if len(points.first):
            yield points


def whole(
    source: Source,
    run: str,
    read: Callable[[int, int, int], Points],
    first: int,
    last: int,
    max_points: int | None,
    items: int,
) -> Points:
    """Points of [first, last]: at most ``max_points``, or one of each iteration.

    Args:
        read: points of (first, last, max_points).
        items: how many it has.
    """
    found = run_of(source, run)
    first, last = max(first, found.first_iteration), min(last, found.last_iteration)
    if max_points is not None:
        return read(first, last, max_points)
    pieces = list(parts(found, read, first, last, items))
    if not pieces:
        return read(first, last, 1)
    derived = any(len(piece.layers) for piece in pieces)
    if derived:
        layers = np.unique(np.concatenate([piece.layers for piece in pieces]))
        places = [np.searchsorted(layers, piece.layers) for piece in pieces]
    else:
        layers = np.empty(0, np.int32)
        places = [np.arange(piece.values.shape[1]) for piece in pieces]
    width = len(layers) if derived else max(piece.values.shape[1] for piece in pieces)

    def joined(plane: str) -> np.ndarray:
        spread = []
        for piece, place in zip(pieces, places, strict=True):
            wide = np.full((len(piece.first), width), np.nan, np.float32)
            wide[:, place] = getattr(piece, plane)
            spread.append(wide)
        return np.concatenate(spread)

    return Points(
        np.concatenate([piece.first for piece in pieces]),
        np.concatenate([piece.last for piece in pieces]),
        joined("values"),
        joined("low"),
        joined("high"),
        layers.astype(np.int32),
    )
