"""The API against a store whose values are known."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from steptron_metrics import catalogue
from steptron_metrics.errors import MetricsError
from steptron_metrics.http import encoding
from steptron_metrics.http.timeline import COLUMNS, timeline
from steptron_metrics.journal.writer import Writer
from steptron_metrics.protocol.description import Series, serialize
from steptron_metrics.results import Points
from tests.metrics_server.http.binary import decode
from tests.metrics_server.http.fakes import FakeStore, some_state
from tests.metrics_server.reading.frames import frame

METRIC = "moe.output_norm_max"


def test_runs_are_listed_with_their_state(client: TestClient, store: FakeStore) -> None:
    runs = {run["name"]: run for run in client.get("/api/v1/runs").json()}
    assert runs.keys() == {"blow-up", "other"}
    assert runs["blow-up"]["live"] and not runs["other"]["live"]
    assert runs["blow-up"]["partial"] == 2 and runs["blow-up"]["open_alerts"] == 1
    assert client.get("/api/v1/runs/blow-up").json() == runs["blow-up"]
    assert runs["blow-up"]["last_ended_ns"] == store.fakes["blow-up"].last_ended_ns


def test_metrics_carry_what_the_catalogue_knows(reader: TestClient) -> None:
    metrics = {metric["name"]: metric for metric in reader.get("/api/v1/runs/blow-up/metrics").json()}
    known = catalogue.find(METRIC)
    assert known is not None
    assert metrics[METRIC] == {
        "name": METRIC,
        "layers": [3, 4, 5],
        "items": 16,
        "item": "expert",
        "cadence": "micro_batch",
        "headline": "max",
        "description": known.description,
        "role": None,
        "relative": True,
    }
    assert metrics["weight.norm.expert_up"]["role"] == "expert_up"
    assert metrics["custom.thing"]["item"] is None and metrics["custom.thing"]["headline"] == "mean"


def test_points_are_the_stores(client: TestClient, store: FakeStore) -> None:
    answer = client.get(
        f"/api/v1/runs/blow-up/points?metric={METRIC}&layer=5&layer=3&statistic=mean&first=11&last=110&max_points=10"
    ).json()
    assert [block["layer"] for block in answer["blocks"]] == [5, 3]
    for block in answer["blocks"]:
        expected = store.points("blow-up", METRIC, block["layer"], "mean", 11, 110, 10)
        assert block["first"] == expected.first.tolist() and block["last"] == expected.last.tolist()
        assert block["first"][0] == 11 and block["last"][-1] == 110 and len(block["first"]) == 10
        for plane in ("values", "low", "high"):
            np.testing.assert_array_equal(np.float32(block[plane]), getattr(expected, plane))


def test_without_a_statistic_it_is_the_headline(reader: TestClient) -> None:
    path = f"/api/v1/runs/blow-up/points?metric={METRIC}&layer=5&max_points=1"
    assert reader.get(path).json()["blocks"][0]["statistic"] == "max"
    tokens = reader.get("/api/v1/runs/blow-up/points?metric=moe.tokens&layer=5&max_points=1").json()
    assert tokens["blocks"][0]["statistic"] == "mean"


def test_the_binary_form_holds_the_same(reader: TestClient) -> None:
    path = f"/api/v1/runs/blow-up/points?metric={METRIC}&layer=4&layer=5&max_points=7"
    plain = reader.get(path).json()
    answer = reader.get(path + "&form=binary")
    assert answer.headers["content-type"] == "application/vnd.steptron.points"
    packed = decode(answer.content)
    assert packed["run"] == plain["run"] == "blow-up"
    for one, other in zip(plain["blocks"], packed["blocks"], strict=True):
        assert one.keys() == other.keys() and one["columns"] == other["columns"]
        for name in ("first", "last", "values", "low", "high"):
            np.testing.assert_array_equal(np.asarray(one[name], other[name].dtype), other[name])


def test_some_items_and_planes_only(client: TestClient, store: FakeStore) -> None:
    answer = client.get(
        f"/api/v1/runs/blow-up/points?metric={METRIC}&layer=5&item=7&item=99&item=0&plane=high&max_points=5"
    ).json()
    (block,) = answer["blocks"]
    assert block["columns"] == [7, 99, 0] and "values" not in block and "low" not in block
    high = store.points("blow-up", METRIC, 5, "max", 1, 200, 5).high
    np.testing.assert_array_equal(np.float32([row[0] for row in block["high"]]), high[:, 7])
    np.testing.assert_array_equal(np.float32([row[2] for row in block["high"]]), high[:, 0])
    assert all(row[1] is None for row in block["high"])


def test_folded_items_are_least_median_and_largest(client: TestClient, store: FakeStore) -> None:
    (block,) = client.get(f"/api/v1/runs/blow-up/points?metric={METRIC}&layer=4&fold_items=true&max_points=9").json()[
        "blocks"
    ]
    assert block["columns"] == ["min", "median", "max"]
    expected = store.points("blow-up", METRIC, 4, "max", 1, 200, 9)
    for plane in ("values", "low", "high"):
        whole = getattr(expected, plane).astype(np.float64)
        reference = np.stack([whole.min(1), np.median(whole, axis=1), whole.max(1)], axis=1)
        np.testing.assert_allclose(np.float64(block[plane]), reference, rtol=1e-7)


def test_folding_leaves_out_what_was_not_measured_and_keeps_infinity() -> None:
    nan, inf = np.nan, np.inf
    plane = np.array([[nan, 3, 1, 2], [nan] * 4, [inf, inf, 1, inf], [5, nan, nan, nan], [-inf, 0, inf, 1]], np.float32)
    table = encoding.Table({}, range(4), np.arange(5), np.arange(5), {"values": plane})
    folded = encoding.fold_items(table).planes["values"]
    expected = [[1, 2, 3], [nan] * 3, [1, inf, inf], [5, 5, 5], [-inf, 0.5, inf]]
    np.testing.assert_array_equal(folded, np.float32(expected))


def test_json_writes_nan_as_null_and_infinity_as_a_word() -> None:
    plane = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    at = np.array([1])
    content = encoding.to_json("r", [encoding.Table({}, range(4), at, at, {"high": plane})])
    assert json.loads(content)["blocks"][0]["high"] == [[None, "Infinity", "-Infinity", 1.5]]


def test_derived_figures_of_all_layers_in_one_request(client: TestClient, store: FakeStore) -> None:
    names = client.get("/api/v1/runs/blow-up/figures").json()
    assert names == sorted(store.derived_names("blow-up"))
    figures = [f"{METRIC}.max_over_median", "moe.straggler_factor"]
    answer = client.get("/api/v1/runs/blow-up/derived", params={"figure": figures, "max_points": 20}).json()
    assert [block["figure"] for block in answer["blocks"]] == figures
    for block in answer["blocks"]:
        expected = store.derived("blow-up", block["figure"], 1, 200, 20)
        assert block["columns"] == [3, 4, 5]
        np.testing.assert_array_equal(np.float32(block["values"]), expected.values)


def test_iterations_partial_ones_and_the_latest(reader: TestClient) -> None:
    path = "/api/v1/runs/blow-up/iterations"
    rows = reader.get(f"{path}?first=19&last=22").json()
    assert [row["iteration"] for row in rows] == [19, 20, 21, 22]
    assert [row["missing"] for row in rows] == [[], [3], [3], []] and rows[1]["num_ranks"] == 7
    assert [row["iteration"] for row in reader.get(f"{path}?partial=true").json()] == [20, 21]
    assert [row["iteration"] for row in reader.get(f"{path}?partial=true&limit=1").json()] == [20]
    assert [row["iteration"] for row in reader.get(f"{path}?partial=true&limit=1&latest=true").json()] == [21]
    assert [row["iteration"] for row in reader.get(f"{path}?limit=3&latest=true").json()] == [198, 199, 200]


def test_events(reader: TestClient) -> None:
    rows = reader.get("/api/v1/runs/blow-up/events?first=60").json()
    assert [row["iteration"] for row in rows] == [100, 150, 200]
    assert rows[0]["kind"] == "checkpoint" and "100" in rows[0]["detail"]


def test_the_time_line_rolls_up_iterations(client: TestClient, store: FakeStore) -> None:
    (block,) = client.get("/api/v1/runs/blow-up/timeline?max_points=3").json()["blocks"]
    assert block["columns"] == list(COLUMNS) and block["first"] == [1, 68, 135] and block["last"] == [67, 134, 200]
    seconds = store.iterations("blow-up", 1, 67)["seconds"].to_numpy().astype(np.float64)
    np.testing.assert_allclose(block["values"][0][0], seconds.mean(), rtol=1e-6)
    np.testing.assert_allclose([block["low"][0][0], block["high"][0][0]], [seconds.min(), seconds.max()], rtol=1e-6)
    missing = COLUMNS.index("missing_ranks")
    np.testing.assert_allclose([row[missing] for row in block["values"]], [2 / 67, 0, 0], rtol=1e-6)
    assert [row[missing] for row in block["high"]] == [1, 0, 0]
    rate = COLUMNS.index("tokens_per_second")
    own = 4_194_304 / seconds[1:]
    np.testing.assert_allclose(block["values"][0][rate], own.mean(), rtol=1e-6)  # the first one's tokens are unknown


class Sparse(FakeStore):
    """Iterations that lie far apart, as a hostile client might number them."""

    numbers = np.array([1, 2, 10**6, 2**40, 2**52], np.int64)

    def iterations(self, run: str, first: int, last: int) -> pa.Table:
        self.asked = getattr(self, "asked", 0) + 1
        there = self.numbers[(self.numbers >= first) & (self.numbers <= last)]
        table = super().iterations(run, 1, len(there))
        return table.set_column(0, "iteration", pa.array(there)) if len(there) else table.slice(0, 0)


def test_the_time_line_of_iterations_far_apart_does_not_hang(store: FakeStore) -> None:
    sparse = Sparse(*store.fakes.values())
    points = timeline(sparse, "blow-up", 1, 2**52, 100)
    assert points.first.tolist() == Sparse.numbers.tolist()
    assert sparse.asked < 60


def test_alerts(reader: TestClient) -> None:
    assert [alert["number"] for alert in reader.get("/api/v1/alerts").json()] == [2, 1]
    (alert,) = reader.get("/api/v1/alerts?run=blow-up&open=true").json()
    assert (alert["layer"], alert["item"], alert["ended_iteration"]) == (5, 7, None)
    assert alert["wants_checkpoint"] and alert["remedy"].startswith("Turn on activation clipping")
    assert reader.get("/api/v1/alerts").json()[1]["worst"] == "Infinity"
    assert reader.get("/api/v1/alerts?run=other").json() == []


def test_server_state(reader: TestClient) -> None:
    state = reader.get("/api/v1/server").json()
    assert state["pending_iterations"] == 2 and state["dropped_frames"] == 5
    assert state["receivers"][0]["frames"] == 40_960 and state["waiting"][0]["ranks"] == 6
    assert (state["trouble"], state["set_aside"]) == (None, 0)


def test_a_server_whose_database_is_away_says_so(connect: Callable[..., TestClient], store: FakeStore) -> None:
    def away(*_: object, **__: object) -> None:
        raise MetricsError("database x cannot be reached")

    store.runs = store.alerts = away  # type: ignore[assignment]
    client = connect(state=lambda: replace(some_state(), trouble="storing 3 iterations: database x cannot be reached"))
    assert client.get("/healthz").json() == {"status": "trouble"}
    assert client.get("/api/v1/server").json()["trouble"].endswith("database x cannot be reached")
    scraped = client.get("/metrics")
    assert scraped.status_code == 200
    for line in ("steptron_server_trouble 1.0", "steptron_server_database_answers 0.0"):
        assert line in scraped.text.splitlines()
    assert "steptron_run_last_iteration{" not in scraped.text


@pytest.mark.parametrize(
    "path",
    [
        "runs",
        "runs/blow-up",
        f"runs/blow-up/points?metric={METRIC}&layer=5&max_points=3",
        f"runs/blow-up/derived?figure={METRIC}.max_over_median",
        "runs/blow-up/timeline?form=binary",
    ],
)
def test_an_entity_tag_holds_until_an_iteration_is_stored(client: TestClient, store: FakeStore, path: str) -> None:
    tag = client.get(f"/api/v1/{path}").headers["etag"]
    again = client.get(f"/api/v1/{path}", headers={"If-None-Match": tag})
    assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    store.fakes["blow-up"].iterations += 1
    client.app.state.context.queries.forget_runs()  # type: ignore[attr-defined]
    fresh = client.get(f"/api/v1/{path}", headers={"If-None-Match": tag})
    assert fresh.status_code == 200 and fresh.headers["etag"] != tag


def test_entity_tags_of_different_questions_differ(reader: TestClient) -> None:
    path = f"/api/v1/runs/blow-up/points?metric={METRIC}&max_points=3&layer="
    tags = {reader.get(f"{path}{rest}").headers["etag"] for rest in ("4", "5", "5&plane=high", "5&form=binary")}
    assert len(tags) == 4


def _rows(store: FakeStore, metrics: list[str] | None, first: int, last: int) -> pa.Table:
    return pa.Table.from_batches(store.table("blow-up", metrics, first, last))


def test_export_as_a_stream_of_arrow(client: TestClient, store: FakeStore) -> None:
    answer = client.get(f"/api/v1/runs/blow-up/table?metric={METRIC}&metric=train.loss&first=5&last=9")
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    got = pa.ipc.open_stream(answer.content).read_all()
    expected = _rows(store, [METRIC, "train.loss"], 5, 9)
    assert len(got) == 5 * (3 * 16 + 1) and got.equals(expected)


def test_export_as_parquet(client: TestClient, store: FakeStore) -> None:
    answer = client.get("/api/v1/runs/blow-up/table?metric=train.loss&form=parquet")
    assert 'filename="blow-up.parquet"' in answer.headers["content-disposition"]
    got = pq.read_table(io.BytesIO(answer.content))
    assert len(got) == 200 and got.equals(_rows(store, ["train.loss"], 1, 200))


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_an_export_of_nothing_has_its_columns(reader: TestClient, form: str) -> None:
    content = reader.get(f"/api/v1/runs/blow-up/table?first=900&form={form}").content
    table = pa.ipc.open_stream(content).read_all() if form == "arrow" else pq.read_table(io.BytesIO(content))
    assert len(table) == 0 and table.column_names[:4] == ["iteration", "metric", "layer", "item"]


def test_exports_give_back_their_place(reader: TestClient) -> None:
    for _ in range(5):
        assert reader.get("/api/v1/runs/blow-up/table?metric=train.loss").status_code == 200


def test_no_more_than_two_exports_at_once(reader: TestClient) -> None:
    places = reader.app.state.context.exports  # type: ignore[attr-defined]
    with places, places:
        answer = reader.get("/api/v1/runs/blow-up/table")
    assert answer.status_code == 503 and "2 exports" in answer.json()["reason"] and answer.headers["retry-after"]


def test_a_live_run_is_deleted_by_force_only(client: TestClient, store: FakeStore) -> None:
    answer = client.delete("/api/v1/runs/blow-up")
    assert answer.status_code == 409 and "force=true" in answer.json()["reason"] and "blow-up" in store.fakes
    assert client.delete("/api/v1/runs/other").status_code == 204 and "other" not in store.fakes
    assert client.delete("/api/v1/runs/blow-up?force=true").status_code == 204
    assert client.get("/api/v1/runs").json() == []
    assert client.delete("/api/v1/runs/blow-up").status_code == 404


def test_a_run_of_which_nothing_is_stored_can_be_deleted(connect: Callable[..., TestClient], tmp_path: Path) -> None:
    deleted: list[str] = []
    client = connect(delete=deleted.append)
    assert client.delete("/api/v1/runs/unstored").status_code == 404
    (client.app.state.context.settings.journal / "unstored").mkdir(parents=True)  # type: ignore[attr-defined]
    assert client.delete("/api/v1/runs/unstored").status_code == 204
    assert deleted == ["unstored"]


def test_the_servers_own_way_to_delete_is_used(connect: Callable[..., TestClient], store: FakeStore) -> None:
    deleted: list[str] = []
    assert connect(delete=deleted.append).delete("/api/v1/runs/other").status_code == 204
    assert deleted == ["other"] and "other" in store.fakes


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("runs/none", 404, "no run 'none'"),
        ("runs/none/metrics", 404, "no run"),
        ("runs/none/table", 404, "no run"),
        ("runs/blow-up/points?metric=moe.nothing&layer=5", 404, "no metric 'moe.nothing'"),
        (f"runs/blow-up/points?metric={METRIC}&layer=9", 404, "of layer 9"),
        (f"runs/blow-up/points?metric={METRIC}", 422, "layer: Field required"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&max_points=0", 422, "max_points"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&max_points=5001", 422, "max_points"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&statistic=mode", 422, "statistic"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&first=-1", 422, "first"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&last=9007199254740993", 422, "last"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&plane=middle", 422, "plane"),
        (f"runs/blow-up/points?metric={METRIC}&layer=5&form=xml", 422, "form"),
        ("runs/blow-up/points?metric=A&layer=5", 422, "metric"),
        ("runs/blow-up/derived?figure=moe.nothing", 404, "no figure"),
        ("runs/blow-up/derived", 422, "figure"),
        ("runs/blow-up/table?metric=moe.nothing", 404, "no metric"),
        ("runs/blow-up/iterations?limit=5001", 422, "limit"),
        ("runs/blow-up/iterations?frist=5", 422, "frist: no parameter of /api/v1/runs/{run}/iterations"),
        ("runs?first=5", 422, "there are none"),
        ("alerts?run=none", 404, "no run"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_said(reader: TestClient, path: str, status: int, reason: str) -> None:
    answer = reader.get(f"/api/v1/{path}")
    assert answer.status_code == status and reason in answer.json()["reason"]


def test_too_many_values_are_refused_before_they_are_read(connect: Callable[..., TestClient], store: FakeStore) -> None:
    run = store.fakes["blow-up"]
    run.ranks, run.iterations, run.partial = 65_536, 10_000, ()
    read: list[int] = []

    class Counted(FakeStore):
        def points(self, *arguments: object) -> Points:
            read.append(1)
            return super().points(*arguments)  # type: ignore[arg-type]

    client = connect(store=Counted(run))
    path = "/api/v1/runs/blow-up/points?metric=rank.compute_seconds&layer=-1"
    answer = client.get(f"{path}&max_points=500")
    assert answer.status_code == 422 and "at most 122 points" in answer.json()["reason"]
    answer = client.get(f"{path}&max_points=10")
    assert answer.status_code == 422 and "form=binary" in answer.json()["reason"] and not read
    assert client.get(f"{path}&max_points=10&form=binary").status_code == 200 and read


def test_every_parameter_and_answer_is_documented(reader: TestClient) -> None:
    document = reader.get("/api/v1/openapi.json").json()
    paths = document["paths"]
    assert {"/api/v1/runs/{run}/points", "/api/v1/runs/{run}/table", "/metrics", "/healthz"} <= paths.keys()
    for path, methods in paths.items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"] and operation["description"], where
            for parameter in operation.get("parameters", []):
                assert parameter.get("description"), f"{where} {parameter['name']}"
                assert _is_limited(parameter["schema"]), f"{where} {parameter['name']}"
            assert "requestBody" not in operation, where
            if method == "get" and path.startswith("/api/"):
                assert operation["responses"]["200"]["content"], where
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name


def _is_limited(schema: dict) -> bool:
    """Numbers have bounds, words a pattern or a list, lists a length."""
    if "anyOf" in schema:
        return all(_is_limited(one) for one in schema["anyOf"])
    kind = schema.get("type")
    if kind == "integer":
        return "maximum" in schema and "minimum" in schema
    if kind == "string":
        return "enum" in schema or "maxLength" in schema
    if kind == "array":
        return "maxItems" in schema and _is_limited(schema["items"])
    return kind in ("boolean", "null")


def test_a_run_that_has_finished_is_not_live(client: TestClient, store: FakeStore) -> None:
    store.fakes["blow-up"].finished = True
    run = client.get("/api/v1/runs/blow-up").json()
    assert run["finished"] and not run["live"]
    assert client.delete("/api/v1/runs/blow-up").status_code == 204


def test_a_table_comes_in_parts(client: TestClient, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole iterations, as many as there is room for, and where to go on."""
    path: str = f"/api/v1/runs/blow-up/table?metric={METRIC}&metric=train.loss&first=3&last=12&limit=200"  # 49 a piece
    parts = []
    while path:
        answer = client.get(path)
        assert answer.status_code == 200
        parts.append(pa.ipc.open_stream(answer.content).read_all().combine_chunks())
        path = answer.links.get("next", {}).get("url", "")
        assert not path or path.startswith("/api/v1/runs/blow-up/table?")
    assert [sorted(set(part["iteration"].to_pylist())) for part in parts] == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12]]
    assert [len(part) for part in parts] == [196, 196, 98]
    one = client.get(f"/api/v1/runs/blow-up/table?metric={METRIC}&first=3&last=4&limit=1")
    assert set(pa.ipc.open_stream(one.content).read_all()["iteration"].to_pylist()) == {3} and one.links["next"]
    assert "next" not in client.get("/api/v1/runs/blow-up/table?metric=train.loss").links
    assert client.get("/api/v1/runs/blow-up/table?limit=5000001").status_code == 422


