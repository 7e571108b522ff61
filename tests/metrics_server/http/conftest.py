"""A store of two runs behind the application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from steptron_metrics.access import Access
from steptron_metrics.http.app import build_app
from steptron_metrics.settings import Settings
from tests.metrics_server.http.fakes import FakeRun, FakeStore, some_alerts, some_state


def blow_up() -> FakeRun:
    return FakeRun("blow-up", blown_up=(5, 7), collapsed=(4, 2), slow_rank=5, partial=(20, 21))


@pytest.fixture
def store() -> FakeStore:
    run = blow_up()
    return FakeStore(run, FakeRun("other", iterations=30, last_ended_ns=10**18), alerts=some_alerts(run))


@pytest.fixture
def connect(tmp_path: Path, store: FakeStore) -> Iterator[Callable[..., TestClient]]:
    """Makes a client: connect(access=..., store=..., host=..., delete=...)."""
    clients = []

    def make(
        access: Access | None = None,
        store: Any = store,
        host: str = "127.0.0.1",
        delete: Any = None,
        state: Any = some_state,
    ) -> TestClient:
        app = build_app(Settings(folder=tmp_path, host=host), store, access or Access(None), state, delete)
        client = TestClient(app, base_url="http://localhost")
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client whose store nothing changes, for many small questions."""
    run = blow_up()
    store = FakeStore(run, FakeRun("other", iterations=30, last_ended_ns=10**18), alerts=some_alerts(run))
    app = build_app(Settings(folder=tmp_path_factory.mktemp("reader")), store, Access(None), some_state)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(connect: Callable[..., TestClient]) -> TestClient:
    return connect()
