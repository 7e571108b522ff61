"""Made-up runs, and a store in memory that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from steptron_metrics.reducer.derived import derive
from steptron_metrics.results import STATISTICS, Aggregate, Alert, Iteration, MetricInfo, Points, Run

_DERIVED_FROM = (
    "moe.group_load",
    "moe.group_load_max",
    "moe.group_share",
    "moe.group_share_max",
    "moe.output_norm_max",
)
"""Rules look at figures derived from these only."""
LAYERS, EXPERTS = (2, 3, 4), 32


class MemoryStore:
    """What alerts read of a store, and how the server writes to it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], Iteration] = {}
        self.alerts_kept: dict[tuple[str, int], Alert] = {}

    def put(self, iterations: Iterable[Iteration]) -> None:
        for one in iterations:
            session = max((kept.session_ns for kept in self.kept.values() if kept.run == one.run), default=0)
            if one.session_ns > session:
                self.kept = {
                    key: kept for key, kept in self.kept.items() if key[0] != one.run or key[1] < one.iteration
                }
            self.kept[one.run, one.iteration] = one

    def put_alerts(self, alerts: Iterable[Alert]) -> None:
        self.alerts_kept.update({(alert.run, alert.number): alert for alert in alerts})

    def stored(self, run: str) -> dict[tuple[int, int], int]:
        return {(one.session_ns, one.iteration): one.num_ranks for one in self._of(run)}

    def runs(self) -> list[Run]:
        found = []
        for name in {run for run, _ in self.kept}:
            last = self._of(name)[-1]
            found.append(Run(name, 1, last.iteration, 0, 0, 1, 0, 0, last.ended_ns, 0))
        return found

    def metrics(self, run: str) -> list[MetricInfo]:
        layers: dict[str, set[int]] = {}
        for one in self._of(run):
            for aggregate in one.aggregates:
                layers.setdefault(aggregate.metric, set()).add(aggregate.layer)
        return [MetricInfo(metric, tuple(sorted(of)), EXPERTS) for metric, of in layers.items()]

    def derived_names(self, run: str) -> list[str]:
        return sorted({derived.name for one in self._of(run) for derived in one.derived})

    def events(self, run: str, first: int, last: int) -> pa.Table:
        kinds = [event.kind for one in self._of(run) if first <= one.iteration <= last for event in one.events]
        return pa.table({"kind": pa.array(kinds, pa.string())})

    def points(self, run: str, metric: str, layer: int, statistic: str, first: int, last: int, most: int) -> Points:
        rows = [
            (one.iteration, aggregate.values[STATISTICS.index(statistic)])
            for one in self._of(run)
            if first <= one.iteration <= last
            for aggregate in one.aggregates
            if (aggregate.metric, aggregate.layer) == (metric, layer)
        ]
        return _points(rows, most)

    def derived(self, run: str, name: str, first: int, last: int, most: int) -> Points:
        found = [
            (one.iteration, derived)
            for one in self._of(run)
            if first <= one.iteration <= last
            for derived in one.derived
            if derived.name == name
        ]
        points = _points([(iteration, derived.values) for iteration, derived in found], most)
        return replace(points, layers=found[0][1].layers if found else np.empty(0, np.int32))

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        if run is not None and not self._of(run):
            raise KeyError(run)
        return [
            alert
            for alert in self.alerts_kept.values()
            if run in (None, alert.run) and not (open_only and alert.ended_iteration is not None)
        ]

    def _of(self, run: str) -> list[Iteration]:
        return [one for (name, _), one in sorted(self.kept.items()) if name == run]


