"""What pruning deletes and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.retention import FILL, delete_run, journal_bytes, prune
from steptron_metrics.journal.writer import Writer
from tests.metrics_server.journal.frames import entry, everything, segments

ROOM = 1 << 40


def write(folder: Path, iterations: range, run: str = "run", session_ns: int = 1, number: int = 0) -> None:
    """A segment for each iteration."""
    writer = Writer(folder, number, segment_bytes=1)
    for iteration in iterations:
        assert not writer.append([entry(run, iteration, session_ns=session_ns, count=1000)])
    writer.close()


def left(folder: Path) -> list[tuple[str, int, int]]:
    return sorted({(notice.run, notice.session_ns, notice.iteration) for notice in everything(folder)})


def test_done_iterations_outside_of_the_window_go(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(1, 4), run="short")
    before = sum(journal_bytes(tmp_path).values())
    freed = prune(tmp_path, lambda run, session_ns, iteration: iteration != 2, 3, ROOM)
    assert left(tmp_path) == [("run", 1, i) for i in (2, 8, 9, 10)] + [("short", 1, i) for i in (1, 2, 3)]
    assert freed == before - sum(journal_bytes(tmp_path).values()) > 0
    assert prune(tmp_path, lambda *_: True, 3, ROOM) > 0
    assert left(tmp_path) == [("run", 1, i) for i in (8, 9, 10)] + [("short", 1, i) for i in (1, 2, 3)]
    assert prune(tmp_path, lambda *_: True, 3, ROOM) == 0


def test_the_window_is_of_iterations_that_hold(tmp_path: Path) -> None:
    """A session that goes back makes iterations of an earlier one void: they do not fill the window."""
    write(tmp_path, range(1, 11), session_ns=1)
    write(tmp_path, range(5, 7), session_ns=2)
    prune(tmp_path, lambda *_: True, 4, ROOM)
    assert left(tmp_path) == [("run", 1, 3), ("run", 1, 4), ("run", 2, 5), ("run", 2, 6)]


def test_the_oldest_done_ones_go_when_room_is_short_whatever_the_window(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6), run="a")
    write(tmp_path, range(1, 6), run="b")
    one = segments(tmp_path, "a")[0].stat().st_size
    prune(tmp_path, lambda run, session_ns, iteration: (run, iteration) != ("a", 2), 100, int(5.5 * one / FILL))
    assert left(tmp_path) == [("a", 1, 2), ("b", 1, 2), ("b", 1, 3), ("b", 1, 4), ("b", 1, 5)]


def test_what_is_not_done_never_goes(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    assert prune(tmp_path, lambda *_: False, 0, 0) == 0
    assert len(left(tmp_path)) == 5


def test_a_segment_with_one_undone_iteration_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    assert not writer.append([entry(iteration=i) for i in range(1, 6)])
    writer.close()
    assert prune(tmp_path, lambda run, session_ns, iteration: iteration != 3, 0, 0) == 0
    assert prune(tmp_path, lambda *_: True, 0, 0) > 0
    assert left(tmp_path) == []


def test_a_segment_that_is_written_to_stays_and_counts(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    assert not writer.append([entry(iteration=7)])
    write(tmp_path, range(1, 7), number=1)
    assert prune(tmp_path, lambda *_: True, 2, ROOM) > 0
    assert left(tmp_path) == [("run", 1, 6), ("run", 1, 7)]  # 7 is in the window
    assert prune(tmp_path, lambda *_: True, 0, 0) > 0
    assert left(tmp_path) == [("run", 1, 7)]
    assert not writer.append([entry(iteration=8)])
    assert left(tmp_path) == [("run", 1, 7), ("run", 1, 8)]
    writer.close()
    assert prune(tmp_path, lambda *_: True, 0, 0) > 0
    assert left(tmp_path) == []


def test_segments_of_killed_receivers_go_too(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    (path,) = segments(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: -fmt.HEAD_SIZE])  # not ended, yet whole
    path.with_name("00000000000000000001-000-1-1.segment").write_bytes(content[: -fmt.HEAD_SIZE - 1])  # torn: no frame
    path.with_name("00000000000000000002-000-1-1.segment").touch()
    prune(tmp_path, lambda *_: True, 1, ROOM)
    assert segments(tmp_path) == [path] and left(tmp_path) == [("run", 1, 1)]
    assert prune(tmp_path, lambda *_: True, 0, ROOM) == len(content) - fmt.HEAD_SIZE
    assert segments(tmp_path) == []


def test_a_run_is_deleted_whole_and_alone(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), run="a")
    write(tmp_path, range(1, 3), run="a.b")
    delete_run(tmp_path, "a")
    delete_run(tmp_path, "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b"]
    assert left(tmp_path) == [("a.b", 1, 1), ("a.b", 1, 2)]
    for name in ("..", ".", "../a.b", "", "/etc", "a/../a.b", "a.b\n"):
        with pytest.raises(ValueError, match="no name of a run"):
            delete_run(tmp_path, name)
    assert left(tmp_path) == [("a.b", 1, 1), ("a.b", 1, 2)]


def test_a_deletion_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), run="a")
    (tmp_path / "a").rename(tmp_path / ".deleted-a-0123abcd")
    assert prune(tmp_path, lambda *_: False, 10, ROOM) == 0
    assert list(tmp_path.iterdir()) == []