def test_a_database_that_is_away_is_told_within_seconds(connect: Callable[..., TestClient]) -> None:
    class Away(FakeStore):
        silent = threading.Event()

        def runs(self) -> Any:
            if not self.silent.is_set():
                raise MetricsError("PostgreSQL database x at y cannot be reached")
            time.sleep(3)
            return []

        def alerts(self, run: str | None = None, open_only: bool = False) -> Any:
            return self.runs()

    store = Away()
    client = connect(store=store, state=lambda: replace(some_state(), trouble="storing: no route to host"))
    paths = ("/api/v1/runs", "/api/v1/runs/x", "/api/v1/runs/x/points?metric=a.b&layer=0", "/api/v1/alerts")
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 503 and "cannot be reached" in answer.json()["reason"], path
        assert answer.headers["retry-after"] == "5"
    store.silent.set()
    queries = client.app.state.context.queries  # type: ignore[attr-defined]
    queries._failure = None
    assert queries.look_seconds == 5.0
    queries.look_seconds = 0.1
    for path in paths:
        began = time.monotonic()
        answer = client.get(path)
        assert answer.status_code == 503 and time.monotonic() - began < 2
        assert answer.json()["reason"] == "the database did not answer within 0.1 s (storing: no route to host)"


def test_a_deletion_that_fails_says_why(connect: Callable[..., TestClient], store: FakeStore) -> None:
    def delete(_: str) -> None:
        raise MetricsError("run other is not deleted after 20 s: no space left")

    answer = connect(delete=delete).delete("/api/v1/runs/other")
    assert answer.status_code == 503 and "no space left" in answer.json()["reason"]


