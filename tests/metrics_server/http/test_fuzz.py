"""Whatever the parameters: an answer soon, a reason where it is a refusal, and never a failure."""

from __future__ import annotations

import string
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptron_metrics.access import Access
from steptron_metrics.http.app import build_app
from steptron_metrics.settings import Settings
from tests.metrics_server.http.conftest import blow_up
from tests.metrics_server.http.fakes import FakeStore, some_alerts, some_state

SECONDS = 10.0

NAMES = (
    "metric", "layer", "statistic", "item", "fold_items", "first", "last", "max_points", "plane", "form", "figure",
    "limit", "partial", "latest", "run", "open", "force", "nothing",
)  # fmt: skip
GOOD = {
    "metric": ["moe.output_norm_max", "train.loss", "weight.norm.expert_up", "custom.thing", "rank.compute_seconds"],
    "layer": ["-1", "3", "5"],
    "statistic": ["mean", "p99", "count"],
    "item": ["0", "7"],
    "fold_items": ["true", "false"],
    "first": ["0", "1", "150", "900"],
    "last": ["0", "1", "200", "9007199254740991"],
    "max_points": ["1", "2", "500", "5000"],
    "plane": ["values", "low", "high"],
    "form": ["json", "binary", "arrow", "parquet"],
    "figure": ["moe.straggler_factor", "moe.tokens.min_over_median"],
    "limit": ["1", "5000"],
    "run": ["blow-up", "other"],
}
odd = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(max_size=40),
    st.sampled_from(
        ["", "null", "NaN", "Infinity", "-0", "1e9", "0x10", "٣", "true", "%00", "\x00", "'", "../..", "[]", "a" * 300]
    ),
)
rest = st.text(string.ascii_lowercase + string.digits + "./_-%", max_size=30)
paths = st.one_of(
    st.sampled_from(
        [f"/api/v1/runs/{run}/{what}" for run in ("blow-up", "other", "none", "..", "%00", "a" * 200)
         for what in ("points", "derived", "timeline", "iterations", "events", "metrics", "figures", "table", "")]
        + ["/api/v1/runs", "/api/v1/alerts", "/api/v1/server", "/metrics", "/healthz", "/", "/page/style.css"]
    ),
    rest.map(lambda path: f"/api/v1/runs/{path}"),
    rest.map(lambda path: f"/{path}"),
)  # fmt: skip


@st.composite
def queries(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Mostly what is allowed, so that more than the first check is reached, and something odd in between."""
    pairs = []
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=9)):
        good = st.sampled_from(GOOD[name]) if name in GOOD else odd
        pairs.append((name, draw(st.one_of(good, good, good, odd))))
    return pairs


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    run, other = blow_up(), blow_up()
    other.name = "other"
    store = FakeStore(run, other, alerts=some_alerts(run))

    def keep(name: str) -> None:
        assert name in store.fakes

    with TestClient(
        build_app(Settings(folder=folder), store, Access(None), some_state, keep), base_url="http://localhost"
    ) as client:
        yield client


def _check(client: TestClient, method: str, path: str, query: list[tuple[str, str]]) -> int:
    began = time.monotonic()
    answer = client.request(method, path, params=query, headers={"If-None-Match": "x"})
    assert time.monotonic() - began < SECONDS
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400 and method != "HEAD":
        reason = answer.json()["reason"]
        assert reason and len(reason) < 4000 and "Traceback" not in reason and ".py" not in reason
    assert answer.headers["x-content-type-options"] == "nosniff"
    return answer.status_code


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=paths, query=queries(), method=st.sampled_from(["GET", "GET", "GET", "GET", "DELETE", "POST", "HEAD", "PUT"])
)
def test_any_path_with_any_parameters(fuzzed: TestClient, path: str, query: list[tuple[str, str]], method: str) -> None:
    _check(fuzzed, method, path, query)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), what=st.sampled_from(["points", "derived", "timeline", "iterations", "events", "table"]))
def test_almost_right_parameters(fuzzed: TestClient, data: st.DataObject, what: str) -> None:
    needed = {"points": ("metric", "layer"), "derived": ("figure",)}.get(what, ())
    query = [(name, data.draw(st.sampled_from(GOOD[name]))) for name in needed]
    query += data.draw(queries())
    _check(fuzzed, "GET", f"/api/v1/runs/blow-up/{what}", query)


def test_the_fuzz_starts_from_what_is_answered(fuzzed: TestClient) -> None:
    """Were all of it refused by the first check, it would say nothing."""
    for name, values in (("statistic", GOOD["statistic"]), ("plane", GOOD["plane"]), ("last", GOOD["last"])):
        for value in values:
            query = [("metric", "train.loss"), ("layer", "-1"), ("max_points", "7"), (name, value)]
            assert _check(fuzzed, "GET", "/api/v1/runs/blow-up/points", query) == 200
