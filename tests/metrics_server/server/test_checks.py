"""What is wrong is said before anything starts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.server.checks import check
from steptron_metrics.server.ports import Reserved
from steptron_metrics.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "server", min_free_bytes=0)


def test_sound_settings_pass_and_the_folder_is_there(settings: Settings) -> None:
    check(settings)
    assert settings.folder.is_dir() and not list(settings.folder.iterdir())


def test_all_problems_at_once(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("blow_up_output: {abov: 3}")
    (tmp_path / "file").write_text("")
    wrong = replace(
        settings,
        folder=tmp_path / "file" / "x",
        host="0.0.0.0",
        receivers=0,
        port=70_000,
        certificate=tmp_path / "absent.pem",
        rules=tmp_path / "rules.yaml",
        webhook="ftp://example.org",
        tokens=None,
    )
    with pytest.raises(MetricsError) as error:
        check(wrong)
    text = str(error.value)
    for part in (
        "receivers 0: expected at least 1; port 70,000: expected at most 65,535",
        "cannot be written to: Not a directory",
        "give a file of tokens (--tokens)",
        "the key is missing",
        "abov is no known key, did you mean above?",
        "webhook: expected a URL such as https://",
    ):
        assert part in text, text


def test_others_may_connect_only_with_tokens_or_when_that_is_meant(settings: Settings, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check(replace(settings, host=host))
    with pytest.raises(MetricsError, match=r"host 0\.0\.0\.0: others than this machine"):
        check(replace(settings, host="0.0.0.0"))
    check(replace(settings, host="0.0.0.0"), allow_unauthenticated=True)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("- {token: 0123456789abcdef0, may: [write]}")
    tokens.chmod(0o600)
    tokens.chmod(0o600)
    check(replace(settings, host="0.0.0.0", tokens=tokens))


def test_a_full_disk_and_a_bad_certificate(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="are to be left: make room"):
        check(replace(settings, min_free_bytes=1 << 60))
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("nothing of the kind")
    with pytest.raises(MetricsError, match="not a PEM certificate with its key"):
        check(replace(settings, certificate=tmp_path / "certificate", key=tmp_path / "key"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_taken_port(shared: bool) -> None:
    """Also when who has it would share it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MetricsError, match=f"port: cannot listen at 127.0.0.1:{port}: Address already in use"):
            Reserved("127.0.0.1", port, shared, "port")


def test_children_can_listen_where_a_port_is_reserved() -> None:
    reserved = Reserved("127.0.0.1", 0, shared=True, what="port")
    listening = []
    for _ in range(2):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", reserved.port))
        one.listen()
        listening.append(one)
    with socket.create_connection(("127.0.0.1", reserved.port), timeout=5):
        pass
    for one in listening:
        one.close()
    reserved.close()
    with pytest.raises(MetricsError, match="cannot listen at"):
        Reserved("203.0.113.1", 0, shared=False, what="port")
