"""`steptron metrics` against a server that runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from steptron_metrics.client import MetricsClient
from steptron_metrics.protocol.description import Series
from steptron_metrics.reading.source import open_source
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings

ITERATIONS, LAYERS, EXPERTS = 60, (2, 3), 16
BLOWN_UP = 40
NORMS = "moe.output_norm_max"


def metrics(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["metrics", *map(str, arguments)])


def good(*arguments: str | Path) -> str:
    result = metrics(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def bad(*arguments: str | Path) -> str:
    result = metrics(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def norms_of(iteration: int) -> np.ndarray:
    norms = 1 + np.random.default_rng(iteration).random((len(LAYERS), EXPERTS))
    if iteration >= BLOWN_UP:
        norms[1, 5] = 5000
    return norms.astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    with running(Settings(folder / "server", port=0, http_port=0, min_free_bytes=0)) as one:
        series = [*(Series(NORMS, layer, count=EXPERTS) for layer in LAYERS), Series("train.lm_loss")]
        client = MetricsClient(one.address, "small", time.time_ns(), 1, spool=folder / "spool")
        layout = client.describe(series)
        for iteration in range(1, ITERATIONS + 1):
            values = np.append(norms_of(iteration).ravel(), 8.0 - np.log(iteration)).astype(np.float32)
            now = time.time_ns()
            client.send(0, iteration, layout, values, ended_ns=now, seconds=0.1, consumed_tokens=iteration * 64)
        assert client.close(20).stored == ITERATIONS
        deadline = time.monotonic() + 30
        while f"1 to {ITERATIONS}" not in metrics("runs", one.http_address).output:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield one


def test_runs(server: Server) -> None:
    heading, row = good("runs", server.http_address).splitlines()
    cells = row.split()
    assert (
        heading.split()[0] == "run" and cells[:7] == ["small", "1", "to", "60", "0", "1", "3,840"] and cells[-1] == "1"
    )
    (run,) = json.loads(good("runs", server.http_address.removeprefix("http://"), "--json"))
    assert (run["name"], run["iterations"]) == ("small", ITERATIONS)


def test_alerts(server: Server) -> None:
    text = good("alerts", server.http_address, "small", "--open")
    assert text.startswith(f"critical small: blow_up_output, layer 3 expert 5, since iteration {BLOWN_UP}\n")
    assert "The largest output norm of expert 5 of layer 3 is" in text and "Activation clipping" in text
    (alert,) = json.loads(good("alerts", server.http_address, "--json"))
    assert alert["wants_checkpoint"] and alert["since_iteration"] == BLOWN_UP
    requests = json.loads((server.folder / "requests" / "small.json").read_text())["requests"]
    assert [request["kind"] for request in requests] == ["checkpoint"]
    assert [json.loads(line)["event"] for line in (server.folder / "alerts.jsonl").read_text().splitlines()] == [
        "began"
    ]
    assert "alert: run small, blow_up_output, layer 3 expert 5" in (server.folder / "server.log").read_text()


def test_plot(server: Server, tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert good("plot", server.http_address, "small", tmp_path / "a.png") == f"wrote {tmp_path / 'a.png'}\n"
    image = imread(tmp_path / "a.png")[..., :3]
    assert image.shape[0] > 600 and image.shape[1] > 1500
    # The blown-up expert's cells are the brightest of the colour map, which nothing else in the picture is.
    yellow = np.abs(image - np.array([0.993, 0.906, 0.144])).max(axis=2) < 0.02
    rows, columns = np.nonzero(yellow[:, : int(image.shape[1] * 0.92)])
    assert len(rows) > 500 and np.ptp(rows) < image.shape[0] / 16
    assert columns.min() > image.shape[1] * 0.6


def test_pictures_of_other_kinds(server: Server, tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<?xml"), ("A.PDF", b"%PDF")):
        good("plot", server.http_address, "small", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_no_legend_covers_a_curve(server: Server) -> None:
    from matplotlib.figure import Figure

    from steptron.cli.metrics_picture import figure_of, read_picture

    with contextlib.closing(open_source(server.http_address)) as source:
        figure = figure_of(read_picture(source, "small", NORMS))
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    legends = 0
    for axes in (one for part in figure.subfigs for one in part.axes):
        legend = axes.get_legend()
        if legend is not None:
            legends += 1
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert legends == 1


def test_the_pictures_numbers_are_the_runs(server: Server) -> None:
    from steptron.cli.metrics_picture import read_picture

    with contextlib.closing(open_source(server.http_address)) as source:
        picture = read_picture(source, "small", NORMS)
    assert picture.layers == LAYERS and picture.iterations.tolist() == list(range(1, ITERATIONS + 1))
    expected = np.stack([norms_of(iteration) for iteration in range(1, ITERATIONS + 1)], axis=-1)
    np.testing.assert_allclose(picture.norms, expected, rtol=1e-6)
    np.testing.assert_allclose(picture.loss, 8.0 - np.log(picture.loss_iterations), rtol=1e-6)
    assert [(alert.layer, alert.expert, alert.since) for alert in picture.alerts] == [(3, 5, BLOWN_UP)]


def test_export(server: Server, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "parquet"
    arguments = ["export", server.http_address, "small", out, "--metric", NORMS]
    assert good(*arguments) == f"wrote {out}\n"
    (file,) = out.glob(f"aggregates/metric={NORMS}/*.parquet")
    rows = pq.ParquetFile(file).read().to_pandas().sort_values(["iteration", "layer", "item"])
    expected = np.stack([norms_of(iteration) for iteration in range(1, ITERATIONS + 1)])
    np.testing.assert_array_equal(rows["max"].to_numpy(np.float32), expected.ravel())
    assert "exists: choose another folder, or have it replaced (--force;" in bad(*arguments)
    good(*arguments, "--force", "--format", "csv", "--first", "5", "--last", "6")
    (file,) = out.glob(f"aggregates/metric={NORMS}/*.csv")
    assert len(file.read_text().splitlines()) == 1 + 2 * len(LAYERS) * EXPERTS
    good("export", server.http_address, "small", tmp_path / "events", "--format", "tensorboard")
    assert list((tmp_path / "events").rglob("*tfevents*"))
    assert "moe.nothing" in bad(*arguments[:3], tmp_path / "none", "--metric", "moe.nothing")


def test_what_cannot_be_plotted(server: Server, tmp_path: Path) -> None:
    address = server.http_address
    assert "there is no run 'absent'" in bad("plot", address, "absent", tmp_path / "a.png")
    message = bad("plot", address, "small", tmp_path / "a.png", "--metric", "train.lm_loss")
    assert f"has no metric train.lm_loss by expert; it has {NORMS}" in message
    assert "expected a file in a folder that is there" in bad("plot", address, "small", tmp_path / "no" / "a.png")
    assert "a.foo: expected the name of a .png, .pdf or .svg file" in bad("plot", address, "small", tmp_path / "a.foo")
    assert not list(tmp_path.iterdir())


def test_addresses_that_are_none(server: Server, tmp_path: Path) -> None:
    assert "expected the address of a running server" in bad("runs", "ftp://example.org")
    assert "does not answer" in bad("runs", "127.0.0.1:1")
    assert "does not speak HTTP" in bad("runs", server.address)  # the receiving one
    (tmp_path / "root.pem").write_text("x")
    assert "no PEM file of certificates" in bad("runs", "localhost:1", "--certificate", tmp_path / "root.pem")
    assert "there is no run 'absent'" in bad("alerts", server.http_address, "absent")
    assert f"{tmp_path / 'none'}: expected the address" in bad("alerts", tmp_path / "none")


def test_rules(tmp_path: Path) -> None:
    assert "blow_up_output:" in good("rules")
    mine = tmp_path / "mine.yaml"
    mine.write_text(good("rules") + "\n")
    assert "stale_run (warning)" in good("rules", "--check", mine).splitlines()
    mine.write_text(
        "blow_up_output: {above: 30, for: 8}\n"
        "straggling_rank: {enabled: false}\n"
        "expert_collapse: {enabled: true}\n"
        "loss: {watch: {metric: train.loss}, above: 20, severity: info, saw: s, cause: c, remedy: r}\n"
        "idle: {watch: {metric: train.loss}, above: 9, saw: s, cause: c, remedy: r, enabled: false}\n"
    )
    listed = good("rules", "--check", mine).splitlines()
    (changed,) = [line for line in listed if line.startswith("blow_up_output")]
    assert re.fullmatch(r"blow_up_output \(critical\): changed: above \S+ -> 30, for \d+ -> 8", changed)
    assert "expert_collapse (critical)" in listed and "loss (info): new" in listed
    assert listed[-2:] == ["straggling_rank: switched off", "idle: new, and switched off"]
    (tmp_path / "mine.yaml").write_text("blow_up_output: {abov: 3}")
    assert "abov is no known key, did you mean above?" in bad("rules", "--check", tmp_path / "mine.yaml")


def test_a_deletion_asks_and_a_live_run_is_kept(server: Server) -> None:
    arguments = ["metrics", "delete", server.http_address, "small"]
    result = CliRunner().invoke(app, arguments, input="n\n")
    assert result.exit_code == 1 and "delete 60 iterations of run small for good?" in result.output
    assert "has no run absent" in bad("delete", server.http_address, "absent", "--yes")
    message = bad("delete", server.http_address, "small", "--yes")
    assert "is live: with force=true (--force) it is deleted all the same" in message
    assert "60" in good("runs", server.http_address)


def test_serve_prints_where_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "steptron", "metrics", "serve", "--folder", str(tmp_path / "m")]
    command += ["--port", "0", "--http-port", "0", "--min-free-gb", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"receiving on 127\.0\.0\.1:\d+, page on (http://127\.0\.0\.1:\d+/)\n", line)
        assert match, line
        assert good("runs", match[1]) == "no run yet\n" and good("alerts", match[1]) == "no alert\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert "the server has ended" in (tmp_path / "m" / "server.log").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "0.0.0.0"], "give a file of tokens (--tokens), or say that this is meant"),
        (["--rules", "absent.yaml"], "absent.yaml: the alert rules cannot be read: No such file"),
        (["--certificate", "absent.pem"], "TLS needs a certificate and its key: the key is missing"),
        (["--webhook", "nothing"], "webhook: expected a URL such as"),
        (["--database", "nonsense"], "the database's URL is not one of PostgreSQL's"),
    ],
)
def test_what_keeps_a_server_from_starting(tmp_path: Path, options: list[str], text: str) -> None:
    common = ["--folder", tmp_path / "m", "--port", "0", "--http-port", "0", "--min-free-gb", "0"]
    assert text in bad("serve", *common, *options)


def test_a_package_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    message = bad("serve", "--folder", tmp_path)
    assert "fastapi: pip install 'steptron[metrics]'" in message
