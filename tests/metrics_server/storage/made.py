"""Iterations to store, and what a store should make of them, worked out the plain way."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from steptron_metrics.results import STATISTICS, Aggregate, Derived, Event, Iteration

LAYERS = (3, 44)
ITEMS = 5


def aggregate(
    metric: str, layer: int, generator: np.random.Generator, items: int = ITEMS, samples: int = 6
) -> Aggregate:
    """Statistics of random samples [samples, items], of which some are missing, and of the first item, if there are
    several, all."""
    values = generator.lognormal(size=(samples, items)).astype(np.float32)
    values[generator.random(values.shape) < 0.2] = np.nan
    if items > 1:
        values[:, 0] = np.nan
    table = np.full((len(STATISTICS), items), np.nan, np.float32)
    for item in range(items):
        there = np.sort(values[:, item][~np.isnan(values[:, item])]).astype(np.float64)
        number = table[0, item] = len(there)
        if number:
            middle = (there[(number - 1) // 2] + there[number // 2]) / 2
            table[1:, item] = (
                *(there.mean(), np.sqrt((there**2).mean())),
                there[0],
                middle,
                there[-1],
                there[-1] * 0.99,
            )
    return Aggregate(metric, layer, table)


@functools.lru_cache(4096)
def iteration(
    number: int,
    *,
    run: str = "run",
    session: int = 1000,
    ranks: int = 4,
    world_size: int = 4,
    seed: int = 0,
    items: int = ITEMS,
    events: tuple[Event, ...] = (),
) -> Iteration:
    """With aggregates of two layers, one loss, something sampled every third iteration, and derived figures."""
    generator = np.random.default_rng([number, session, ranks, seed])
    aggregates = [aggregate("moe.tokens", layer, generator, items) for layer in LAYERS]
    aggregates.append(aggregate("train.loss", -1, generator, 1, samples=1))
    if number % 3 == 0:
        aggregates.append(aggregate("moe.alignment", 3, generator, items))
    layers = np.array(LAYERS if number % 5 else LAYERS[:1], np.int32)
    values = generator.normal(size=len(layers)).astype(np.float32)
    values[0] = np.nan if number % 7 == 0 else values[0]
    return Iteration(
        run=run,
        session_ns=session,
        iteration=number,
        world_size=world_size,
        missing=tuple(range(world_size - ranks)),
        ended_ns=10**18 + number * 10**9,
        seconds=1.5 + number,
        consumed_tokens=number * 4096,
        dropped=number % 2,
        events=events,
        aggregates=tuple(aggregates),
        derived=(Derived("moe.tokens.max_over_median", layers, values, np.arange(len(layers), dtype=np.int32)),),
    )


class Reference:
    """What a run should hold: a dictionary, and the rules of ``Store.put``."""

    def __init__(self) -> None:
        self.stored: dict[int, Iteration] = {}
        self.begins: dict[int, int] = {}

    def put(self, new: Iteration) -> None:
        if any(session > new.session_ns and new.iteration >= begin for session, begin in self.begins.items()):
            return
        old = self.stored.get(new.iteration)
        if old is not None and old.session_ns == new.session_ns and old.num_ranks >= new.num_ranks:
            return
        self.begins[new.session_ns] = min(new.iteration, self.begins.get(new.session_ns, new.iteration))
        for number, one in list(self.stored.items()):
            if one.session_ns < new.session_ns and number >= self.begins[new.session_ns]:
                del self.stored[number]
        self.stored[new.iteration] = new

    def series(self, metric: str, layer: int, items: int = ITEMS) -> dict[int, np.ndarray]:
        """By iteration float64 [7, items]."""
        found = {}
        for number, one in sorted(self.stored.items()):
            for part in one.aggregates:
                if (part.metric, part.layer) == (metric, layer):
                    wide = np.full((len(STATISTICS), items), np.nan)
                    wide[0] = 0
                    wide[:, : part.values.shape[1]] = part.values
                    found[number] = wide
        return found


def rolled(values: dict[int, np.ndarray], statistic: str, first: int, last: int) -> tuple[np.ndarray, ...] | None:
    """(value, low, high), float64 [items] each, of a bucket straight from its iterations; None without any."""
    rows = [table for number, table in values.items() if first <= number <= last]
    if not rows:
        return None
    stacked = np.stack(rows)  # [iterations, 7, items]
    own = stacked[:, STATISTICS.index(statistic)]
    count = stacked[:, 0]
    low, high = np.fmin.reduce(own, axis=0), np.fmax.reduce(own, axis=0)
    weight = np.where(np.isnan(own), 0, count)
    with np.errstate(invalid="ignore"):
        value = {
            "count": lambda: own.mean(axis=0),
            "mean": lambda: np.nansum(weight * own, axis=0) / weight.sum(axis=0),
            "rms": lambda: np.sqrt(np.nansum(weight * own**2, axis=0) / weight.sum(axis=0)),
            "min": lambda: low,
            "max": lambda: high,
            "p99": lambda: high,
        }.get(statistic, lambda: own[0])()
    return value, low, high


def numbers(iterations: Iterable[Iteration]) -> list[int]:
    return [one.iteration for one in iterations]
