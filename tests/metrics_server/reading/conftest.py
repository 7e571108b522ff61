"""One run in a folder's database, read directly and over a real HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from steptron_metrics.access import Access
from steptron_metrics.http.app import build_app
from steptron_metrics.http.server import start
from steptron_metrics.http.state import ServerState
from steptron_metrics.results import Event
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store
from tests.metrics_server.http.fakes import some_state
from tests.metrics_server.storage.made import iteration
from tests.metrics_server.storage.test_alerts_stored import ALERT

LAST = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a stopped server."""
    folder = tmp_path_factory.mktemp("server")
    store = open_store(Settings(folder))
    store.put(
        [
            iteration(
                number, ranks=3 if number == 7 else 4, events=(Event("stage", '2, of "3"'),) if number == 9 else ()
            )
            for number in range(1, LAST + 1)
        ]
    )
    store.put([iteration(number, run="other") for number in range(1, 4)])
    store.put_alerts([ALERT, replace(ALERT, number=2, since_ns=5000, layer=None, value=float("inf"))])
    store.close()
    return folder


@pytest.fixture(params=["folder", "server"])
def where(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """A folder, or the address of a server that runs on it."""
    if request.param == "folder":
        yield str(folder)
        return

    def state() -> ServerState:
        return some_state()

    settings = Settings(folder, http_port=0)
    store = open_store(settings)
    server = start(settings, build_app(settings, store, Access(None), state))
    try:
        yield server.address
    finally:
        server.stop()
        store.close()
