from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steptron_metrics.errors import MetricsError
from steptron_metrics.reading.export import export_tables
from steptron_metrics.reading.reader import MetricsReader
from steptron_metrics.reading.source import Source, StoredSource, open_source
from steptron_metrics.reading.to_tensorboard import export_tensorboard
from steptron_metrics.results import STATISTICS
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store
from tests.metrics_server import postgres
from tests.metrics_server.reading.conftest import LAST
from tests.metrics_server.storage.made import iteration


@pytest.fixture
def source(where: str) -> Any:
    source = open_source(where)
    yield source
    source.close()


def test_parquet_holds_all_there_is(source: Source, where: str, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    out = export_tables(source, "run", tmp_path / "out", progress=lambda *step: steps.append(step))
    assert out == tmp_path / "out" and [one.name for one in tmp_path.iterdir()] == ["out"]
    assert [done for _, done, _ in steps] == list(range(1, steps[-1][2] + 1))
    found = pyarrow.dataset.dataset(out / "aggregates", partitioning="hive").to_table().to_pandas()
    expected = []
    for number in range(1, LAST + 1):
        for part in iteration(number, ranks=3 if number == 7 else 4).aggregates:
            for item in np.flatnonzero(part.values[0]):
                expected.append((number, part.metric, part.layer, item, *part.values[:, item].tolist()))
    order = ["iteration", "metric", "layer", "item"]
    wanted = pd.DataFrame(expected, columns=[*order, *STATISTICS]).sort_values(order, ignore_index=True)
    found["metric"] = found["metric"].astype(str)
    found = found.sort_values(order, ignore_index=True)[wanted.columns]
    pd.testing.assert_frame_equal(found, wanted, check_dtype=False, check_exact=True)
    derived = pq.read_table(out / "derived/figure=moe.tokens.max_over_median/data.parquet").to_pandas()
    with_layers = derived.pivot(index="iteration", columns="layer", values="value")
    for number in (1, 5, 7, LAST):
        figure = iteration(number, ranks=3 if number == 7 else 4).derived[0]
        np.testing.assert_array_equal(with_layers.loc[number, figure.layers.tolist()], figure.values)
    assert len(pq.read_table(out / "iterations.parquet")) == LAST
    assert pq.read_table(out / "events.parquet").to_pylist() == [
        {"iteration": 9, "kind": "stage", "detail": '2, of "3"'}
    ]
    assert pq.read_table(out / "alerts.parquet").column("layer").to_pylist() == [None, 44]
    compression = pq.ParquetFile(out / "aggregates/metric=moe.tokens/data.parquet").metadata.row_group(0).column(4)
    assert compression.compression == "ZSTD"
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["run"], manifest["first"], manifest["last"]) == ("run", 1, LAST)


def test_csv(source: Source, tmp_path: Path) -> None:
    out = export_tables(source, "run", tmp_path / "out", "csv", metrics=["train.loss"], first=4, last=12)
    found = pd.read_csv(out / "aggregates/metric=train.loss/data.csv")
    expected = [n for n in range(4, 13) if iteration(n, ranks=3 if n == 7 else 4).aggregates[2].values[0, 0]]
    assert found["iteration"].tolist() == expected
    first = iteration(expected[0]).aggregates[2].values[:, 0]
    np.testing.assert_array_equal(found.loc[0, list(STATISTICS)].to_numpy(np.float32), first)
    assert not (out / "derived").exists()
    iterations = pd.read_csv(out / "iterations.csv", keep_default_na=False)
    assert iterations["iteration"].tolist() == list(range(4, 13))
    assert iterations["missing"].astype(str).tolist() == ["", "", "", "0", "", "", "", "", ""]
    assert pd.read_csv(out / "events.csv")["detail"].tolist() == ['2, of "3"']


