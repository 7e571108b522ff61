"""The API on the embedded database."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from steptron_metrics.results import Aggregate, Derived, Event, Iteration
from steptron_metrics.settings import Settings
from steptron_metrics.storage.base import Store
from steptron_metrics.storage.opening import open_store
from tests.metrics_server.http.binary import decode
from tests.metrics_server.http.conftest import blow_up
from tests.metrics_server.http.fakes import some_alerts
from tests.metrics_server.http.test_prometheus import scrape, value

LAYERS, EXPERTS, ITERATIONS = (3, 4), 6, 40
METRIC = "moe.output_norm_max"


def norms(iteration: int, layer: int) -> np.ndarray:
    """float32 [7, experts]; nothing was measured of the last expert."""
    generator = np.random.default_rng((iteration, layer))
    values = generator.lognormal(1, 0.5, (7, EXPERTS)).astype(np.float32)
    values[0] = 4
    values[:, -1] = np.nan
    values[0, -1] = 0
    return values


def ratios(iteration: int) -> np.ndarray:
    return np.float32([iteration, np.inf if iteration == ITERATIONS else 1 / iteration])


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Store]:
    store = open_store(Settings(folder=tmp_path))
    now = time.time_ns()
    store.put(
        [
            Iteration(
                run="real",
                session_ns=now,
                iteration=number,
                world_size=4,
                missing=(2,) if number == 7 else (),
                ended_ns=now + number * 10**9,
                seconds=0.5,
                consumed_tokens=number * 1000,
                events=(Event("checkpoint", "wrote one"),) if number == 10 else (),
                aggregates=(
                    *(Aggregate(METRIC, layer, norms(number, layer)) for layer in LAYERS),
                    Aggregate("train.loss", -1, np.full((7, 1), 5 - number / 10, np.float32)),
                ),
                derived=(
                    Derived(
                        f"{METRIC}.max_over_median", np.int32(LAYERS), ratios(number), np.zeros(len(LAYERS), np.int32)
                    ),
                ),
            )
            for number in range(1, ITERATIONS + 1)
        ]
    )
    yield store
    store.close()


@pytest.fixture
def real(connect: Callable[..., TestClient], filled: Store) -> TestClient:
    return connect(store=filled)


def test_points_figures_and_iterations(real: TestClient) -> None:
    (run,) = real.get("/api/v1/runs").json()
    assert (run["iterations"], run["partial"], run["world_size"], run["live"]) == (ITERATIONS, 1, 4, True)
    path = f"/api/v1/runs/real/points?metric={METRIC}&layer=4&statistic=p99&max_points=100"
    block = decode(real.get(path + "&form=binary").content)["blocks"][0]
    expected = np.stack([norms(number, 4)[6] for number in range(1, ITERATIONS + 1)])
    np.testing.assert_array_equal(block["values"], expected)
    np.testing.assert_array_equal(block["first"], np.arange(1, ITERATIONS + 1))
    plain = real.get(path).json()["blocks"][0]
    assert plain["values"][0][-1] is None and np.float32(plain["values"][3][1]) == expected[3, 1]
    folded = real.get(path + "&fold_items=true").json()["blocks"][0]
    np.testing.assert_array_equal(np.float32([row[2] for row in folded["values"]]), np.nanmax(expected, axis=1))
    figure = real.get(f"/api/v1/runs/real/derived?figure={METRIC}.max_over_median").json()["blocks"][0]
    assert figure["columns"] == list(LAYERS) and figure["values"][-1] == [ITERATIONS, "Infinity"]
    assert [row["iteration"] for row in real.get("/api/v1/runs/real/iterations?partial=true").json()] == [7]
    assert real.get("/api/v1/runs/real/events").json() == [
        {"iteration": 10, "kind": "checkpoint", "detail": "wrote one"}
    ]
    time_line = real.get("/api/v1/runs/real/timeline?max_points=4").json()["blocks"][0]
    assert [row[0] for row in time_line["values"]] == [0.5] * 4 and time_line["last"][-1] == ITERATIONS
    assert time_line["values"][1][-1] == 2000.0


def test_roll_ups_keep_the_extremes(real: TestClient) -> None:
    path = f"/api/v1/runs/real/points?metric={METRIC}&layer=3&statistic=max&max_points=5&form=binary"
    block = decode(real.get(path).content)["blocks"][0]
    assert 1 <= len(block["first"]) <= 5
    for index, (first, last) in enumerate(zip(block["first"], block["last"], strict=True)):
        values = np.stack([norms(number, 3)[5] for number in range(int(first), int(last) + 1)])
        np.testing.assert_array_equal(block["low"][index][:-1], values.min(0)[:-1])
        np.testing.assert_array_equal(block["high"][index][:-1], values.max(0)[:-1])


def test_exports_alerts_prometheus_and_deletion(real: TestClient, filled: Store) -> None:
    table = pa.ipc.open_stream(real.get(f"/api/v1/runs/real/table?metric={METRIC}&first=39").content).read_all()
    assert len(table) == 2 * len(LAYERS) * (EXPERTS - 1)
    again = pq.read_table(io.BytesIO(real.get(f"/api/v1/runs/real/table?metric={METRIC}&form=parquet").content))
    assert len(again) == ITERATIONS * len(LAYERS) * (EXPERTS - 1)
    rows = {(row["iteration"], row["layer"], row["item"]): row for row in again.to_pylist()}
    assert np.float32(rows[12, 4, 2]["median"]) == norms(12, 4)[4, 2]

    run = blow_up()
    run.name = "real"
    filled.put_alerts(some_alerts(run))
    real.app.state.context.queries.forget_runs()  # type: ignore[attr-defined]
    alerts = real.get("/api/v1/alerts?run=real").json()
    assert [alert["number"] for alert in alerts] == [2, 1] and alerts[1]["worst"] == "Infinity"
    samples = scrape(real)
    assert value(samples, "steptron_figure", run="real", figure=f"{METRIC}.max_over_median", layer="3") == ITERATIONS
    assert value(samples, "steptron_alerts_open", run="real", rule="localised_blow_up", severity="critical") == 1
    assert real.delete("/api/v1/runs/real?force=true").status_code == 204
    assert real.get("/api/v1/runs").json() == [] and real.get("/api/v1/runs/real").status_code == 404
