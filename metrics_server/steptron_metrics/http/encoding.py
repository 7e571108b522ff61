"""Points on their way out: fewer columns where asked for, then JSON or the binary form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptron_metrics.http.models import numbers
from steptron_metrics.http.parameters import Plane
from steptron_metrics.results import Points

MEDIA_TYPE = "application/vnd.steptron.points"
MAGIC = b"STP1"
FOLDED = ("min", "median", "max")


@dataclass(frozen=True)
class Table:
    """Points with what their columns are.

    Attributes:
        about: the block's fields that say what it is.
        columns: [C].
        first, last: int64 [P].
        planes: float32 [P, C] by name.
    """

    about: dict[str, object]
    columns: Sequence[int | str]
    first: np.ndarray
    last: np.ndarray
    planes: dict[str, np.ndarray]


def table_of(points: Points, about: dict[str, object], columns: Sequence[int | str], planes: Sequence[Plane]) -> Table:
    """A store's points, of which only some planes are wanted."""
    chosen: dict[str, np.ndarray] = {name: getattr(points, name) for name in dict.fromkeys(planes)}
    return Table(about, columns, points.first, points.last, chosen)


def choose_items(table: Table, items: Sequence[int]) -> Table:
    """Only these columns; of items that the points do not have, NaN."""
    wanted = np.asarray(items, np.int64)
    planes = {}
    for name, plane in table.planes.items():
        chosen = np.full((len(plane), len(wanted)), np.nan, np.float32)
        there = wanted < plane.shape[1]
        chosen[:, there] = plane[:, wanted[there]]
        planes[name] = chosen
    return replace(table, columns=[int(item) for item in wanted], planes=planes)


def fold_items(table: Table) -> Table:
    """The least, the median and the largest of the columns; NaN where nothing was measured."""
    return replace(table, columns=list(FOLDED), planes={name: _folded(plane) for name, plane in table.planes.items()})


def _folded(plane: np.ndarray) -> np.ndarray:
    """Of float32 [P, C]: float32 [P, 3]."""
    folded = np.full((len(plane), 3), np.nan, np.float32)
    if plane.shape[1] == 0:
        return folded
    ordered = np.sort(plane, axis=1)  # NaN last
    there = plane.shape[1] - np.isnan(plane).sum(axis=1)
    rows = np.flatnonzero(there)
    count = there[rows]
    folded[rows, 0] = ordered[rows, 0]
    low, high = ordered[rows, (count - 1) // 2], ordered[rows, count // 2]
    # An infinite middle stays infinite instead of becoming inf - inf.
    folded[rows, 1] = np.where(low == high, low, low * np.float32(0.5) + high * np.float32(0.5))
    folded[rows, 2] = ordered[rows, count - 1]
    return folded


def to_json(run: str, tables: Sequence[Table]) -> bytes:
    """The answer ``Blocks`` of the API."""
    blocks = [
        {
            **table.about,
            "columns": list(table.columns),
            "first": table.first.tolist(),
            "last": table.last.tolist(),
            **{name: numbers(plane) for name, plane in table.planes.items()},
        }
        for table in tables
    ]
    return json.dumps({"run": run, "blocks": blocks}, separators=(",", ":"), allow_nan=False).encode()


def to_binary(run: str, tables: Sequence[Table]) -> bytes:
    """The same in the form that the API's parameter ``form`` describes; iterations are float64."""
    parts: list[bytes] = []
    size = 0

    def put(array: np.ndarray, kind: str) -> dict[str, object]:
        nonlocal size
        content = np.ascontiguousarray(array, np.dtype(kind)).tobytes()
        place = {"offset": size, "shape": list(array.shape), "type": {"<f8": "float64", "<f4": "float32"}[kind]}
        parts.append(content + bytes(-len(content) % 8))
        size += len(parts[-1])
        return place

    blocks = [
        {
            **table.about,
            "columns": list(table.columns),
            "first": put(table.first, "<f8"),
            "last": put(table.last, "<f8"),
            **{name: put(plane, "<f4") for name, plane in table.planes.items()},
        }
        for table in tables
    ]
    header = json.dumps({"run": run, "blocks": blocks}, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-(len(header) + 8) % 8)
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *parts])
