"""Compares two traces and finds where they part first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steptron.errors import ConfigError
from steptron.inspection.archive import INPUT_IDS, Archive, Array, open_archive


@dataclass(frozen=True)
class SiteDifference:
    """How the values of one site differ.

    Attributes:
        name: of the site.
        max_abs: largest difference of two elements; NaN where one of the traces has a value that is not finite.
        relative: norm of the difference over the norm of the first trace's values; likewise.
        rerouted: of selected experts, tokens that were sent elsewhere; None at other sites.
        tokens: of the trace.
        parted: whether the difference is beyond the tolerance.
    """

    name: str
    max_abs: float
    relative: float
    rerouted: int | None
    tokens: int
    parted: bool


@dataclass(frozen=True)
class TraceDifference:
    """Two traces' differences, in the order of the forward pass, and the sites that only one of them has."""

    sites: tuple[SiteDifference, ...]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]

    @property
    def first_parted(self) -> SiteDifference | None:
        return next((site for site in self.sites if site.parted), None)


def compare_traces(first: Path, second: Path, tolerance: float) -> TraceDifference:
    """Compares the sites that two traces have in common.

    Args:
        first: a trace; its order of sites counts.
        second: another one.
        tolerance: largest relative difference (norm over norm) at which values count as equal. Selected experts are
            equal or not: one token that is sent elsewhere is beyond every tolerance.

    Raises:
        UserError: a file cannot be read.
        ConfigError: the traces are of different tokens, or have no site in common, or a site has different shapes.
    """
    with open_archive(first) as a, open_archive(second) as b:
        title = f"{first} and {second} cannot be compared"
        if INPUT_IDS in a and INPUT_IDS in b and not np.array_equal(a.read(INPUT_IDS), b.read(INPUT_IDS)):
            raise ConfigError(title, [f"their {INPUT_IDS} differ: record both with the same --input-ids"])
        names = [name for name in a.names if name != INPUT_IDS]
        common = [name for name in names if name in b]
        if not common:
            raise ConfigError(title, ["they have no site in common"])
        problems, found = [], []
        for name in common:
            difference = _compare(name, a, b, tolerance)
            if isinstance(difference, str):
                problems.append(difference)
            else:
                found.append(difference)
        if problems:
            raise ConfigError(title, problems)
        return TraceDifference(
            tuple(found),
            tuple(name for name in names if name not in b),
            tuple(name for name in b.names if name not in a and name != INPUT_IDS),
        )


def _compare(name: str, first: Archive, second: Archive, tolerance: float) -> SiteDifference | str:
    a, b = first.read(name), second.read(name)
    if a.shape != b.shape:
        return f"{name} has shape {list(a.shape)} in {first.path} and {list(b.shape)} in {second.path}"
    if any(array.dtype.kind not in "iuf" for array in (a, b)):
        return f"{name} holds {a.dtype} and {b.dtype}: it must hold numbers"
    tokens = math.prod(a.shape[:2])
    rerouted = None
    if name.endswith(".router.experts"):
        rerouted = int((np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1).sum())
    max_abs, relative = _distance(a.astype(np.float64), b.astype(np.float64))
    parted = rerouted > 0 if rerouted is not None else not relative <= tolerance
    return SiteDifference(name, max_abs, relative, rerouted, tokens, parted)


def _distance(a: Array, b: Array) -> tuple[float, float]:
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan, math.nan
    difference = np.abs(a - b)
    size, norm = float(np.linalg.norm(difference)), float(np.linalg.norm(a))
    relative = size / norm if norm else (math.inf if size else 0.0)
    return float(difference.max(initial=0.0)), relative
