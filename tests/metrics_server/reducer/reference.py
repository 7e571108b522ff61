"""What aggregates are, said slowly: one Python float after the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steptron_metrics.protocol.description import Combination, Folding, Series
from steptron_metrics.results import STATISTICS


@dataclass
class Item:
    samples: list[float] = field(default_factory=list)
    folded: list[list[float]] = field(default_factory=list)
    parts: dict[Combination, list[float]] = field(default_factory=lambda: defaultdict(list))


def aggregates(frames: Sequence[tuple[tuple[Series, ...], np.ndarray]]) -> dict[tuple[str, int], np.ndarray]:
    """float32 [7, items] by metric and layer."""
    found: dict[tuple[str, int], dict[int, Item]] = defaultdict(lambda: defaultdict(Item))
    for description, values in frames:
        position = 0
        for series in description:
            items = found[series.metric, series.layer]
            rows = values[position : position + series.size].reshape(series.rows, series.count).tolist()
            position += series.size
            for index in range(series.count):
                item = items[series.first + index]
                column = [row[index] for row in rows]
                if series.combination is not Combination.SAMPLES:
                    item.parts[series.combination].append(column[0])
                elif series.folding is Folding.MOMENTS:
                    item.folded.append(column)
                else:
                    item.samples.extend(column)
    return {
        key: np.stack([_statistics(items[i]) for i in range(max(items) + 1)], axis=1) for key, items in found.items()
    }


def _statistics(item: Item) -> np.ndarray:
    samples = list(item.samples)
    for combination, parts in item.parts.items():
        if combination is Combination.SUM:
            samples.append(_to_float32(sum(parts)))
        else:
            samples.append(_to_float32(math.sqrt(sum(part * part for part in parts))))
    samples = [sample for sample in samples if not math.isnan(sample)]
    folded = [moments for moments in item.folded if _is_measured(*moments)]
    count = len(samples) + sum(moments[0] for moments in folded)
    if not count:
        return np.array([0.0] + [math.nan] * (len(STATISTICS) - 1), np.float32)
    mean = (sum(samples) + sum(moments[1] for moments in folded)) / count
    square = (sum(sample * sample for sample in samples) + sum(moments[2] for moments in folded)) / count
    low = min(samples + [moments[3] for moments in folded])
    high = max(samples + [moments[4] for moments in folded])
    ordered = sorted(samples + [x for x in (_to_float32(m[1] / m[0]) for m in folded) if not math.isnan(x)])
    rms = math.sqrt(square) if square >= 0 else math.nan
    with np.errstate(over="ignore"):
        return np.array([count, mean, rms, low, quantile(ordered, 0.5), high, quantile(ordered, 0.99)], np.float32)


def _is_measured(count: float, total: float, squares: float, low: float, high: float) -> bool:
    if not 0 < count < math.inf or math.isnan(low) or math.isnan(high):
        return False
    return math.isinf(low) or math.isinf(high) or not (math.isnan(total) or math.isnan(squares))


def quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    if position == below:
        return ordered[below]
    return ordered[below] * (1 - (position - below)) + ordered[below + 1] * (position - below)


def _to_float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