def _points(rows: Sequence[tuple[int, np.ndarray]], most: int) -> Points:
    """Of at most so many points, each the mean of 1, 16 or 256 iterations."""
    iterations = np.array([iteration for iteration, _ in rows], np.int64)
    values = np.array([row for _, row in rows], np.float32).reshape(len(rows), -1)
    factor = next(factor for factor in (1, 16, 256) if len(set((iterations // factor).tolist())) <= most)
    starts = np.flatnonzero(np.diff(iterations // factor, prepend=-1))
    ends = np.append(starts[1:], len(iterations)) - 1
    means = np.array(
        [values[start : end + 1].mean(axis=0) for start, end in zip(starts, ends, strict=True)], np.float32
    )
    means = means.reshape(len(starts), values.shape[1])
    return Points(iterations[starts], iterations[ends], means, means, means)


def aggregate(metric: str, layer: int, values: Any, count: Any = 8) -> Aggregate:
    """All statistics are the values."""
    values = np.atleast_1d(np.asarray(values, np.float32))
    table = np.tile(values, (len(STATISTICS), 1))
    table[0] = count
    table[1:, table[0] == 0] = np.nan
    return Aggregate(metric, layer, table)


def iteration(number: int, aggregates: Sequence[Aggregate] = (), **fields: Any) -> Iteration:
    defaults: dict[str, Any] = {
        "run": "r",
        "session_ns": 1,
        "iteration": number,
        "world_size": 4,
        "missing": (),
        "ended_ns": 10**18 + number * 10**9,
        "seconds": 1.0,
        "consumed_tokens": number,
        "aggregates": tuple(aggregates),
        "derived": tuple(derive([one for one in aggregates if one.metric in _DERIVED_FROM])),
    }
    return Iteration(**(defaults | fields))


class HealthyRun:
    """A tiny model whose norms grow and scatter as in its first hundreds of steps.

    Experts differ by a lasting factor, start apart further, and each step adds scatter: max/median lies between 2 and 6
    in the first steps.
    """

    def __init__(self, seed: int, layers: Sequence[int] = LAYERS) -> None:
        self._random = np.random.default_rng(seed)
        self.layers = layers
        shape = (len(layers), EXPERTS)
        self._lasting = self._random.normal(0, 0.25, shape)
        self._early = self._random.normal(0, 0.5, shape)
        self._popular = self._random.normal(0, 0.8, shape)
        self._speed = self._random.normal(1, 0.1, 4)

    def step(self, number: int) -> dict[tuple[str, int], np.ndarray]:
        """Values by metric and layer."""
        random, values = self._random, {}
        early = np.exp(-number / 40)
        level = 0.2 + 3 * (1 - np.exp(-number / 60))
        for index, layer in enumerate(self.layers):
            share = np.exp(self._popular[index] * (0.2 + early))
            tokens = random.multinomial(4 * 256 * 4, share / share.sum()) / 4
            own = np.exp(self._lasting[index] + early * self._early[index])
            rms = level * own * np.exp(random.normal(0, 0.1, EXPERTS))
            # The largest of few samples of a heavy-tailed distribution.
            largest = rms * (1.2 + random.gamma(1.5, 0.5, EXPERTS))
            values["moe.tokens", layer] = tokens
            values["moe.intermediate_norm_max", layer] = largest
            values["moe.output_norm_max", layer] = largest * np.exp(random.normal(0, 0.2, EXPERTS))
            values["moe.output_norm_rms", layer] = rms
            load = tokens.reshape(4, -1).sum(1) / (tokens.sum() / 4)
            values["moe.group_load", layer], values["moe.group_load_max", layer] = load, load.max(keepdims=True)
            values["moe.confidence", layer] = np.array([0.3 - 0.17 * early + random.normal(0, 0.01)])
            values["muon.largest.expert_up", layer] = 2.5 + random.gamma(2, 0.5, EXPERTS)
        values["train.loss", -1] = np.array([4 + 4 * early + random.normal(0, 0.1)])
        values["rank.compute_seconds", -1] = self._speed * np.exp(random.normal(0, 0.15, 4))
        values["rank.stage", -1] = np.array([0.0, 0, 1, 1])
        return values

    def iteration(self, number: int, **fields: Any) -> Iteration:
        return packed(number, self.step(number), **fields)


def packed(number: int, values: dict[tuple[str, int], np.ndarray], **fields: Any) -> Iteration:
    return iteration(number, [aggregate(metric, layer, row) for (metric, layer), row in values.items()], **fields)
