"""Processes that die, stop, fail or hang: the others end in time, and say which one it was."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from steptron.errors import PeerError
from steptron.platform import watch
from steptron.platform.launch import Workers
from tests.platform.watched import DEAD_AFTER
from tests.worker_pool import REPOSITORY

SIZE = 3
SIGKILL = 137
STORE_HAS_NO_ANSWER = (
    "rank 0 of 3, or the launcher that keeps the store where the processes meet, is gone, stopped or does not answer: "
    "NoAnswerError: no answer for 10 s"
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def outcome(
    mode: str, folder: Path, survivors: set[int], awake: bool = False
) -> tuple[dict[int, int], dict[int, str], float]:
    """Exit codes and outputs by rank, and the seconds from the first end to the last survivor's.

    Should the others be awakened, those that are stopped go on after the end of the survivors, and end as well.
    """
    workers = Workers(SIZE, [mode, str(folder)], module="tests.platform.watched", capture=True)
    first, last, deadline = None, 0.0, time.monotonic() + 100
    try:
        while survivors - workers.exit_codes.keys():
            assert time.monotonic() < deadline, {rank: workers.tail(rank) for rank in range(SIZE)}
            if workers.poll():
                first, last = first or time.monotonic(), time.monotonic()
            time.sleep(0.02)
        if awake:
            workers.send(signal.SIGCONT)
            while workers.running:
                assert time.monotonic() < deadline, {rank: workers.tail(rank) for rank in range(SIZE)}
                workers.poll()
                time.sleep(0.02)
        return dict(workers.exit_codes), {rank: workers.tail(rank) for rank in range(SIZE)}, last - (first or last)
    finally:
        workers.kill()
        workers.remove_logs()


@pytest.mark.parametrize("mode", ["kill", "stop"])
def test_a_dead_or_stopped_process_is_named_by_the_others_which_end(tmp_path: Path, mode: str) -> None:
    """Their main threads wait for ever, as in a collective that does not notice."""
    codes, texts, seconds = outcome(mode, tmp_path, {0, 2})
    assert codes[0] == codes[2] == PeerError.exit_code
    for rank in (0, 2):
        assert "no sign of life from rank 1 (process " in texts[rank], texts
    assert seconds < DEAD_AFTER + 10


def test_after_a_broken_connection_the_dead_process_is_named_and_no_other(tmp_path: Path) -> None:
    codes, texts, _ = outcome("broken", tmp_path, {0, 1, 2})
    assert codes == {0: PeerError.exit_code, 1: SIGKILL, 2: PeerError.exit_code}
    for rank in (0, 2):
        assert texts[rank].startswith("no sign of life from rank 1 (process "), texts
        assert f"this process, rank {rank}, noticed by: RuntimeError: Connection closed by peer" in texts[rank]


def test_the_first_process_takes_the_store_with_it(tmp_path: Path) -> None:
    codes, texts, _ = outcome("kill-first", tmp_path, {0, 1, 2})
    assert codes == {0: SIGKILL, 1: PeerError.exit_code, 2: PeerError.exit_code}
    for rank in (1, 2):
        assert "rank 0 of 3, or the launcher that keeps the store" in texts[rank], texts


def test_the_first_process_is_stopped_and_the_store_with_it(tmp_path: Path) -> None:
    """The main thread of rank 1 waits for ever, that of rank 2 fails in a collective; then rank 0 comes back."""
    codes, texts, seconds = outcome("stop-first", tmp_path, {1, 2}, awake=True)
    assert codes == dict.fromkeys(range(SIZE), PeerError.exit_code)
    assert f"steptron: rank 1 of 3 ends: {STORE_HAS_NO_ANSWER}" in texts[1], texts
    assert texts[2].startswith(STORE_HAS_NO_ANSWER), texts
    assert "this process, rank 2, noticed by: RuntimeError: Connection closed by peer" in texts[2]
    assert seconds < 5
    assert "no sign of life from ranks 1 (process " in texts[0], texts
    assert "(but rank 0, which says so, was away itself for 1" in texts[0]


def test_a_process_that_is_stopped_at_the_end_does_not_let_the_run_end_well(tmp_path: Path) -> None:
    codes, texts, _ = outcome("stop-last", tmp_path, {0, 2})
    assert codes == {0: PeerError.exit_code, 2: 0}
    assert texts[0].startswith("no sign of life from rank 1 (process "), texts


class StoppedStore(dist.Store):
    """Takes what is set, as a connection to a process that is stopped does, and gives no answer."""

    def clone(self) -> StoppedStore:
        return self

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_nor_does_a_store_that_is_stopped_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_STORE_SECONDS", 0.5)
    with (
        pytest.raises(PeerError, match=r"or does not answer: NoAnswerError: no answer for 0\.5 s"),
        watch.Watch(StoppedStore(), 1, 2, 0.3, None, tmp_path),
    ):
        pass


def test_where_the_first_process_is_slow_to_leave_the_others_are_not_kept(tmp_path: Path) -> None:
    """Rank 0 waits for the others, these for nobody."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    started = time.monotonic()
    with watch.Watch(store, 1, 2, 30.0, None, tmp_path):
        pass
    assert time.monotonic() - started < 2
    assert store.get("watch/left/1") == b"done"


def test_an_error_of_one_process_is_told_by_the_others(tmp_path: Path) -> None:
    codes, texts, _ = outcome("error", tmp_path, {0, 1, 2})
    assert codes == {0: PeerError.exit_code, 1: 1, 2: PeerError.exit_code}
    for rank in (0, 2):
        assert "rank 1 of 3 (process " in texts[rank], texts
        assert "ended with ValueError: the seventh sample is empty" in texts[rank]


def test_of_a_hanging_run_stacks_are_written_and_the_one_that_does_not_wait_is_named(tmp_path: Path) -> None:
    codes, texts, _ = outcome("hang", tmp_path, {0, 1, 2})
    assert set(codes.values()) == {PeerError.exit_code}
    assert "the run hangs: step 7: no progress for 1 s" in texts[0], texts
    for rank, place in ((0, "wait_for_others"), (1, "work_on"), (2, "wait_for_others")):
        assert place in (tmp_path / "stacks" / f"rank-{rank:05d}.txt").read_text()


def test_processes_that_end_in_order_are_left_alone(tmp_path: Path) -> None:
    codes, texts, _ = outcome("done", tmp_path, {0, 1, 2})
    assert codes == {0: 0, 1: 0, 2: 0}, texts
    assert set(texts.values()) == {""}
