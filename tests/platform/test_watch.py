"""Processes that die, stop, fail or hang: the others end in time, and say which one it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from steptron.errors import PeerError
from steptron.platform.launch import Workers
from tests.platform.watched import DEAD_AFTER
from tests.worker_pool import REPOSITORY

SIZE = 3
SIGKILL = 137


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def outcome(mode: str, folder: Path, survivors: set[int]) -> tuple[dict[int, int], dict[int, str], float]:
    """Exit codes and outputs by rank, and the seconds from the first end to the last survivor's."""
    workers = Workers(SIZE, [mode, str(folder)], module="tests.platform.watched", capture=True)
    first, last, deadline = None, 0.0, time.monotonic() + 100
    try:
        while survivors - workers.exit_codes.keys():
            assert time.monotonic() < deadline, {rank: workers.tail(rank) for rank in range(SIZE)}
            if workers.poll():
                first, last = first or time.monotonic(), time.monotonic()
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