def test_ranks_that_an_iteration_waits_for(reader: TestClient) -> None:
    waiting = {one["run"]: one["missing"] for one in reader.get("/api/v1/server").json()["waiting"]}
    assert waiting == {"blow-up": [2, 5], "other": [1]}


def test_raw_values(connect: Callable[..., TestClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = (Series("train.loss"), Series("moe.tokens", 3, first=2, count=2, micro_batches=3))
    description = serialize(series)
    writer = Writer(tmp_path / "journal", 0)
    sent = {rank: np.arange(7, dtype=np.float32) + 100 * rank for rank in range(3)}
    writer.append([frame(rank, 5, 2000, description, values, run="other") for rank, values in sent.items()])
    writer.close()
    client = connect()
    path = "/api/v1/runs/other/raw?iteration=5"
    rows = pa.ipc.open_stream(client.get(f"{path}&metric=moe.tokens&layer=3").content).read_all().to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (rank, row, item, sent[rank][1 + 2 * row + item - 2])
        for rank in range(3)
        for row in range(3)
        for item in (2, 3)
    ]
    content = client.get(f"{path}&metric=train.loss&first_rank=1&last_rank=1&form=parquet").content
    assert pq.read_table(io.BytesIO(content)).to_pylist() == [{"rank": 1, "row": 0, "item": 0, "value": 100.0}]
    for wrong in ("iteration=6&metric=train.loss", "iteration=5&metric=train.loss&layer=1", "iteration=5&metric=a.b"):
        answer = client.get(f"/api/v1/runs/other/raw?{wrong}")
        assert answer.status_code == 404 and "in the journal" in answer.json()["reason"]
    assert client.get("/api/v1/runs/nowhere/raw?iteration=5&metric=a.b").status_code == 404
    monkeypatch.setattr("steptron_metrics.http.routes_export.MAX_RAW_VALUES", 17)
    answer = client.get(f"{path}&metric=moe.tokens&layer=3")
    assert answer.status_code == 422 and "that is 18 values, at most 17" in answer.json()["reason"]
    # Places are given back, whatever came of it.
    places = client.app.state.context.exports  # type: ignore[attr-defined]
    with places, places:
        assert client.get(f"{path}&metric=train.loss").status_code == 503
