"""What Prometheus gets, read by its own parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from steptron_metrics.http import prometheus
from tests.metrics_server.http.fakes import FakeRun, FakeStore, some_alerts

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(client: TestClient) -> Samples:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation or family.name.endswith("created")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_derived_values_of_the_latest_iteration(client: TestClient, store: FakeStore) -> None:
    samples = scrape(client)
    for figure in ("moe.output_norm_max.max_over_median", "moe.straggler_factor"):
        expected = store.derived("blow-up", figure, 200, 200, 1)
        for layer, wanted in zip(expected.layers, expected.values[0], strict=True):
            got = value(samples, "steptron_figure", run="blow-up", figure=figure, layer=str(layer))
            assert np.float32(got) == wanted
    loss = store.points("blow-up", "train.loss", -1, "mean", 200, 200, 1).values[0, 0]
    assert np.float32(value(samples, "steptron_value", run="blow-up", metric="train.loss", item="0")) == loss
    assert ("steptron_value", frozenset({"run": "blow-up", "metric": "train.mtp_loss", "item": "1"}.items())) in samples
    confidence = store.points("blow-up", "moe.confidence", 4, "mean", 200, 200, 1).values[0, 0]
    assert np.float32(value(samples, "steptron_routing_confidence", run="blow-up", layer="4")) == confidence


def test_runs_alerts_and_the_server(client: TestClient, store: FakeStore) -> None:
    samples = scrape(client)
    assert value(samples, "steptron_run_last_iteration", run="blow-up") == 200
    ended = value(samples, "steptron_run_last_iteration_seconds", run="blow-up")
    assert abs(ended - store.fakes["blow-up"].last_ended_ns / 1e9) < 1e-3
    assert value(samples, "steptron_run_missing_ranks", run="blow-up") == 0
    assert value(samples, "steptron_alerts_open", run="blow-up", rule="localised_blow_up", severity="critical") == 1
    assert value(samples, "steptron_server_pending_iterations") == 2
    assert value(samples, "steptron_server_frames_total", receiver="1") == 40_000
    assert value(samples, "steptron_server_dropped_frames_total") == 5
    assert value(samples, "steptron_server_trouble") == 0
    assert value(samples, "steptron_server_database_answers") == 1
    assert value(samples, "steptron_server_set_aside_iterations_total") == 0


def test_missing_ranks_of_the_latest_iteration(client: TestClient, store: FakeStore) -> None:
    store.fakes["blow-up"].partial = (200,)
    assert value(scrape(client), "steptron_run_missing_ranks", run="blow-up") == 1


def test_a_stale_run_keeps_its_time_and_its_loss_but_no_figures(client: TestClient, store: FakeStore) -> None:
    """Also for a processor that is new: nothing of it comes from a live run."""
    samples = scrape(client)
    assert value(samples, "steptron_run_last_iteration", run="other") == 30
    loss = store.points("other", "train.loss", -1, "mean", 30, 30, 1).values[0, 0]
    assert np.float32(value(samples, "steptron_value", run="other", metric="train.loss", item="0")) == loss
    assert {dict(labels)["run"] for name, labels in samples if name == "steptron_figure"} == {"blow-up"}


def test_values_are_the_latest_that_were_measured_and_are_read_once(connect: Callable[..., TestClient]) -> None:
    class Sampled(FakeStore):
        asked = 0

        def points(self, run: str, metric: str, *arguments: Any) -> Any:
            self.asked += metric == "train.loss"
            points = super().points(run, metric, *arguments)
            if metric == "validation.lm_loss":
                points.values[points.first != 150] = np.nan
            return points

    store = Sampled(FakeRun("x"))
    client = connect(store=store)
    measured = np.float32(store.fakes["x"].value("validation.lm_loss", -1, np.array([150]))[0, 0])
    for _ in range(2):
        found = value(scrape(client), "steptron_value", run="x", metric="validation.lm_loss", item="0")
        assert np.float32(found) == measured
    assert store.asked == 1
    store.fakes["x"].iterations += 1
    client.app.state.context.queries.forget_runs()  # type: ignore[attr-defined]
    scrape(client)
    assert store.asked == 2


def test_requests_are_counted_by_route(client: TestClient) -> None:
    for _ in range(3):
        client.get("/api/v1/runs/blow-up")
    client.get("/api/v1/runs/none")
    for name in ("a", "b", "c"):
        client.get(f"/{name}/x")
    samples = scrape(client)
    route = "/api/v1/runs/{run}"
    assert value(samples, "steptron_http_requests_total", route=route, status="200") == 3
    assert value(samples, "steptron_http_requests_total", route=route, status="404") == 1
    assert value(samples, "steptron_http_requests_total", route="other", status="404") == 3


def test_the_number_of_series_is_bounded(connect: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_SERIES", 40)
    monkeypatch.setattr(prometheus, "MAX_FIGURES", 5)
    monkeypatch.setattr(prometheus, "MAX_RUNS", 12)
    runs = [FakeRun(f"run-{number:02d}", iterations=5) for number in range(20)]
    samples = scrape(connect(store=FakeStore(*runs)))
    names = [name for name, _ in samples]
    assert names.count("steptron_figure") == 40 and names.count("steptron_run_iterations") == 12
    left_out = value(samples, "steptron_figures_left_out")
    total = 8 * len(runs[0].figures) * 3
    assert 0 < left_out <= total - 40


def test_two_applications_do_not_share_a_registry(connect: Callable[..., TestClient], store: FakeStore) -> None:
    first, second = connect(), connect()
    first.get("/api/v1/runs")
    assert (
        "steptron_http_requests_total",
        frozenset({"route": "/api/v1/runs", "status": "200"}.items()),
    ) not in scrape(second)


def test_infinite_figures_pass(connect: Callable[..., TestClient]) -> None:
    class Infinite(FakeStore):
        def derived(self, *arguments: Any) -> Any:
            points = super().derived(*arguments)
            points.values[:, 0] = np.inf
            points.values[:, 1] = np.nan
            return points

    run = FakeRun("x")
    samples = scrape(connect(store=Infinite(run, alerts=some_alerts(run))))
    assert value(samples, "steptron_figure", run="x", figure="moe.straggler_factor", layer="3") == float("inf")
    assert not any(dict(labels).get("layer") == "4" for name, labels in samples if name == "steptron_figure")