def test_an_export_is_not_overwritten_unless_asked_for(source: Source, tmp_path: Path) -> None:
    out = export_tables(source, "run", tmp_path / "out", metrics=["train.loss"])
    with pytest.raises(MetricsError, match="exists"):
        export_tables(source, "run", out)
    assert not (out / "derived").exists()
    export_tables(source, "run", out, overwrite=True)
    assert (out / "derived").exists() and [one.name for one in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(MetricsError, match="no export"):
        export_tables(source, "run", tmp_path / "mine", overwrite=True)
    for wrong in ({"run": "nowhere"}, {"run": "run", "metrics": ["no.such"]}):
        with pytest.raises(KeyError):
            export_tables(source, **wrong, folder=tmp_path / "none")  # type: ignore[arg-type]
    assert not (tmp_path / "none.partial").exists()


class Broken(StoredSource):
    """Breaks off at the second metric."""

    def table(self, run: str, metrics: Any, first: int, last: int) -> Any:
        if metrics == ["moe.tokens"]:
            raise MetricsError("the cable")
        return super().table(run, metrics, first, last)


def test_an_export_that_broke_off_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    store = open_store(Settings(folder), read_only=True)
    with pytest.raises(MetricsError, match="the cable"):
        export_tables(Broken(store, "x", None), "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = tmp_path / "out.partial/aggregates/metric=moe.alignment/data.parquet"
    written = done.stat().st_mtime_ns
    good = StoredSource(store, "x", None)
    with pytest.raises(MetricsError, match="something else that broke off"):
        export_tables(good, "run", tmp_path / "out", "csv")
    out = export_tables(good, "run", tmp_path / "out")
    assert (out / "aggregates/metric=moe.alignment/data.parquet").stat().st_mtime_ns == written
    assert len(pq.read_table(out / "aggregates/metric=moe.tokens/data.parquet")) > 0
    assert not (tmp_path / "out.partial").exists()
    store.close()


@pytest.mark.parametrize("items", ["histograms", "scalars", "none"])
def test_tensorboard_reads_it(source: Source, tmp_path: Path, items: Any) -> None:
    out = export_tensorboard(source, "run", tmp_path / "out", items=items)
    read = EventAccumulator(str(out), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    scalars = set(read.Tags()["scalars"])
    assert {"train.loss", "moe.tokens.max_over_median/layer_3", "moe.tokens.max_over_median/layer_44"} <= scalars
    losses = read.Scalars("train.loss")
    given = {n: iteration(n, ranks=3 if n == 7 else 4) for n in range(1, LAST + 1)}
    expected = {n: one.aggregates[2].values[1, 0] for n, one in given.items() if one.aggregates[2].values[0, 0]}
    assert {event.step: np.float32(event.value) for event in losses} == expected
    assert losses[0].wall_time == 10**9 + losses[0].step
    figure = read.Scalars("moe.tokens.max_over_median/layer_3")
    assert [event.step for event in figure] == [n for n in given if n % 7]
    assert ("moe.tokens/layer_44/item_2" in scalars) == (items == "scalars")
    assert ("moe.tokens/layer_44" in read.Tags()["histograms"]) == (items == "histograms")
    if items == "histograms":
        means = given[12].aggregates[1].values[1]
        (event,) = [one for one in read.Histograms("moe.tokens/layer_44") if one.step == 12]
        there = means[~np.isnan(means)].astype(np.float64)
        assert event.histogram_value.num == len(there) == sum(event.histogram_value.bucket)
        assert event.histogram_value.sum == pytest.approx(there.sum())
        assert (event.histogram_value.min, event.histogram_value.max) == (there.min(), there.max())
    with pytest.raises(MetricsError, match="exists"):
        export_tensorboard(source, "run", out)


def test_a_postgres_database_is_read_beside_its_server(tmp_path: Path) -> None:
    url = postgres.new_database()
    store = open_store(Settings(tmp_path, database=url))
    store.put([iteration(number) for number in range(1, 5)])
    with MetricsReader(url) as reader:
        assert reader.iterations("run").index.tolist() == [1, 2, 3, 4]
    source = open_source(url)
    assert len(pq.read_table(export_tables(source, "run", tmp_path / "out") / "iterations.parquet")) == 4
    source.close()
    store.close()
