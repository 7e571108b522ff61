"""A server with TLS and tokens, from the trainer's client to the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from steptron.cli.main import app
from steptron_metrics.client import MetricsClient
from steptron_metrics.client.settings import Tuning
from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol.description import Series
from steptron_metrics.reading.reader import MetricsReader
from steptron_metrics.server.local import running
from steptron_metrics.settings import Settings
from tests.metrics_server.http.certificate import make_certificate
from tests.metrics_server.server.talking import until

WRITE, READ = "write-0123456789abcdef", "read-0123456789abcdef"


def test_everything_speaks_tls_and_nothing_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "another").mkdir()
    another, _ = make_certificate(tmp_path / "another")
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"- {{token: {WRITE}, may: [write]}}\n- {{token: {READ}, may: [read]}}\n")
    tokens.chmod(0o600)
    tokens.chmod(0o600)
    settings = Settings(
        tmp_path / "server", port=0, http_port=0, min_free_bytes=0, certificate=certificate, key=key, tokens=tokens
    )
    with running(settings) as server:
        assert server.http_address.startswith("https://")

        def client(name: str, token: str | None = WRITE, root: Path | None = certificate) -> MetricsClient:
            made = MetricsClient(
                server.address,
                "run",
                1000,
                1,
                spool=tmp_path / name,
                token=token,
                certificate=root,
                warn=lambda _: None,
                tuning=Tuning(connect=2.0),
            )
            layout = made.describe([Series("train.loss")])
            made.send(
                0, 1, layout, np.array([2.5], np.float32), ended_ns=time.time_ns(), seconds=1.0, consumed_tokens=1
            )
            return made

        strangers = [client("plain", root=None), client("untrusting", root=another), client("stranger", token=READ)]
        trusted = client("trusted")
        until(lambda: trusted.status().stored == 1, "the frame is not stored")
        assert trusted.close().stored == 1
        until(lambda: all(one.status().last_error for one in strangers), "strangers are not refused")
        assert [one.close(0.5).stored for one in strangers] == [0, 0, 0]

        with MetricsReader(server.http_address, token=READ, certificate=certificate) as reader:
            until(lambda: len(reader.runs()) == 1, "the iteration is not stored")
            assert reader.aggregates("run", "train.loss").to_numpy().tolist() == [[2.5]]
        with pytest.raises(MetricsError, match="certificate"), MetricsReader(server.http_address, token=READ) as reader:
            reader.runs()

        monkeypatch.setenv("STEPTRON_METRICS_TOKEN", READ)
        command = ["metrics", "runs", server.http_address, "--json"]
        done = CliRunner().invoke(app, [*command, "--certificate", str(certificate)])
        assert done.exit_code == 0, done.output
        assert [run["name"] for run in json.loads(done.stdout)] == ["run"]
        assert CliRunner().invoke(app, command).exit_code != 0
