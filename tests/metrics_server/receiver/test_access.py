"""Tokens and TLS over real connections, and settings that cannot work."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol import messages
from steptron_metrics.receiver.main import run
from tests.metrics_server.receiver.process import Conversation, channel, frame, frames, free_port, receiver, settings

TOKENS = """
- {token: writer-0123456789, may: [write], runs: ["mine-*"]}
- {token: reader-0123456789, may: [read, delete]}
"""


def certificate(folder: Path) -> tuple[Path, Path]:
    key, made = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", key, "-out", made], check=True, capture_output=True, timeout=30)
    return made, key


def refusal(conversation: Conversation, name: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        conversation.greet(name)
    error: Any = raised.value
    return error.code(), error.details()


def test_tokens_over_tls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    made, key = certificate(tmp_path)
    with receiver(settings(tmp_path / "server", tokens=tokens, certificate=made, key=key)) as one:
        credentials = grpc.ssl_channel_credentials(made.read_bytes())
        with grpc.secure_channel(f"localhost:{one.port}", credentials) as through:
            code, reason = refusal(Conversation(through), "mine-1")
            assert code is grpc.StatusCode.UNAUTHENTICATED and "a token is needed" in reason
            code, reason = refusal(Conversation(through, "writer-012345678"), "mine-1")
            assert code is grpc.StatusCode.UNAUTHENTICATED and "not one of the server's" in reason
            code, reason = refusal(Conversation(through, "reader-0123456789"), "mine-1")
            assert code is grpc.StatusCode.PERMISSION_DENIED and "does not allow to write" in reason
            code, reason = refusal(Conversation(through, "writer-0123456789"), "yours")
            assert code is grpc.StatusCode.PERMISSION_DENIED and "'yours'" in reason
            assert not list(one.settings.journal.iterdir())
            conversation = Conversation(through, "writer-0123456789")
            conversation.greet("mine-1")
            assert conversation.ask(frames(1, frame())).result == messages.STORED
            conversation.end()
        with channel(one.port) as plain:
            assert refusal(Conversation(plain, "writer-0123456789"), "mine-1")[0] is grpc.StatusCode.UNAVAILABLE


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    made, _ = certificate(tmp_path)
    with pytest.raises(MetricsError, match="key: TLS needs a certificate and its key"):
        run(settings(tmp_path, certificate=made), 0, 0)
    with pytest.raises(MetricsError, match=r"none\.pem: No such file"):
        run(settings(tmp_path, certificate=made, key=tmp_path / "none.pem"), 0, 0)
    with pytest.raises(MetricsError, match=r"none\.yaml: No such file"):
        run(settings(tmp_path, tokens=tmp_path / "none.yaml"), 0, 0)
    port = free_port()
    with pytest.raises(MetricsError, match=f"cannot listen at 203.0.113.1:{port}"):
        run(settings(tmp_path, host="203.0.113.1"), 0, port)


def test_a_token_for_some_names_cannot_take_all_runs_that_the_server_takes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(TOKENS + '- {token: other-0123456789, may: [write], runs: ["x", "*"]}\n')
    tokens.chmod(0o600)
    with (
        receiver(settings(tmp_path / "server", tokens=tokens, max_runs=5, max_runs_per_token=3)) as one,
        channel(one.port) as through,
    ):
        for name in ("mine-1", "mine-2", "mine-3", "mine-2"):
            Conversation(through, "writer-0123456789").greet(name)
        code, reason = refusal(Conversation(through, "writer-0123456789"), "mine-4")
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has 3 runs that this token may write, at most 3 are taken" in reason
        for name in ("mine-4", "yours"):  # one that may write all runs
            Conversation(through, "other-0123456789").greet(name)
        code, reason = refusal(Conversation(through, "other-0123456789"), "more")
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "has 5 runs, at most 5" in reason
