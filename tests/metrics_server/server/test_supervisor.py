"""Children that die, that cannot start, that do not end, and a parent that is killed."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.server import child
from steptron_metrics.server.child import Orders
from steptron_metrics.server.lock import FolderLock
from steptron_metrics.server.supervisor import Child, Patience, Supervisor
from steptron_metrics.settings import Settings
from tests.metrics_server.server import children
from tests.metrics_server.server.children import alive, kill, wait_until_gone

HERE = children.__name__
QUICK = Patience(start_seconds=15, young_seconds=2, most_young=3, first_pause_seconds=0.05, end_seconds=1.0)


class Watched:
    """A supervisor in a thread."""

    def __init__(self, folder: Path, names: list[str], answers: Callable[[], bool] = lambda: True) -> None:
        self.pids: dict[str, int] = {}
        self.restarts: dict[str, int] = {}
        self.is_ready = threading.Event()
        self.error: MetricsError | None = None
        kept = [Child(Orders(f"{HERE}:{name}", Settings(folder)), QUICK, ()) for name in names]
        self.supervisor = Supervisor(kept, answers, self._changed, self.is_ready.set, QUICK)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except MetricsError as error:
            self.error = error

    def _changed(self, pids: dict[str, int], restarts: dict[str, int]) -> None:
        self.pids, self.restarts = pids, restarts

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 15
        while not holds():
            assert time.monotonic() < deadline and self.error is None, (self.pids, self.error)
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        return self.pids[f"{HERE}:{name}"]


@contextmanager
def watched(folder: Path, *names: str, answers: Callable[[], bool] = lambda: True) -> Iterator[Watched]:
    one = Watched(folder, list(names), answers)
    try:
        yield one
    finally:
        one.supervisor.stop()
        one.thread.join(15)
        assert not one.thread.is_alive()


def test_a_killed_child_is_started_again_and_all_end_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), watched(tmp_path, "steady") as one:
        one.until(one.is_ready.is_set)
        first = one.pid("steady")
        for kills in range(1, 5):  # more often than faults of its own end a server
            pid = one.pid("steady")
            kill(pid)
            one.until(lambda pid=pid: one.pids.get(f"{HERE}:steady", pid) != pid)  # type: ignore[misc]
            assert one.restarts == {f"{HERE}:steady": kills}
        last = one.pid("steady")
        assert alive(last) and not alive(first)
    wait_until_gone(last)
    assert f"{HERE}:steady, process {first}, has died by signal SIGKILL" in caplog.text
    assert f"is started again, process {last}" in caplog.text


def test_a_child_that_dies_at_once_again_and_again_ends_the_server(tmp_path: Path) -> None:
    with watched(tmp_path, "steady", "broken") as one:
        one.until(lambda: bool(one.pids))
        steady = one.pid("steady")
        one.thread.join(15)
    assert str(one.error).startswith(f"{HERE}:broken has died 3 times at once, the last time with status 7:")
    assert "  the reason why" in str(one.error)
    wait_until_gone(steady)


def test_what_a_user_has_to_mend_is_said_at_the_start(tmp_path: Path) -> None:
    with watched(tmp_path, "wrong", answers=lambda: False) as one:
        one.thread.join(15)
    assert str(one.error) == "database postgresql://nowhere: cannot be reached"


def test_what_a_user_can_mend_meanwhile_does_not_end_a_server_that_has_run(tmp_path: Path) -> None:
    """Its database may be away for longer than a processor lives that is started without it."""
    with watched(tmp_path, "wrong") as one:
        one.until(lambda: one.restarts.get(f"{HERE}:wrong", 0) > QUICK.most_young)
    assert one.is_ready.is_set() and one.error is None


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), watched(tmp_path, "deaf") as one:
        one.until(lambda: "deaf" in caplog.messages)
        pid = one.pid("deaf")
    assert not alive(pid)
    assert f"process {pid}, has not ended: it is killed" in caplog.text


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = child.start(Orders(f"{HERE}:parent", Settings(tmp_path)), stderr=subprocess.DEVNULL)
    noted = tmp_path / "grandchild"
    deadline = time.monotonic() + 15
    while not (noted.exists() and noted.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    grandchild = int(noted.read_text())
    assert alive(grandchild)
    process.kill()
    process.wait(10)
    wait_until_gone(grandchild)


def test_a_server_that_never_answers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = Patience(start_seconds=0.3, end_seconds=1.0)
    kept = [Child(Orders(f"{HERE}:steady", Settings(tmp_path)), patience, ())]
    with pytest.raises(MetricsError, match=r"does not answer after 0\.3 s"):
        Supervisor(kept, lambda: False, lambda *_: None, lambda: None, patience).run()


def test_one_server_per_folder_until_its_last_child_is_gone(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(MetricsError, match=r"a server runs in it already \(process \d+\)"):
        FolderLock(tmp_path)
    holder = child.start(Orders(f"{HERE}:steady", Settings(tmp_path)), pass_fds=(lock.fd,))
    lock.close()
    # As if the supervisor had been killed: its number is no process.
    (tmp_path / "server.lock").write_text("999999999\n")
    with pytest.raises(MetricsError, match=r"processes of a server that was killed \(process 999999999\) still run"):
        FolderLock(tmp_path, patience_seconds=0.3)
    timer = threading.Timer(0.3, holder.kill)
    timer.start()
    FolderLock(tmp_path, patience_seconds=10).close()
    holder.wait(10)
    timer.join()
