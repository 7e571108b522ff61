from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pandas as pd
import pytest
from psycopg.conninfo import conninfo_to_dict

from steptron_metrics.client import MetricsClient
from steptron_metrics.errors import MetricsError
from steptron_metrics.journal.writer import Writer
from steptron_metrics.protocol.description import Folding, Series, serialize
from steptron_metrics.reading.reader import MetricsReader
from steptron_metrics.results import STATISTICS
from steptron_metrics.server import remembered
from steptron_metrics.server.local import running
from steptron_metrics.settings import Settings
from tests.metrics_server import postgres
from tests.metrics_server.reading.conftest import LAST
from tests.metrics_server.reading.frames import frame
from tests.metrics_server.storage.made import iteration


def test_data_frames(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptron_metrics.reading.whole.MAX_POINTS", 25)
    with MetricsReader(where) as reader:
        runs = reader.runs()
        assert set(runs["name"]) == {"run", "other"}
        assert runs.set_index("name").loc["run", ["iterations", "partial", "open_alerts"]].tolist() == [LAST, 1, 2]
        metrics = reader.metrics("run").set_index("metric")
        assert metrics.loc["moe.tokens", ["layers", "items", "headline"]].tolist() == [(3, 44), 5, "mean"]
        assert reader.figures("run") == ["moe.tokens.max_over_median"]
        given = [iteration(number) for number in range(1, LAST + 1)]
        given[6] = iteration(7, ranks=3)
        for row, statistic in enumerate(STATISTICS):
            frame = reader.aggregates("run", "moe.tokens", 44, statistic)  # type: ignore[arg-type]
            assert frame.index.tolist() == list(range(1, LAST + 1)) and frame.columns.tolist() == list(range(5))
            np.testing.assert_array_equal(frame.to_numpy(), np.stack([one.aggregates[1].values[row] for one in given]))
        assert reader.aggregates("run", "moe.tokens", 44, "max", max_points=4).index.tolist() == [1, 17, 33, 49]
        assert reader.aggregates("run", "moe.alignment", 3, first=10, last=20).index.tolist() == [12, 15, 18]
        derived = reader.derived("run", "moe.tokens.max_over_median")
        assert derived.columns.tolist() == [3, 44] and derived.columns.name == "layer"
        expected = np.full((LAST, 2), np.nan, np.float32)
        for row, one in enumerate(given):
            expected[row, : len(one.derived[0].layers)] = one.derived[0].values
        np.testing.assert_array_equal(derived.to_numpy(), expected)
        iterations = reader.iterations("run", 5, 8)
        assert iterations.index.tolist() == [5, 6, 7, 8]
        assert iterations["num_ranks"].tolist() == [4, 4, 3, 4] and list(iterations.loc[7, "missing"]) == [0]
        assert iterations["seconds"].tolist() == [6.5, 7.5, 8.5, 9.5]
        assert reader.events("run").to_dict("records") == [{"iteration": 9, "kind": "stage", "detail": '2, of "3"'}]
        assert reader.events("other").empty
        alerts = reader.alerts("run")
        assert alerts["number"].tolist() == [2, 1] and np.isinf(alerts["value"][0])
        assert alerts["saw"].tolist() == ["it's 30 times the median"] * 2
        table = reader.table("run", ["train.loss"], 3, 9)
        assert set(table["iteration"]) <= set(range(3, 10)) and set(table["metric"]) == {"train.loss"}
        whole = reader.table("run")
        assert len(whole) == sum(int((part.values[0] > 0).sum()) for one in given for part in one.aggregates)
        # A server hands out a part at a time.
        monkeypatch.setattr("steptron_metrics.http.routes_export.MAX_TABLE_ROWS", 40)
        pd.testing.assert_frame_equal(reader.table("run"), whole, check_categorical=False)


def test_what_does_not_exist(where: str) -> None:
    with MetricsReader(where) as reader:
        for read in (
            lambda: reader.metrics("nowhere"),
            lambda: reader.figures("nowhere"),
            lambda: reader.iterations("nowhere"),
            lambda: reader.events("nowhere"),
            lambda: reader.alerts("nowhere"),
            lambda: reader.aggregates("nowhere", "moe.tokens", 3),
            lambda: reader.aggregates("run", "moe.tokens", 4),
            lambda: reader.aggregates("run", "no.such", 3),
            lambda: reader.derived("run", "no.such"),
            lambda: reader.table("run", ["no.such"]),
            lambda: reader.table("nowhere"),
        ):
            with pytest.raises(KeyError):
                read()


def test_events_of_an_iteration_are_not_cut_in_two(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations come in parts of so many rows, and each once."""
    monkeypatch.setattr("steptron_metrics.reading.remote._ROWS", 7)
    with MetricsReader(where) as reader:
        assert reader.iterations("run").index.tolist() == list(range(1, LAST + 1))
        assert len(reader.events("run")) == 1


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="expected the address"):
        MetricsReader("no/such/folder")
    with pytest.raises(MetricsError, match="no such database"):
        MetricsReader(tmp_path)
    with pytest.raises(MetricsError, match="certificate"):
        MetricsReader("https://localhost:1", certificate=tmp_path / "certificate.pem")
    with MetricsReader("127.0.0.1:9") as reader, pytest.raises(MetricsError, match=r"127\.0\.0\.1:9 does not answer"):
        reader.runs()


def test_the_port_of_training_is_not_that_of_the_page() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with MetricsReader(f"127.0.0.1:{port}") as reader, pytest.raises(MetricsError, match="port of the page"):
            reader.runs()
    finally:
        server.stop(0).wait(10)


def test_raw_values_from_the_journal(tmp_path: Path) -> None:
    series = (
        Series("train.loss"),
        Series("moe.tokens", 3, first=2, count=2, micro_batches=3),
        Series("moe.tokens", 4, first=0, count=2, micro_batches=3),
        Series("moe.output_norm_rms", 3, first=0, count=1, folding=Folding.MOMENTS),
    )
    description = serialize(series)
    writer = Writer(tmp_path / "journal", 0)
    size = sum(one.size for one in series)
    sent = {rank: np.arange(size, dtype=np.float32) + 100 * rank for rank in (1, 0)}
    writer.append([frame(0, 5, 1000, description, np.zeros(size))])  # of an earlier session
    writer.append([frame(rank, 5, 2000, description, values) for rank, values in sent.items()])
    writer.append(
        [frame(1, 5, 2000, description, sent[1]), frame(1, 6, 2000, description, np.ones(size))]
    )  # sent again
    writer.close()
    reader = MetricsReader("127.0.0.1:9", journal=str(tmp_path / "journal"))
    found = reader.raw("run", 5, "moe.tokens", 3)
    expected = pd.DataFrame(
        [
            (rank, row, item, sent[rank][1 + 2 * row + item - 2])
            for rank in (0, 1)
            for row in range(3)
            for item in (2, 3)
        ],
        columns=["rank", "row", "item", "value"],
    ).astype({"value": np.float32})
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    assert found["value"].dtype == np.float32
    assert reader.raw("run", 5, "moe.output_norm_rms", 3)["row"].tolist() == [0, 1, 2, 3, 4] * 2
    assert reader.raw("run", 5, "train.loss")["value"].tolist() == [0.0, 100.0]
    for arguments in (("run", 7, "train.loss"), ("run", 5, "train.loss", 3), ("nowhere", 5, "train.loss")):
        with pytest.raises(KeyError):
            reader.raw(*arguments)
    with pytest.raises(MetricsError, match="expected a name"):
        reader.raw("../run", 5, "train.loss")


def test_a_database_alone_has_no_raw_values_and_its_folder_remembers_it(tmp_path: Path) -> None:
    url = postgres.new_database()
    with running(Settings(tmp_path, database=url, port=0, http_port=0, min_free_bytes=0)) as server:
        client = MetricsClient(server.address, "run", time.time_ns(), 1, spool=tmp_path / "spool")
        layout = client.describe([Series("moe.tokens", 3, 0, 2)])
        client.send(0, 1, layout, np.array([5, 7], np.float32), ended_ns=1, seconds=0.1, consumed_tokens=9)
        assert client.close(30.0).stored == 1
        deadline = time.monotonic() + 30
        with MetricsReader(server.http_address) as reader:
            while not len(reader.runs()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # Over the network, too.
            assert reader._journal is None
            assert reader.raw("run", 1, "moe.tokens", 3)["value"].tolist() == [5.0, 7.0]
            with pytest.raises(KeyError, match="iteration 2"):
                reader.raw("run", 2, "moe.tokens", 3)
    # Of the stopped server the folder tells where the results are, and not the password.
    assert (conninfo_to_dict(url).get("password") or "none") not in (tmp_path / "database.json").read_text()
    with MetricsReader(tmp_path) as reader:
        assert reader.runs()["name"].tolist() == ["run"]
        assert reader.raw("run", 1, "moe.tokens", 3)["value"].tolist() == [5.0, 7.0]
    with MetricsReader(url) as reader, pytest.raises(MetricsError, match="journal=FOLDER/journal"):
        reader.raw("run", 1, "moe.tokens", 3)


def test_a_password_is_not_remembered(tmp_path: Path) -> None:
    remembered.write(tmp_path, "postgresql://me:secret@127.0.0.1:9/metrics?sslpassword=hidden")
    text = (tmp_path / "database.json").read_text()
    assert "me" in text and "secret" not in text and "hidden" not in text
    with pytest.raises(MetricsError, match=r"keeps its results in PostgreSQL.*give the database's URL, or set PGPASS"):
        MetricsReader(tmp_path)
    remembered.write(tmp_path, None)
    with pytest.raises(MetricsError, match="no such database"):
        MetricsReader(tmp_path)


def test_the_folder_of_a_running_server_is_read_through_it(tmp_path: Path) -> None:
    """Its DuckDB file can be opened by nobody else meanwhile."""
    with running(Settings(tmp_path, port=0, http_port=0)) as server:
        client = MetricsClient(server.address, "run", time.time_ns(), 1, spool=tmp_path / "spool")
        layout = client.describe([Series("moe.tokens", 3, 0, 2)])
        client.send(0, 1, layout, np.array([5, 7], np.float32), ended_ns=1, seconds=0.1, consumed_tokens=9)
        assert client.close(30.0).stored == 1
        deadline = time.monotonic() + 30
        with MetricsReader(tmp_path) as reader:
            while not len(reader.runs()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            live = reader.aggregates("run", "moe.tokens", 3)
            assert reader.raw("run", 1, "moe.tokens", 3)["value"].tolist() == [5.0, 7.0]
    with MetricsReader(tmp_path) as reader:
        assert live.to_numpy().tolist() == reader.aggregates("run", "moe.tokens", 3).to_numpy().tolist() == [[5.0, 7.0]]
