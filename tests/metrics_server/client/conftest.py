"""Clients for the tests: quick to retry, and checked for what must hold of all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptron_metrics.client import ClientStatus, Event, MetricsClient, Series, Tuning
from tests.metrics_server.client.fake_server import Store

QUICK = Tuning(
    linger=0.001,
    spool_after=0.05,
    look_every=0.02,
    connect=15.0,
    answer=5.0,
    heartbeat=0.3,
    first_retry=0.05,
    last_retry=0.1,
    refused_retry=0.2,
    later=0.02,
    last_later=0.05,
    warn_every=0.0,
    min_free_bytes=0,
)
SERIES = (Series("moe.output_norm_rms", 3, 0, 20, 4), Series("train.loss"))
SESSION = 1_700_000_000_000_000_000


@pytest.fixture
def store() -> Iterator[Store]:
    """Checked at the end for what clients must never do."""
    made = Store()
    yield made
    assert made.errors == []


@pytest.fixture
def free_address() -> str:
    """Nobody listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


MakeClient = Callable[..., MetricsClient]


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    made: list[MetricsClient] = []

    def make(address: str, *, started_ns: int = SESSION, tuning: Any = None, **options: Any) -> MetricsClient:
        options.setdefault("spool", tmp_path / "spool")
        options.setdefault("world_size", 64)
        options.setdefault("run", "run-a")
        client = MetricsClient(address, started_ns=started_ns, tuning=replace(QUICK, **(tuning or {})), **options)
        made.append(client)
        return client

    yield make
    for client in made:
        check(client.close(0.0))


def check(status: ClientStatus) -> ClientStatus:
    """The books balance."""
    assert status.accepted + status.found == (
        status.queued + status.spooled + status.stored + status.superseded + status.refused + status.dropped
    ), status
    return status


def values(rank: int, iteration: int) -> np.ndarray:
    return np.random.default_rng([rank, iteration]).standard_normal(81, dtype=np.float32)


def send(client: MetricsClient, rank: int, iteration: int, events: tuple[Event, ...] = ()) -> None:
    layout = client.describe(SERIES)
    client.send(
        rank,
        iteration,
        layout,
        values(rank, iteration),
        ended_ns=SESSION + iteration,
        seconds=0.5,
        consumed_tokens=iteration * 4096,
        events=events,
    )


def assert_whole(store: Store, ranks: int, iterations: int, started_ns: int = SESSION, run: str = "run-a") -> None:
    """Exactly these frames have arrived, with their values."""
    expected = {(run, started_ns, rank, i) for rank in range(ranks) for i in range(1, iterations + 1)}
    assert {key for key in store.frames if key[:2] == (run, started_ns)} == expected
    for key in expected:
        np.testing.assert_array_equal(store.values(key), values(*key[2:]))
