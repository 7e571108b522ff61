"""A store without a database: values are functions of run, metric, layer, item and iteration, the same every time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from steptron_metrics import catalogue
from steptron_metrics.http.state import ReceiverState, ReducerState, ServerState, Waiting
from steptron_metrics.results import STATISTICS, Alert, Iteration, MetricInfo, Points, Run

ROLES = ("expert_gate", "expert_up", "expert_down")
DENSE_ROLES = ("query", "key", "value", "attention_output", "router")


@dataclass
class FakeRun:
    """One run.

    Attributes:
        blown_up: (layer, expert) whose norms grow from the middle on.
        collapsed: (layer, expert) whose norms fall from the middle on.
        partial: iterations that rank 3 is missing from.
    """

    name: str
    iterations: int = 200
    layers: tuple[int, ...] = (3, 4, 5)
    experts: int = 16
    groups: int = 4
    ranks: int = 8
    depths: int = 2
    blown_up: tuple[int, int] | None = None
    collapsed: tuple[int, int] | None = None
    slow_rank: int | None = None
    partial: tuple[int, ...] = ()
    last_ended_ns: int = field(default_factory=time.time_ns)
    finished: bool = False

    @property
    def infos(self) -> dict[str, MetricInfo]:
        found: dict[str, MetricInfo] = {}
        items = {"one": 1, "expert": self.experts, "group": self.groups, "rank": self.ranks, "depth": self.depths}
        for metric in catalogue.METRICS:
            layers = self.layers if metric.name.startswith(("moe.", "weight", "gradient", "update", "muon")) else (-1,)
            if metric.by_role:
                for role in (*ROLES, *DENSE_ROLES):
                    name = f"{metric.name}.{role}"
                    found[name] = MetricInfo(name, layers, self.experts if role in ROLES else 1)
            else:
                found[metric.name] = MetricInfo(metric.name, layers, items[metric.items])
        found["custom.thing"] = MetricInfo("custom.thing", (-1,), 2)
        return found

    @property
    def figures(self) -> list[str]:
        names = ["moe.straggler_factor", "moe.straggler_worst", "moe.group_imbalance", "muon.largest"]
        for metric in self.infos:
            known = catalogue.find(metric)
            if known and known.relative and self.infos[metric].items > 1:
                names += [f"{metric}.max_over_median", f"{metric}.min_over_median"]
            if known and known.levels:
                names += [f"{metric}.median", f"{metric}.over_layers"]
        return names + [f"gradient.cosine_{which}.{role}" for which in ("max", "min") for role in ROLES]

    def value(self, metric: str, layer: int, at: np.ndarray) -> np.ndarray:
        """float64 [P, items] at iterations [P]."""
        items = self.infos[metric].items
        seed = zlib.crc32(f"{self.name} {metric} {layer}".encode())
        generator = np.random.default_rng(seed)
        spread, phase = generator.normal(size=items), generator.uniform(0, 6.28, size=items)
        t = at[:, None].astype(np.float64)
        wave = 0.05 * np.sin(t / 37 + phase) + 0.03 * np.sin(t * 1.7 + 3 * phase)
        part = t / self.iterations
        growth = np.clip(part * 2 - 1, 0, 1)
        if metric == "rank.stage":
            return np.broadcast_to(np.arange(items) * 2 // max(items, 1), (len(at), items)).astype(np.float64)
        if metric.startswith("train.") or metric.startswith("validation."):
            if metric.endswith("loss"):
                if metric == "train.ep_loss":
                    return 1.02 + 0.02 * wave + 0 * t
                depth = np.arange(items) * 0.35 + (0.4 if "mtp" in metric else 0)
                return 2.1 + depth + 8.5 * np.exp(-part * 9) + 0.9 * np.exp(-part * 2) + wave
            level = {"train.grad_norm": 0.8, "train.learning_rate": 2.5e-4, "train.tokens_per_second": 4.1e6}
            return level.get(metric, 128.0) * (1 + wave * (metric != "train.learning_rate"))
        if metric == "rank.compute_seconds":
            values = 0.21 * (1 + 0.02 * spread + 0.3 * wave)
            if self.slow_rank is not None:
                values[:, self.slow_rank] *= 1 + 0.8 * (part[:, 0] > 0.6)
            return values
        if metric == "moe.confidence":
            return 0.55 + 0.2 * part + 0.1 * wave
        if metric == "moe.group_load":
            return 1 + 0.06 * spread + wave * 0.4
        level = {"moe.tokens": 900.0, "moe.probability": 1 / items, "moe.alignment": 0.4}.get(metric, 6.0)
        values = level * np.exp(0.18 * spread + wave + 0.006 * max(layer, 0) * part)
        norms = "norm" in metric or metric.startswith(("muon", "update"))
        if norms and items == self.experts:
            if self.blown_up is not None and layer == self.blown_up[0]:
                values[:, self.blown_up[1]] *= np.exp(7.5 * growth[:, 0])
            if self.collapsed is not None and layer == self.collapsed[0]:
                values[:, self.collapsed[1]] *= np.exp(-6 * growth[:, 0])
        return values


class FakeStore:
    """See :class:`steptron_metrics.storage.base.Store`."""

    def __init__(self, *runs: FakeRun, alerts: Sequence[Alert] = ()) -> None:
        self.fakes = {run.name: run for run in runs}
        self._alerts = {(alert.run, alert.number): alert for alert in alerts}

    def put(self, iterations: Sequence[Iteration]) -> None:
        raise NotImplementedError

    def stored(self, run: str) -> dict[tuple[int, int], int]:
        raise NotImplementedError

    def runs(self) -> list[Run]:
        return [
            Run(
                name=run.name,
                first_iteration=1,
                last_iteration=run.iterations,
                iterations=run.iterations,
                partial=len(run.partial),
                world_size=run.ranks,
                consumed_tokens=run.iterations * 4_194_304,
                started_ns=run.last_ended_ns - run.iterations * 10**9,
                last_ended_ns=run.last_ended_ns,
                open_alerts=len(self.alerts(run.name, True)),
                finished=run.finished,
            )
            for run in self.fakes.values()
        ]

    def metrics(self, run: str) -> list[MetricInfo]:
        return list(self.fakes[run].infos.values())

    def derived_names(self, run: str) -> list[str]:
        return self.fakes[run].figures

    def _numbers(self, run: FakeRun, first: int, last: int) -> np.ndarray:
        return np.arange(max(first, 1), min(last, run.iterations) + 1, dtype=np.int64)

    def iterations(self, run: str, first: int, last: int) -> pa.Table:
        fake = self.fakes[run]
        number = self._numbers(fake, first, last)
        missing = [[3] if int(n) in fake.partial else [] for n in number]
        return pa.table(
            {
                "iteration": number,
                "session_ns": pa.array(np.full(len(number), 1), pa.int64()),
                "world_size": pa.array(np.full(len(number), fake.ranks), pa.int32()),
                "num_ranks": pa.array([fake.ranks - len(m) for m in missing], pa.int32()),
                "missing": pa.array(missing, pa.list_(pa.int32())),
                "ended_ns": fake.last_ended_ns - (fake.iterations - number) * 10**9,
                "seconds": pa.array(1.0 + 0.1 * np.sin(number), pa.float32()),
                "consumed_tokens": number * 4_194_304,
                "dropped": pa.array(np.zeros(len(number)), pa.int64()),
            }
        )

    def numbers(self, run: str, first: int, last: int, most: int) -> list[int]:
        return self._numbers(self.fakes[run], first, last)[:most].tolist()

    def events(self, run: str, first: int, last: int) -> pa.Table:
        number = [n for n in self._numbers(self.fakes[run], first, last).tolist() if n % 50 == 0]
        return pa.table(
            {
                "iteration": pa.array(number, pa.int64()),
                "kind": pa.array(["checkpoint"] * len(number), pa.string()),
                "detail": pa.array([f"wrote checkpoint of iteration {n}" for n in number], pa.string()),
            }
        )

    def _rolled(self, run: FakeRun, first: int, last: int, max_points: int) -> tuple[np.ndarray, np.ndarray, int]:
        number = self._numbers(run, first, last)
        stride = max(1, -(-len(number) // max_points))
        starts = number[::stride]
        ends = np.minimum(starts + stride - 1, number[-1]) if len(number) else starts
        return starts, ends, stride

    def points(
        self, run: str, metric: str, layer: int, statistic: str, first: int, last: int, max_points: int
    ) -> Points:
        fake = self.fakes[run]
        starts, ends, stride = self._rolled(fake, first, last, max_points)
        samples = [fake.value(metric, layer, np.minimum(starts + k, ends)) for k in {0, stride // 2, stride - 1}]
        stacked = np.stack(samples)
        if statistic == "count":
            stacked[:] = 8
        parts = stacked.mean(0), stacked.min(0), stacked.max(0)
        return Points(starts, ends, *(part.astype(np.float32) for part in parts))

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        fake = self.fakes[run]
        starts, ends, _ = self._rolled(fake, first, last, max_points)
        metric, _, kind = name.rpartition(".")
        columns = []
        for layer in fake.layers:
            if kind in ("max_over_median", "min_over_median"):
                values = fake.value(metric, layer, ends)
                edge = values.max(1) if kind.startswith("max") else values.min(1)
                columns.append(edge / np.median(values, axis=1))
            elif kind in ("median", "over_layers"):
                medians = {layer: np.median(fake.value(metric, layer, ends), axis=1) for layer in fake.layers}
                others = [medians[other] for other in fake.layers if other != layer]
                columns.append(medians[layer] / (1.0 if kind == "median" else np.median(others, axis=0)))
            elif kind.startswith("straggler"):
                values = fake.value("moe.group_load", layer, ends)
                columns.append(values.max(1) / values.mean(1))
            else:
                columns.append(0.1 * np.sin(ends / 50 + layer))
        values = np.stack(columns, axis=1).astype(np.float32)
        layers = np.asarray(fake.layers, np.int32)
        return Points(starts, ends, values, values * np.float32(0.98), values * np.float32(1.02), layers)

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        fake = self.fakes[run]
        for metric, info in fake.infos.items():
            if metrics is not None and metric not in metrics:
                continue
            for layer in info.layers:
                number = self._numbers(fake, first, last)
                if not len(number):
                    continue
                values = fake.value(metric, layer, number).astype(np.float32).ravel()
                yield pa.record_batch(
                    {
                        "iteration": np.repeat(number, info.items),
                        "metric": pa.array([metric] * len(values)),
                        "layer": pa.array(np.full(len(values), layer), pa.int32()),
                        "item": pa.array(np.tile(np.arange(info.items), len(number)), pa.int32()),
                        **{statistic: values for statistic in STATISTICS},
                    }
                )

    def put_alerts(self, alerts: Sequence[Alert]) -> None:
        self._alerts |= {(alert.run, alert.number): alert for alert in alerts}

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        found = [a for a in self._alerts.values() if run in (None, a.run)]
        found = [a for a in found if a.ended_iteration is None or not open_only]
        return sorted(found, key=lambda alert: -alert.number)

    def delete(self, run: str) -> None:
        del self.fakes[run]
        self._alerts = {key: alert for key, alert in self._alerts.items() if alert.run != run}

    def size_bytes(self) -> int:
        return 123_456

    def close(self) -> None:
        pass


def some_alerts(run: FakeRun) -> list[Alert]:
    """One that is open, about the expert that blows up, and one that has ended."""
    layer, expert = run.blown_up or (run.layers[-1], 0)
    since = run.iterations * 6 // 10
    first = Alert(
        number=2,
        run=run.name,
        rule="localised_blow_up",
        severity="critical",
        subject=f"layer {layer} expert {expert}",
        layer=layer,
        item=expert,
        since_iteration=since,
        since_ns=run.last_ended_ns - (run.iterations - since) * 10**9,
        last_iteration=run.iterations,
        ended_iteration=None,
        value=1711.4,
        worst=1811.0,
        threshold=20.0,
        saw="max/median of the experts' largest output norm is 1,711, above 20 for 12 iterations.",
        cause="Frequent bi-grams, pre-norm and an aligned SwiGLU let Muon repeat a low-rank update.",
        remedy="Turn on activation clipping for this layer; weight clipping only delays it.",
        wants_checkpoint=True,
    )
    ended = replace(
        first,
        number=1,
        rule="straggling_rank",
        severity="warning",
        subject="rank 5",
        layer=None,
        item=5,
        since_iteration=run.iterations // 4,
        last_iteration=run.iterations // 3,
        ended_iteration=run.iterations // 3,
        value=1.1,
        worst=float("inf"),
        threshold=1.3,
        saw="Rank 5 took 1.8 times the median of its stage.",
        cause="A slow device or host.",
        remedy="Look at its clocks and its node.",
        wants_checkpoint=False,
    )
    return [first, ended]


def some_state() -> ServerState:
    now = time.time_ns()
    return ServerState(
        software="steptron 0.1.0",
        started_ns=now - 3600 * 10**9,
        now_ns=now,
        receivers=(ReceiverState(0, 4242, 0, 512, 40_960, 240 << 20, 3, 1), ReceiverState(1, 4243, 1, 500, 40_000)),
        reducers=(ReducerState(0, 4244, 0, 100, 31.5),),
        pending_iterations=2,
        waiting=(
            Waiting("blow-up", 201, 6, 8, now - 40 * 10**9, (2, 5)),
            Waiting("other", 7, 1, 2, now - 2 * 10**9, (1,)),
        ),
        stored_iterations=400,
        journal_bytes=3 << 30,
        journal_limit_bytes=8 << 30,
        database_bytes=700 << 20,
        free_bytes=90 << 30,
        dropped_frames=5,
    )
