"""When frames are put off for want of room, and whose."""

from __future__ import annotations

from pathlib import Path

from steptron_metrics.journal.writer import Writer
from steptron_metrics.receiver.room import Room
from tests.metrics_server.journal.frames import entry


def test_the_last_part_of_a_journal_is_not_for_the_run_that_fills_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    assert not writer.append([entry("flood", 1, count=6000), entry("small", 1, count=100)])
    writer.close()
    room = Room(tmp_path, 57_000, 0)  # of which 49.7 kB are written
    assert room.why_not("flood", 100) is None
    room.took("flood", 1000)
    assert "of this run" in str(room.why_not("flood", 100))
    assert room.why_not("small", 100) is None
    room.took("small", 6000)
    assert room.why_not("small", 1000) is not None  # full is full
    room.look()
    assert room.why_not("flood", 100) is None


def test_a_run_alone_may_fill_more_than_half(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    assert not writer.append([entry("only", 1, count=6000)])
    writer.close()
    assert Room(tmp_path, 60_000, 0).why_not("only", 100) is None
