"""Tokens, headers, host names, and what a client sees when something fails."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from steptron_metrics.access import Access, load_tokens
from steptron_metrics.errors import MetricsError
from steptron_metrics.http.app import build_app
from steptron_metrics.http.queries import Queries
from steptron_metrics.http.security import is_local
from steptron_metrics.http.server import start
from steptron_metrics.settings import Settings
from tests.metrics_server.http.certificate import make_certificate
from tests.metrics_server.http.fakes import FakeStore, some_state

READ, WRITE, DELETE, LIMITED = ("r" * 20, "w" * 20, "d" * 20, "l" * 20)
RUN_PATHS = (
    "/api/v1/runs/blow-up",
    "/api/v1/runs/blow-up/metrics",
    "/api/v1/runs/blow-up/figures",
    "/api/v1/runs/blow-up/iterations",
    "/api/v1/runs/blow-up/events",
    "/api/v1/runs/blow-up/points?metric=train.loss&layer=-1",
    "/api/v1/runs/blow-up/derived?figure=moe.straggler_factor",
    "/api/v1/runs/blow-up/timeline",
    "/api/v1/runs/blow-up/table?metric=train.loss",
    "/api/v1/alerts?run=blow-up",
)
WHOLE_PATHS = ("/api/v1/runs", "/api/v1/alerts", "/api/v1/server", "/metrics")


@pytest.fixture
def access(tmp_path: Path) -> Access:
    file = tmp_path / "tokens.yaml"
    file.write_text(
        f"- {{token: {READ}, may: [read]}}\n"
        f"- {{token: {WRITE}, may: [write]}}\n"
        f"- {{token: {DELETE}, may: [read, delete]}}\n"
        f"- {{token: {LIMITED}, may: [read, delete], runs: [oth*]}}\n"
    )
    file.chmod(0o600)
    return load_tokens(file)


def _bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


@pytest.mark.parametrize(
    ("token", "run_status", "whole_status"),
    [
        (None, 401, 401),
        ("x" * 20, 401, 401),
        (WRITE, 403, 403),
        (READ, 200, 200),
        (DELETE, 200, 200),
        (LIMITED, 403, 200),
    ],
)
def test_who_may_read_what(
    connect: Callable[..., TestClient], access: Access, token: str | None, run_status: int, whole_status: int
) -> None:
    client = connect(access)
    for paths, status in ((RUN_PATHS, run_status), (WHOLE_PATHS, whole_status)):
        for path in paths:
            answer = client.get(path, headers=_bearer(token))
            assert answer.status_code == status, path
            if status != 200:
                assert answer.json()["reason"]
            if status == 401:
                assert answer.headers["www-authenticate"].startswith("Bearer")


def test_the_page_itself_and_health_need_no_token(connect: Callable[..., TestClient], access: Access) -> None:
    client = connect(access)
    assert client.get("/").status_code == client.get("/page/js/main.js").status_code == 200
    assert client.get("/healthz").json() == {"status": "ok"}


def test_a_limited_token_sees_its_runs_alone(connect: Callable[..., TestClient], access: Access) -> None:
    client = connect(access)
    headers = _bearer(LIMITED)
    assert [run["name"] for run in client.get("/api/v1/runs", headers=headers).json()] == ["other"]
    assert client.get("/api/v1/alerts", headers=headers).json() == []
    assert {one["run"] for one in client.get("/api/v1/server", headers=headers).json()["waiting"]} == {"other"}
    text = client.get("/metrics", headers=headers).text
    assert 'run="other"' in text and "blow-up" not in text
    assert client.get("/api/v1/runs/other", headers=headers).status_code == 200
    # Whether a run that it may not read exists is not told either.
    assert client.get("/api/v1/runs/none", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("token", "run", "status"),
    [
        (None, "other", 401),
        (READ, "other", 403),
        (WRITE, "other", 403),
        (LIMITED, "blow-up", 403),
        (LIMITED, "other", 204),
        (DELETE, "other", 204),
    ],
)
def test_who_may_delete_what(
    connect: Callable[..., TestClient], access: Access, store: FakeStore, token: str | None, run: str, status: int
) -> None:
    answer = connect(access).delete(f"/api/v1/runs/{run}?force=true", headers=_bearer(token))
    assert answer.status_code == status
    assert (run not in store.fakes) == (status == 204)


def test_broken_credentials_are_refused(connect: Callable[..., TestClient], access: Access) -> None:
    client = connect(access)
    for header in ("", "Bearer", "Bearer ", "Basic eDp5", "bearer\t", "Bearer é", "Bearer " + "x" * 9000):
        answer = client.get("/api/v1/runs", headers={"Authorization": header.encode("latin-1")})  # type: ignore[dict-item]
        assert answer.status_code == 401, header


@pytest.mark.parametrize("path", ["/", "/page/js/main.js", "/api/v1/runs", "/api/v1/runs/none", "/nothing", "/metrics"])
def test_every_answer_has_the_headers(reader: TestClient, path: str) -> None:
    headers = reader.get(path, headers={"Origin": "https://elsewhere.example"}).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] in ("no-store", "no-cache")


def test_another_origins_page_may_not_ask_in_advance(reader: TestClient) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "DELETE"}
    answer = reader.options("/api/v1/runs/other", headers=headers)
    assert answer.status_code == 405 and "access-control-allow-methods" not in answer.headers


def test_without_tokens_a_local_server_answers_to_no_foreign_name(
    connect: Callable[..., TestClient], access: Access
) -> None:
    rebinding = {"Host": "elsewhere.example:7078"}
    answer = connect().get("/api/v1/runs", headers=rebinding)
    assert answer.status_code == 421 and answer.headers["x-frame-options"] == "DENY"
    assert connect(access).get("/api/v1/runs", headers={**rebinding, **_bearer(READ)}).status_code == 200
    assert connect(host="0.0.0.0").get("/api/v1/runs", headers=rebinding).status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:7078", True),
        ("127.0.0.1:7078", True),
        ("[::1]:7078", True),
        ("10.1.2.3", True),
        ("a.localhost", True),
        ("localhost.example", False),
        ("127.0.0.1.example:80", False),
        ("example", False),
        ("[::1", True),
        ("[x]", False),
    ],
)
def test_local_names(host: str, local: bool) -> None:
    assert is_local(host) is local


class Broken(FakeStore):
    def metrics(self, run: str) -> list:
        raise RuntimeError("secret path /var/lib/x")


def test_a_failure_shows_no_trace(
    connect: Callable[..., TestClient], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    answer = connect(store=Broken(*store.fakes.values())).get("/api/v1/runs/blow-up/metrics")
    assert answer.status_code == 500 and answer.json() == {"reason": "the server failed at this; its log says more"}
    assert "secret path" in caplog.text and "content-security-policy" in answer.headers


def test_a_run_deleted_meanwhile_is_not_found(connect: Callable[..., TestClient], store: FakeStore) -> None:
    class Gone(FakeStore):
        def metrics(self, run: str) -> list:
            raise KeyError(run)

    answer = connect(store=Gone(*store.fakes.values())).get("/api/v1/runs/blow-up/metrics")
    assert answer.status_code == 404 and "any more" in answer.json()["reason"]


def test_a_long_query_is_refused(reader: TestClient) -> None:
    assert reader.get("/api/v1/runs?" + "x" * 20_000).status_code == 414


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/js/..%2f..%2fapp.py", "/page/", "/page"]
)
def test_the_page_serves_its_own_files_alone(reader: TestClient, path: str) -> None:
    assert reader.get(path).status_code == 404


def test_queries_wait_in_a_bounded_queue(store: FakeStore) -> None:
    import asyncio

    async def crowd() -> list[object]:
        queries = Queries(store, threads=2, max_waiting=6, timeout_seconds=0.6)
        release = threading.Event()
        running: list[int] = []

        def slow() -> str:
            running.append(1)
            release.wait(10)
            return "done"

        tasks = [asyncio.create_task(queries.do(slow)) for _ in range(9)]
        await asyncio.sleep(0.2)
        assert len(running) == 2 and queries.outstanding == 6
        refused = [task.exception() for task in tasks if task.done()]
        assert [getattr(error, "status", None) for error in refused] == [503] * 3
        results = await asyncio.gather(*tasks, return_exceptions=True)
        release.set()
        queries.close()
        return list(results)

    results = asyncio.run(asyncio.wait_for(crowd(), 10))
    timed_out = [error for error in results if "did not answer within 0.6 s" in str(error)]
    assert len(timed_out) == 6


def test_serving_with_tls_in_a_thread(tmp_path: Path, store: FakeStore) -> None:
    certificate, key = make_certificate(tmp_path)
    settings = Settings(folder=tmp_path, http_port=0, certificate=certificate, key=key)
    server = start(settings, build_app(settings, store, Access(None), some_state))
    try:
        assert server.url == f"https://{server.address}/" and not server.address.endswith(":0")
        trust = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.get(server.url + "api/v1/runs", verify=trust, timeout=10)
        assert answer.status_code == 200 and "strict-transport-security" in answer.headers
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{server.address}/healthz", timeout=10)
    finally:
        began = time.monotonic()
        server.stop()
    assert not server.running and time.monotonic() - began < 8


def test_an_address_that_is_taken_is_named(tmp_path: Path, store: FakeStore) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = Settings(folder=tmp_path, http_port=port)
        with pytest.raises(MetricsError, match=f"127.0.0.1:{port}"):
            start(settings, build_app(settings, store, Access(None), some_state))


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, store: FakeStore) -> None:
    settings = Settings(folder=tmp_path, http_port=0, certificate=tmp_path / "none.pem", key=tmp_path / "none.key")
    with pytest.raises(MetricsError, match=r"none\.pem"):
        start(settings, build_app(settings, store, Access(None), some_state))
