"""Every test of a store runs on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steptron_metrics.storage.duckdb_store import open_duckdb
from steptron_metrics.storage.postgres_store import open_postgres
from steptron_metrics.storage.sql_store import SqlStore
from tests.metrics_server import postgres


class Place:
    """Where a test's database is: ``open`` opens it as often as wanted."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind, self.where = kind, where
        self._opened: list[SqlStore] = []

    def open(self, **options: Any) -> SqlStore:
        if self.kind == "duckdb":
            store = open_duckdb(Path(self.where), **options)
        else:
            store = open_postgres(self.where, **options)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=["duckdb", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    place = Place(kind, str(tmp_path / "metrics.duckdb") if kind == "duckdb" else postgres.new_database())
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> SqlStore:
    return place.open()


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes DuckDB sort its rows after every few kilobytes."""
    return lambda: monkeypatch.setattr("steptron_metrics.storage.duckdb_store._RECENT_BYTES", 5_000)
