"""What Prometheus scrapes: a run's derived values and headline figures, alerts, and the server itself."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from starlette.types import Scope

from steptron_metrics import catalogue
from steptron_metrics.http.state import ServerState
from steptron_metrics.results import Run
from steptron_metrics.storage.base import Store

__all__ = ["CONTENT_TYPE", "RequestMetrics", "exposition"]

log = logging.getLogger(__name__)

MAX_RUNS = 100
"""Runs with their iterations and alerts, the latest."""
MAX_DETAILED_RUNS = 8
"""Of those, runs with figures for each layer: the latest ones that are not stale, so that Prometheus forgets a run that
has ended."""
MAX_VALUED_RUNS = 32
"""Of those, runs with loss and the like, also when they have ended: the latest ones."""
LOOK_BACK = 256
"""Iterations among which the latest value of a metric is looked for that is not measured in each."""
MAX_LAYERS = 256
MAX_FIGURES = 128
MAX_SERIES = 100_000
"""Of one scrape; figures beyond that are left out and counted in ``steptron_figures_left_out``."""

_OF_RUN = tuple(
    metric.name
    for metric in catalogue.METRICS
    if metric.items in ("one", "depth") and metric.name.startswith(("train.", "validation."))
)


class RequestMetrics:
    """What is kept from one scrape to the next: requests, counted by the template of their route, so that there is a
    bounded number of labels, and values of runs."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.values: dict[str, tuple[Run, list[tuple[tuple[str, str, str], float]]]] = {}
        """Of each run what was read of it last: a run that has ended is read once."""
        self._requests = Counter(
            "steptron_http_requests", "Requests answered.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "steptron_http_scrape_seconds",
            "Time that making this endpoint's answer took.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10),
            registry=self.registry,
        )

    def observe(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        self._requests.labels(getattr(route, "path", "other"), str(status)).inc()

    def scraped(self, seconds: float) -> None:
        self._seconds.observe(seconds)


def exposition(
    requests: RequestMetrics,
    store: Store,
    runs: Callable[[], Sequence[Run]],
    state: Callable[[], ServerState],
    stale_after_seconds: float,
) -> bytes:
    """The text of one scrape; without runs and alerts while the database does not answer.

    Args:
        requests: of this application.
        store: of the runs.
        runs: reads those that the caller may read, the latest first.
        state: of the server.
        stale_after_seconds: a run's figures are left out when nothing has come from it for so long.
    """
    began = time.monotonic()
    registry = CollectorRegistry()
    metrics, answers = list(_server(state())), 1.0
    try:
        metrics += list(_runs(store, runs(), stale_after_seconds, requests))
    except Exception as error:
        # What is wrong is to be seen here of all places.
        log.error("a scrape leaves out runs and alerts: %s", error)
        answers = 0.0
    metrics.append(GaugeMetricFamily("steptron_server_database_answers", "1 when the database does.", answers))
    registry.register(_Once(metrics))
    content = generate_latest(registry)
    requests.scraped(time.monotonic() - began)
    return content + generate_latest(requests.registry)


class _Once:
    """A collector of what has been collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _server(state: ServerState) -> Iterator[Metric]:
    for name, help_, value in (
        ("steptron_server_pending_iterations", "Iterations that are not stored yet.", state.pending_iterations),
        ("steptron_server_journal_bytes", "Size of the raw values.", state.journal_bytes),
        ("steptron_server_journal_limit_bytes", "What the raw values may take up.", state.journal_limit_bytes),
        ("steptron_server_database_bytes", "Size of the database.", state.database_bytes),
        ("steptron_server_free_bytes", "What is left on the disk of the server's folder.", state.free_bytes),
        ("steptron_server_webhook_waiting", "Alerts still to be delivered.", state.webhook_waiting),
        ("steptron_server_started_seconds", "When the server began, since 1970.", state.started_ns / 1e9),
        ("steptron_server_receiver_connections", "Open connections.", sum(r.connections for r in state.receivers)),
        ("steptron_server_trouble", "1 when something keeps the server from storing.", float(bool(state.trouble))),
        ("steptron_server_receivers", "Receiver processes that run.", sum(r.pid > 0 for r in state.receivers)),
        ("steptron_server_reducers", "Reducer processes that run.", sum(r.pid > 0 for r in state.reducers)),
    ):
        yield GaugeMetricFamily(name, help_, value)
    for name, help_, value in (
        ("steptron_server_stored_iterations", "Iterations stored.", state.stored_iterations),
        ("steptron_server_dropped_frames", "Frames that clients had to give up.", state.dropped_frames),
        ("steptron_server_set_aside_iterations", "Iterations that the database has refused.", state.set_aside),
        ("steptron_server_webhook_failed", "Deliveries of alerts given up.", state.webhook_failed),
    ):
        yield CounterMetricFamily(name, help_, value)
    ignored = CounterMetricFamily(
        "steptron_server_ignored_frames",
        "Frames that changed nothing: sent or read again, void, contradictory.",
        labels=("reason",),
    )
    for reason, count in sorted(state.ignored_frames.items()):
        ignored.add_metric((reason,), count)
    yield ignored
    for name, help_, field in (
        ("steptron_server_frames", "Frames stored in the journal.", "frames"),
        ("steptron_server_received_bytes", "Bytes stored in the journal.", "bytes"),
        ("steptron_server_refused", "Frames refused.", "refused"),
        ("steptron_server_later", "Messages put off for want of room.", "later"),
        ("steptron_server_receiver_restarts", "Times that a receiver was started again.", "restarts"),
    ):
        family = CounterMetricFamily(name, help_, labels=("receiver",))
        for receiver in state.receivers:
            family.add_metric((str(receiver.number),), getattr(receiver, field))
        yield family
    restarts = CounterMetricFamily(
        "steptron_server_reducer_restarts", "Times that a reducer was started again.", labels=("reducer",)
    )
    busy = CounterMetricFamily("steptron_server_reducer_busy_seconds", "Time spent reducing.", labels=("reducer",))
    for reducer in state.reducers:
        restarts.add_metric((str(reducer.number),), reducer.restarts)
        busy.add_metric((str(reducer.number),), reducer.busy_seconds)
    yield restarts
    yield busy


def _runs(store: Store, runs: Sequence[Run], stale_after_seconds: float, requests: RequestMetrics) -> Iterator[Metric]:
    shown = runs[:MAX_RUNS]
    for name, help_, read in (
        ("steptron_run_last_iteration", "The latest iteration stored.", lambda run: run.last_iteration),
        ("steptron_run_last_iteration_seconds", "When it ended, since 1970.", lambda run: run.last_ended_ns / 1e9),
        ("steptron_run_iterations", "Iterations stored.", lambda run: run.iterations),
        ("steptron_run_partial_iterations", "Of those, without some rank's frame.", lambda run: run.partial),
        ("steptron_run_consumed_tokens", "Tokens consumed.", lambda run: run.consumed_tokens),
        ("steptron_run_world_size", "Ranks.", lambda run: run.world_size),
    ):
        family = GaugeMetricFamily(name, help_, labels=("run",))
        for run in shown:
            family.add_metric((run.name,), read(run))
        yield family
    yield _alerts(store, shown)
    yield _values(store, shown[:MAX_VALUED_RUNS], requests)
    now = time.time_ns()
    fresh = [run for run in shown if now - run.last_ended_ns < stale_after_seconds * 1e9][:MAX_DETAILED_RUNS]
    yield from _details(store, fresh)


def _alerts(store: Store, shown: Sequence[Run]) -> Metric:
    family = GaugeMetricFamily(
        "steptron_alerts_open", "Alerts that have not ended.", labels=("run", "rule", "severity")
    )
    names = {run.name for run in shown}
    found = store.alerts(open_only=True)
    for key, count in sorted(Count((a.run, a.rule, a.severity) for a in found if a.run in names).items()):
        family.add_metric(key, count)
    return family


def _details(store: Store, runs: Sequence[Run]) -> Iterator[Metric]:
    figures = GaugeMetricFamily(
        "steptron_figure",
        "A figure derived for each layer, of the latest iteration.",
        labels=("run", "figure", "layer"),
    )
    confidence = GaugeMetricFamily(
        "steptron_routing_confidence", "Routing confidence of the latest iteration.", labels=("run", "layer")
    )
    missing = GaugeMetricFamily("steptron_run_missing_ranks", "Ranks that the latest iteration lacks.", labels=("run",))
    seconds = GaugeMetricFamily("steptron_run_iteration_seconds", "Time of the latest iteration.", labels=("run",))
    left_out = 0
    for run in runs:
        last = run.last_iteration
        try:
            table = store.iterations(run.name, last, last)
            for row in table.to_pylist():
                missing.add_metric((run.name,), row["world_size"] - row["num_ranks"])
                seconds.add_metric((run.name,), row["seconds"])
            names = store.derived_names(run.name)
            for name in names[:MAX_FIGURES]:
                points = store.derived(run.name, name, last, last, 1)
                for layer, value in zip(points.layers[:MAX_LAYERS], points.values[-1:].ravel(), strict=False):
                    if math.isnan(value):
                        continue
                    if len(figures.samples) >= MAX_SERIES:
                        left_out += 1
                        continue
                    figures.add_metric((run.name, name, str(layer)), float(value))
            left_out += max(0, len(names) - MAX_FIGURES)
            _add_confidence(store, run, confidence)
        except KeyError:
            continue  # deleted meanwhile
    yield from (figures, confidence, missing, seconds)
    yield GaugeMetricFamily("steptron_figures_left_out", "Derived figures beyond this endpoint's limits.", left_out)


def _add_confidence(store: Store, run: Run, confidence: GaugeMetricFamily) -> None:
    last = run.last_iteration
    there = {info.metric: info for info in store.metrics(run.name)}
    name = "moe.confidence"
    for layer in there[name].layers[:MAX_LAYERS] if name in there else ():
        value = store.points(run.name, name, layer, "mean", last, last, 1).values[-1:, :1]
        if value.size and not math.isnan(value.item()):
            confidence.add_metric((run.name, str(layer)), float(value.item()))


def _values(store: Store, runs: Sequence[Run], requests: RequestMetrics) -> Metric:
    family = GaugeMetricFamily(
        "steptron_value", "A metric of the run, the latest value.", labels=("run", "metric", "item")
    )
    held = requests.values
    for run in runs:
        found = held.get(run.name)
        if found is None or found[0] != run:
            try:
                held[run.name] = found = run, list(_values_of(store, run))
            except KeyError:
                continue  # deleted meanwhile
        for labels, value in found[1]:
            family.add_metric(labels, value)
    for name in held.keys() - {run.name for run in runs}:
        held.pop(name, None)
    return family


def _values_of(store: Store, run: Run) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Of each metric the latest value, which of one that is not measured in each iteration is of an earlier one."""
    last = run.last_iteration
    there = {info.metric: info for info in store.metrics(run.name)}
    for name in _OF_RUN:
        known = catalogue.find(name)
        if known is None or name not in there or there[name].items > 16:
            continue
        first = max(run.first_iteration, last - LOOK_BACK + 1) if known.cadence == "sampled" else last
        points = store.points(run.name, name, there[name].layers[0], known.headline, first, last, LOOK_BACK)
        for item, values in enumerate(points.values.T.tolist()):
            value = next((one for one in reversed(values) if not math.isnan(one)), None)
            if value is not None:
                yield (run.name, name, str(item)), value
