"""What a store that fails does, and the order in which results are judged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.results import Alert, Iteration
from steptron_metrics.server.order import Order
from steptron_metrics.server.writer import Writer
from tests.metrics_server.alerts.runs import MemoryStore, iteration


class FailingStore(MemoryStore):
    """Out of reach while ``down`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.down = threading.Event()
        self.deleted: list[str] = []

    def put(self, iterations: Iterable[Iteration]) -> None:
        self._reach()
        super().put(iterations)

    def put_alerts(self, alerts: Iterable[Alert]) -> None:
        self._reach()
        super().put_alerts(alerts)

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        self._reach()
        return super().alerts(run, open_only)

    def runs(self) -> list:
        self._reach()
        return super().runs()

    def delete(self, run: str) -> None:
        self._reach()
        self.deleted.append(run)
        self.kept = {key: one for key, one in self.kept.items() if key[0] != run}

    def _reach(self) -> None:
        if self.down.is_set():
            raise ConnectionError("connection refused")


@pytest.fixture
def store() -> FailingStore:
    return FailingStore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def writer(store: FailingStore, folder: Path) -> Iterable[Writer]:
    one = Writer(
        store,  # type: ignore[arg-type]
        Alerts(store, load_rules()),  # type: ignore[arg-type]
        Delivery(folder / "alerts.jsonl"),
        Requests(folder / "requests"),
    )
    yield one
    store.down.clear()
    assert one.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_lost_while_the_store_is_away(store: FailingStore, writer: Writer, folder: Path) -> None:
    writer.put([iteration(1)])
    until(lambda: ("r", 1) in store.kept)
    store.down.set()
    writer.put([iteration(2, missing=(3,)), iteration(3)])
    until(lambda: "connection refused" in writer.trouble)
    assert writer.unwritten == 2 and [one.iteration for one in writer.written()] == [1]
    # People hear of it even so, once.
    until((folder / "alerts.jsonl").exists)
    time.sleep(0.4)
    lines = (folder / "alerts.jsonl").read_text().splitlines()
    assert [json.loads(line)["alert"]["rule"] for line in lines] == ["missing_ranks"]
    store.down.clear()
    until(lambda: writer.unwritten == 0)
    assert sorted(number for _, number in store.kept) == [1, 2, 3] and writer.trouble == ""
    assert [one.rule for one in store.alerts_kept.values()] == ["missing_ranks"]
    assert [tuple(one) for one in writer.written()] == [("r", 1, 2, 3), ("r", 1, 3, 4)]
    assert len((folder / "alerts.jsonl").read_text().splitlines()) == 1


def test_a_store_that_is_away_from_the_first_iteration_on(store: FailingStore, writer: Writer) -> None:
    """Rules cannot even be asked; the iteration is judged all the same when the store is back."""
    store.down.set()
    writer.put([iteration(1, missing=(0,))])
    until(lambda: bool(writer.trouble))
    store.down.clear()
    until(lambda: writer.unwritten == 0)
    assert [one.rule for one in store.alerts_kept.values()] == ["missing_ranks"]


def test_an_end_while_the_store_is_away_does_not_wait_for_it(store: FailingStore, folder: Path) -> None:
    store.down.set()
    alerts = Alerts(store, load_rules())  # type: ignore[arg-type]
    one = Writer(store, alerts, Delivery(folder / "a.jsonl"), Requests(folder / "q"))  # type: ignore[arg-type]
    one.put([iteration(1)])
    until(lambda: bool(one.trouble))
    started = time.monotonic()
    assert one.close() and time.monotonic() - started < 2
    assert not store.kept


def test_a_rule_that_fails_does_not_keep_iterations_from_being_stored(
    store: FailingStore, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Alerts, "evaluate", lambda *_: 1 / 0)
    writer.put([iteration(1)])
    until(lambda: ("r", 1) in store.kept)
    assert "iteration 1 of run r could not be judged" in caplog.text


def test_a_deletion_comes_after_what_was_put_before(store: FailingStore, writer: Writer) -> None:
    done = threading.Event()
    writer.put([iteration(1), iteration(1, run="s")])
    writer.delete("r", done)
    writer.put([iteration(7)])
    assert done.wait(10)
    until(lambda: writer.unwritten == 0)
    assert store.deleted == ["r"] and set(store.kept) == {("s", 1), ("r", 7)}


def test_results_come_in_the_order_of_their_jobs() -> None:
    order = Order()
    keys = [("a", 1, 1), ("a", 1, 2), ("b", 1, 1), ("a", 1, 3), ("a", 1, 4)]
    for key in keys:
        order.submitted(key)
    order.finished(("a", 1, 2), iteration(2, run="a"))
    assert order.ready() == [] and len(order.held()) == 1
    order.finished(("b", 1, 1), iteration(1, run="b"))
    assert [one.run for one in order.ready()] == ["b"]
    order.finished(("a", 1, 4), iteration(4, run="a"))
    order.finished(("a", 1, 1), None)
    assert [one.iteration for one in order.ready()] == [2]
    order.finished(("a", 1, 3), iteration(3, run="a"))
    assert [one.iteration for one in order.ready()] == [3, 4] and order.held() == []


def test_results_of_a_deleted_run_are_not_those_of_its_successor() -> None:
    order = Order()
    order.submitted(("a", 1, 1))
    order.forget("a")
    order.submitted(("a", 1, 1))
    assert not order.finished(("a", 1, 1), iteration(1, consumed_tokens=1))
    assert order.finished(("a", 1, 1), iteration(1, consumed_tokens=2))
    assert [one.consumed_tokens for one in order.ready()] == [2]
