"""What readers make of whole, growing, torn, damaged and deleted segments."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steptron_metrics.journal.reading import read_values
from steptron_metrics.journal.retention import delete_run
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.journal.writer import Writer
from steptron_metrics.protocol.messages import checksum
from steptron_metrics.results import Event
from tests.metrics_server.journal.frames import (
    assert_as_made,
    content_of,
    description,
    entry,
    everything,
    keys,
    segments,
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "journal", 0)
    yield made
    made.close()


def test_frames_of_many_messages_come_out_as_they_went_in(tmp_path: Path, writer: Writer) -> None:
    events = (Event("skipped", "gradient norm inf"), Event("stage", "2 · Übergang"))
    tail = Tail(tmp_path / "journal")
    assert tail.poll() == []
    assert not writer.append([entry("a", 1, [0, 1], events=events), entry("b", 1, [3], count=5), entry("a", 1, [2])])
    notices = tail.poll()
    assert sorted(keys(notices)) == [("a", 1, 1, 0), ("a", 1, 1, 1), ("a", 1, 1, 2), ("b", 1, 1, 3)]
    assert_as_made(notices)
    assert [notice.events for notice in notices if notice.run == "a"] == [events, (), ()]
    for notice in notices:
        expected = description(5 if notice.run == "b" else 7)
        assert tail.description(notice) == expected and notice.description_id == checksum(expected)
    assert tail.poll() == []
    assert not writer.append([entry("a", 2, [1])])
    assert keys(tail.poll()) == [("a", 1, 2, 1)]
    assert tail.poll() == []


def test_a_new_tail_announces_everything_again_over_several_segments_and_writers(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    expected = []
    for number in range(3):
        writer = Writer(folder, number, segment_bytes=2000)
        for iteration in range(1, 6):
            assert not writer.append([entry(iteration=iteration, ranks=[2 * number, 2 * number + 1], count=100)])
            expected += [("run", 1, iteration, 2 * number), ("run", 1, iteration, 2 * number + 1)]
        writer.close()
    assert len(segments(folder)) > 6
    for _ in range(2):
        notices = everything(folder)
        assert sorted(keys(notices)) == sorted(expected)
        assert_as_made(notices)
        # Each segment has the descriptions of its frames.
        for notice in notices:
            assert Tail(folder).description(notice) == description(100)


def test_a_poll_returns_some_max_frames(tmp_path: Path, writer: Writer) -> None:
    for iteration in range(1, 11):
        assert not writer.append([entry(iteration=iteration)])
    tail = Tail(tmp_path / "journal")
    polls = list(itertools.takewhile(bool, iter(lambda: tail.poll(max_frames=4), None)))
    assert [len(poll) for poll in polls] == [4, 4, 4, 4, 4]
    assert [notice.iteration for poll in polls for notice in poll] == [i for i in range(1, 11) for _ in range(2)]


def test_a_run_does_not_wait_for_all_that_another_has_written_before(tmp_path: Path, writer: Writer) -> None:
    for iteration in range(1, 101):
        assert not writer.append([entry("flood", iteration)])
    assert not writer.append([entry("small", 1)])
    tail = Tail(tmp_path / "journal")
    assert [notice.run for notice in tail.poll(max_frames=8)] == ["flood"] * 4 + ["small"] * 2
    assert not writer.append([entry("small", 2)])
    assert {notice.run for notice in tail.poll(max_frames=8, without={"flood"})} == {"small"}
    rest = everything_of(tail, max_frames=8)
    assert [notice.iteration for notice in rest] == [i for i in range(3, 101) for _ in range(2)]


def everything_of(tail: Tail, max_frames: int) -> list[Notice]:
    return [notice for poll in iter(lambda: tail.poll(max_frames), []) for notice in poll]


def small_segment(folder: Path) -> tuple[bytes, list[tuple[int, list[Notice]]]]:
    """A segment of three batches: its bytes, and what is whole from which length on."""
    writer = Writer(folder, 0)
    tail, ends = Tail(folder), []
    for iteration in range(1, 4):
        events = (Event("skipped", "x"),) if iteration == 2 else ()
        assert not writer.append([entry(iteration=iteration, ranks=[0, 5], count=3, events=events)])
        (path,) = segments(folder)
        ends.append((path.stat().st_size, tail.poll()))
    writer.close()
    return path.read_bytes(), ends


def test_a_segment_cut_at_any_byte_gives_its_whole_batches(tmp_path: Path) -> None:
    content, ends = small_segment(tmp_path / "whole")
    torn = tmp_path / "torn" / "run"
    torn.mkdir(parents=True)
    for cut in range(len(content) + 1):
        path = torn / f"{cut:020d}-000-1-1.segment"
        path.write_bytes(content[:cut])
        notices = everything(tmp_path / "torn")
        assert keys(notices) == [k for end, new in ends if end <= cut for k in keys(new)], f"cut at byte {cut}"
        assert_as_made(notices)
        path.unlink()
    assert len(content) > 800


def test_a_segment_that_grows_byte_by_byte_gives_each_frame_once(tmp_path: Path) -> None:
    content, ends = small_segment(tmp_path / "whole")
    (tmp_path / "grown" / "run").mkdir(parents=True)
    path = tmp_path / "grown" / "run" / "00000000000000000001-000-1-1.segment"
    tail, at = Tail(tmp_path / "grown"), {end: keys(new) for end, new in ends}
    with path.open("wb", buffering=0) as file:
        for cut in range(1, len(content) + 1):
            file.write(content[cut - 1 : cut])
            assert keys(tail.poll()) == at.get(cut, []), f"at byte {cut}"


def test_a_byte_that_has_changed_is_never_passed_on(tmp_path: Path) -> None:
    content, ends = small_segment(tmp_path / "whole")
    whole = [k for _, new in ends for k in keys(new)]
    damaged = tmp_path / "damaged" / "run"
    damaged.mkdir(parents=True)
    lost = 0
    for at in range(ends[-1][0]):
        path = damaged / f"{at:020d}-000-1-1.segment"
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
        tail = Tail(tmp_path / "damaged")
        notices = tail.poll()
        assert_as_made(notices)
        assert set(keys(notices)) <= set(whole)
        before = [k for end, new in ends if end <= at for k in keys(new)]
        assert keys(notices)[: len(before)] == before, f"byte {at} damaged a batch before it"
        lost += len(notices) < len(whole)
        assert all(tail.description(notice) == description(3) for notice in notices if notice.iteration == 1)
        path.unlink()
    # Nine payloads have up to 7 bytes of padding, which cost nothing; neither does the run's name.
    assert lost >= ends[-1][0] - 9 * 7 - len("run")
    # A changed payload costs its frame alone.
    path = damaged / "00000000000000000001-000-1-1.segment"
    first = ends[0][1][0]
    path.write_bytes(content[: first.offset] + bytes(4) + content[first.offset + 4 :])
    tail = Tail(tmp_path / "damaged")
    assert keys(tail.poll()) == whole[1:] and tail.damaged == 1


def test_what_is_deleted_under_a_tail_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    writer = Writer(folder, 0, segment_bytes=1)
    for iteration in range(1, 4):
        assert not writer.append([entry(iteration=iteration), entry("other", iteration)])
    tail = Tail(folder)
    notices = tail.poll(max_frames=1)
    assert len(notices) == 4  # a batch of each run
    segments(folder)[1].unlink()
    while new := tail.poll(max_frames=1):
        notices += new
    assert sorted({(n.run, n.iteration) for n in notices}) == [
        *(("other", iteration) for iteration in (1, 2, 3)),
        *(("run", iteration) for iteration in (1, 3)),
    ]
    delete_run(folder, "other")
    assert tail.poll() == []
    assert not writer.append([entry("other", 9)])
    assert sorted(keys(tail.poll())) == [("other", 1, 9, 0), ("other", 1, 9, 1)]
    writer.close()


def test_values_that_were_read_outlive_their_segment(tmp_path: Path, writer: Writer) -> None:
    assert not writer.append([entry(count=50_000)])
    notices = Tail(tmp_path / "journal").poll()
    first = notices[0]
    values = read_values(first.segment, first.offset, first.length)
    expected = values.copy()
    shutil.rmtree(tmp_path / "journal")
    assert (values == expected).all() and not values.flags.writeable
    gone = first.segment.replace("-000-", "-007-")
    with pytest.raises(FileNotFoundError, match="007"):
        read_values(gone, first.offset, first.length)
    with pytest.raises(KeyError, match="is gone"):
        Tail(tmp_path / "journal").description(first)


def test_values_are_read_from_a_segment_that_has_grown_since(tmp_path: Path, writer: Writer) -> None:
    tail = Tail(tmp_path / "journal")
    for iteration in range(1, 20):
        assert not writer.append([entry(iteration=iteration, count=2000)])
        assert_as_made(tail.poll())
    with pytest.raises(ValueError, match="ends at byte"):
        read_values(str(segments(tmp_path / "journal")[0]), 8, 1 << 30)


def test_a_segment_of_another_run_and_foreign_files_are_not_read(tmp_path: Path, writer: Writer) -> None:
    assert not writer.append([entry("a")])
    folder = tmp_path / "journal"
    (folder / "b").mkdir()
    shutil.copy(segments(folder, "a")[0], folder / "b")
    (folder / "a" / "notes.txt").write_text("hello")
    (folder / ".deleted-a-0123").mkdir()
    shutil.copy(segments(folder, "a")[0], folder / ".deleted-a-0123")
    assert {notice.run for notice in everything(folder)} == {"a"}
    assert content_of(everything(folder)[0])


def test_polling_costs_little(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "journal", 0)
    messages = [entry(ranks=range(8 * c, 8 * c + 8), count=10) for c in range(512)]
    for begin in range(0, 512, 32):
        assert not writer.append(messages[begin : begin + 32])
    best = idle = float("inf")
    for _ in range(3):
        tail = Tail(tmp_path / "journal")
        began = time.process_time()
        assert len(tail.poll()) == 4096
        best = min(best, time.process_time() - began)
        began = time.process_time()
        for _ in range(10):
            assert tail.poll() == []
        idle = min(idle, (time.process_time() - began) / 10)
    writer.close()
    assert best < 0.15  # 0.01 s on the machine that it was written on
    assert idle < 0.005  # 0.03 ms
