"""What a store that fails does, and the order in which results are judged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.errors import MetricsError
from steptron_metrics.results import Aggregate, Alert, Derived, Event, Iteration
from steptron_metrics.server.aside import set_aside
from steptron_metrics.server.order import Order
from steptron_metrics.server.space import Space
from steptron_metrics.server.writer import Deletion, Writer
from steptron_metrics.storage.base import Invalidated
from tests.metrics_server.alerts.runs import MemoryStore, iteration


class FailingStore(MemoryStore):
    """Out of reach while ``down`` is set; takes no iteration that is among the ``refused``."""

    def __init__(self) -> None:
        super().__init__()
        self.down = threading.Event()
        self.refused: set[int] = set()
        self.refuses_alerts = False
        self.deleted: list[str] = []

    def put(self, iterations: Iterable[Iteration]) -> None:
        self._reach()
        for one in iterations:
            if one.iteration in self.refused:
                raise ValueError(f"iteration {one.iteration} is out of range")
        super().put(iterations)

    def put_alerts(self, alerts: Iterable[Alert]) -> None:
        self._reach()
        if self.refuses_alerts and alerts:
            raise ValueError("no such text")
        super().put_alerts(alerts)

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        self._reach()
        return super().alerts(run, open_only)

    def runs(self) -> list:
        self._reach()
        return super().runs()

    def refuses(self, error: Exception) -> bool:
        return isinstance(error, ValueError)

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
def free() -> list[int]:
    """Bytes on the disk; 1,000 are to stay free."""
    return [5000]


@pytest.fixture
def writer(store: FailingStore, folder: Path, free: list[int]) -> Iterable[Writer]:
    one = Writer(
        store,  # type: ignore[arg-type]
        Alerts(store, load_rules()),  # type: ignore[arg-type]
        Delivery(folder / "alerts.jsonl"),
        Requests(folder / "requests"),
        folder,
        Space(folder, 1000, free=lambda _: free[0], reserve_bytes=0),
    )
    yield one
    store.down.clear()
    free[0] = 5000
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
    space = Space(folder, 0, reserve_bytes=0)
    one = Writer(store, alerts, Delivery(folder / "a.jsonl"), Requests(folder / "q"), folder, space)  # type: ignore[arg-type]
    one.put([iteration(1)])
    until(lambda: bool(one.trouble))
    started = time.monotonic()
    assert one.close() and time.monotonic() - started < 2
    assert not store.kept


def test_what_the_store_refuses_is_set_aside_and_the_rest_goes_on(
    store: FailingStore, writer: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("steptron_metrics.server.writer._FIRST_PAUSE_SECONDS", 0.01)
    store.refused = {2}
    one = Aggregate("moe.tokens", 3, np.arange(14, dtype=np.float32).reshape(7, 2))
    figure = Derived("a.b", np.array([3], np.int32), np.array([1.5], np.float32), np.array([0], np.int32))
    second = replace(iteration(2), aggregates=(one,), derived=(figure,), events=(Event("kind", "detail"),))
    writer.put([iteration(1), second, iteration(3), iteration(1, run="s")])
    until(lambda: writer.unwritten == 0)
    assert set(store.kept) == {("r", 1), ("r", 3), ("s", 1)} and writer.unwritten_bytes == 0
    assert (writer.stored, writer.set_aside, writer.trouble) == (3, 1, "")
    # It is done with all the same: its frames may be deleted one day.
    assert sorted((one.run, one.iteration) for one in writer.written()) == [("r", 1), ("r", 2), ("r", 3), ("s", 1)]
    (file,) = (folder / "set_aside").iterdir()
    assert "iteration 2 of run r is not in the database, which refuses it (ValueError: iteration 2" in caplog.text
    assert str(file) in caplog.text
    with np.load(file) as kept:
        about = json.loads(str(kept["about"]))
        assert about["iteration"] == 2 and about["reason"] == "ValueError: iteration 2 is out of range"
        assert about["events"] == [["kind", "detail"]]
        np.testing.assert_array_equal(kept["moe.tokens:3"], one.values)
        assert kept["a.b:values"].tolist() == [1.5]


def test_nothing_is_set_aside_while_the_store_is_away(
    store: FailingStore, writer: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steptron_metrics.server.writer._FIRST_PAUSE_SECONDS", 0.001)
    store.down.set()
    writer.put([iteration(1)])
    until(lambda: bool(writer.trouble))
    time.sleep(0.1)  # more attempts than a refusal takes
    assert writer.unwritten == 1 and writer.set_aside == 0 and not (folder / "set_aside").exists()


def test_alerts_that_the_store_refuses_keep_no_iteration_back(
    store: FailingStore, writer: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("steptron_metrics.server.writer._FIRST_PAUSE_SECONDS", 0.01)
    store.refuses_alerts = True
    writer.put([iteration(1, missing=(3,))])
    until(lambda: ("r", 1) in store.kept)
    assert "1 alerts are in the log and in alerts.jsonl only: ValueError: no such text" in caplog.text
    assert len((folder / "alerts.jsonl").read_text().splitlines()) == 1


def test_files_set_aside_take_up_a_bounded_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptron_metrics.server.aside.MAX_BYTES", 5000)
    for number in range(1, 21):
        set_aside(folder, iteration(number), "why")
    files = list((folder / "set_aside").iterdir())
    assert 1 < len(files) < 20 and sum(file.stat().st_size for file in files) <= 5000
    newest = sorted(int(file.stem.rsplit("-", 1)[1]) for file in files)
    assert newest == list(range(21 - len(files), 21))


def test_a_store_that_has_to_be_opened_anew_ends_the_writer(
    store: FailingStore, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(_: object) -> None:
        raise Invalidated("fatal")

    store.put = put  # type: ignore[method-assign]
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    writer.put([iteration(1)])
    until(lambda: not writer.running)
    assert seen == [Invalidated]


def test_what_a_process_has_to_do_again_is_bounded(store: FailingStore, writer: Writer) -> None:
    sizes: list[int] = []
    put = store.put

    def counted(iterations: Sequence[Iteration]) -> None:
        sizes.append(len(iterations))
        put(iterations)

    store.put = counted  # type: ignore[method-assign]
    large = (Aggregate("a.b", 0, np.zeros((7, 150_000), np.float32)),)  # 4.2 MB
    writer.put([replace(iteration(number), aggregates=large) for number in range(1, 20)])
    until(lambda: writer.unwritten == 0)
    assert sum(sizes) == 19 and max(sizes) <= 4


def test_a_rule_that_fails_does_not_keep_iterations_from_being_stored(
    store: FailingStore, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Alerts, "evaluate", lambda *_: 1 / 0)
    writer.put([iteration(1)])
    until(lambda: ("r", 1) in store.kept)
    assert "iteration 1 of run r could not be judged" in caplog.text


def test_a_deletion_drops_what_was_put_before(store: FailingStore, writer: Writer) -> None:
    deletion = Deletion("r")
    writer.put([iteration(1), iteration(1, run="s")])
    writer.delete(deletion)
    writer.put([iteration(7)])
    assert deletion.done.wait(10) and deletion.error == ""
    until(lambda: writer.unwritten == 0)
    assert store.deleted == ["r"] and set(store.kept) == {("s", 1), ("r", 7)}


def test_a_full_disk_stops_storing_and_a_deletion_is_done_all_the_same(
    store: FailingStore, writer: Writer, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steptron_metrics.server.writer._FIRST_PAUSE_SECONDS", 3600.0)
    writer.put([iteration(1), iteration(1, run="s")])
    until(lambda: len(store.kept) == 2)
    free[0] = 999
    writer.put([iteration(2), iteration(2, run="s")])
    until(lambda: "stay free (--min-free-gb)" in writer.trouble)
    assert len(store.kept) == 2 and writer.unwritten == 2
    deletion = Deletion("r")
    free[0] = 1000  # as a deletion has it
    writer.delete(deletion)
    # What had been put of the run goes with it, and the rest is stored, without the pause of an hour.
    assert deletion.done.wait(10) and deletion.error == ""
    until(lambda: writer.unwritten == 0)
    assert set(store.kept) == {("s", 1), ("s", 2)} and writer.trouble == "" and writer.unwritten_bytes == 0


def test_a_deletion_that_fails_tells_why_and_is_tried_again(store: FailingStore, writer: Writer) -> None:
    writer.put([iteration(1)])
    until(lambda: len(store.kept) == 1)
    store.down.set()
    deletion = Deletion("r")
    writer.delete(deletion)
    until(lambda: "connection refused" in deletion.error and "deleting a run" in writer.trouble)
    assert not deletion.done.is_set()
    store.down.clear()
    assert deletion.done.wait(10) and deletion.error == "" and not store.kept
    until(lambda: writer.trouble == "")


def test_a_deletion_that_the_store_refuses_is_given_up(store: FailingStore, writer: Writer) -> None:
    def delete(_: str) -> None:
        raise ValueError("a constraint")

    store.delete = delete  # type: ignore[method-assign]
    deletion = Deletion("r")
    writer.delete(deletion)
    assert deletion.done.wait(10) and deletion.error == "ValueError: a constraint"
    writer.put([iteration(1)])
    until(lambda: len(store.kept) == 1)


def test_the_reserve_is_given_up_and_made_again(folder: Path) -> None:
    free = [10_000]
    space = Space(folder, 1000, free=lambda _: free[0], reserve_bytes=4000)
    space.keep_reserve()
    assert (folder / "reserve").stat().st_size == 4000
    assert (folder / "reserve").stat().st_blocks * 512 >= 4000  # not a hole
    space.use_reserve()
    assert (folder / "reserve").exists()  # there is room without it
    free[0] = 3999
    space.use_reserve()
    space.use_reserve()
    assert not (folder / "reserve").exists()
    free[0] = 8999
    space.keep_reserve()
    assert not (folder / "reserve").exists()
    free[0] = 9000
    space.keep_reserve()
    assert sorted(file.name for file in folder.iterdir()) == ["reserve"]


def test_a_database_elsewhere_does_not_care_for_the_disk(folder: Path) -> None:
    Space(folder, 1000, is_embedded=False, free=lambda _: 0).check()
    with pytest.raises(MetricsError, match="stay free"):
        Space(folder, 1000, free=lambda _: 0).check()


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
