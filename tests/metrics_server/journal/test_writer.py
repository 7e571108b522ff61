"""Errors of the disk, and deletion, under a writer."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from steptron_metrics.journal.retention import delete_run
from steptron_metrics.journal.tail import Tail
from steptron_metrics.journal.writer import Writer
from tests.metrics_server.journal.frames import assert_as_made, entry, everything, keys, segments


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond that: it writes up to there, and fails then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path, 0)
    yield made
    made.close()


def test_a_write_that_breaks_off_makes_nothing_before_or_after_it_unreadable(tmp_path: Path, writer: Writer) -> None:
    tail = Tail(tmp_path)
    assert not writer.append([entry(iteration=1, count=1000)])
    assert len(tail.poll()) == 2
    (first,) = segments(tmp_path)
    whole = first.stat().st_size
    with file_size_limit(whole + 5000):
        failures = writer.append([entry(iteration=2, count=1000), entry("other", 1, count=10)])
        assert set(failures) == {"run"} and failures["run"].errno == errno.EFBIG  # the other run is stored
    assert first.stat().st_size == whole
    assert keys(tail.poll()) == [("other", 1, 1, 0), ("other", 1, 1, 1)]
    assert not writer.append([entry(iteration=2, count=1000)])
    assert len(segments(tmp_path)) == 2
    assert keys(tail.poll()) == [("run", 1, 2, 0), ("run", 1, 2, 1)]
    notices = everything(tmp_path)
    assert len(notices) == 6
    assert_as_made(notices)


def test_a_segment_that_could_not_be_begun_leaves_no_file(tmp_path: Path, writer: Writer) -> None:
    with file_size_limit(100):
        for _ in range(3):
            assert set(writer.append([entry()])) == {"run"}
    assert segments(tmp_path) == []
    assert not writer.append([entry()])
    assert len(everything(tmp_path)) == 2


def test_a_failed_sync_is_not_trusted_again(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the kernel may count the pages as written: what follows must not go to the same file."""
    assert not writer.append([entry(iteration=1)])

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        assert writer.append([entry(iteration=2)])["run"].errno == errno.EIO
    assert not writer.append([entry(iteration=2)])
    assert len(segments(tmp_path)) == 2
    assert_as_made(everything(tmp_path))


def test_nothing_is_acknowledged_before_data_and_names_are_synced(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("writev", "fdatasync", "fsync"):
        real = getattr(os, name)

        def note(fd: int, *args: object, name: str = name, real: object = real) -> object:
            calls.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
            return real(fd, *args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, note)
    assert not writer.append([entry(), entry(iteration=2)])
    segment = segments(tmp_path)[0].name
    assert calls == [("writev", segment), ("fdatasync", segment), ("fsync", "run"), ("fsync", tmp_path.name)]
    calls.clear()
    assert not writer.append([entry(iteration=3), entry(iteration=4), entry(iteration=5)])
    assert calls == [("writev", segment), ("fdatasync", segment)]  # a group is one write and one sync


@pytest.mark.parametrize("how", ["segment", "run"])
def test_what_is_written_to_a_deleted_segment_is_written_again(tmp_path: Path, writer: Writer, how: str) -> None:
    assert not writer.append([entry(iteration=1)])
    if how == "segment":
        segments(tmp_path)[0].unlink()
    else:
        delete_run(tmp_path, "run")
    assert not writer.append([entry(iteration=2)])
    notices = everything(tmp_path)
    assert [notice.iteration for notice in notices] == [2, 2]
    assert_as_made(notices)
    assert Tail(tmp_path).description(notices[0])


def test_a_segment_ends_by_size_and_when_idle(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, segment_bytes=10_000)
    for iteration in range(1, 13):
        assert not writer.append([entry(iteration=iteration, count=500)])
    assert len(segments(tmp_path)) == 4
    assert not writer.append([entry(iteration=20)])
    writer.end_segments()
    assert not writer.append([entry(iteration=21)])
    assert len(segments(tmp_path)) == 5  # it was not idle
    writer.end_segments(idle_only=False)
    assert not writer.append([entry(iteration=22)])
    assert len(segments(tmp_path)) == 6
    writer.close()
    assert len(everything(tmp_path)) == 30


def test_large_groups_are_split_into_batches(tmp_path: Path, writer: Writer) -> None:
    """Also more buffers than the kernel takes at once."""
    assert not writer.append([entry(iteration=i, ranks=range(4), count=1001) for i in range(1, 1501)])
    notices = everything(tmp_path)
    assert len(notices) == 6000
    assert_as_made(notices[::97])
