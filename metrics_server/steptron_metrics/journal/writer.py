"""Appends to a journal; what it has returned without an error is on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from steptron_metrics.journal import format as fmt

SEGMENT_BYTES = 64 << 20
_BATCH_BYTES = 16 << 20
"""A batch is closed once it holds so much, so that a reader does not have to hold more than about that."""
_MAX_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)
_ATTEMPTS = 3
"""How often an append is made again because its segment was deleted meanwhile."""
_IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class Entry:
    """Frames that are stored together or not at all: those of one message.

    Attributes:
        run: its name.
        records, payloads: of FRAME and EVENTS records, see ``format``.
        num_bytes: of the payloads.
        descriptions: what the frames need, serialized, by id.
    """

    run: str
    records: list[bytes] = field(default_factory=list)
    payloads: list[bytes | memoryview] = field(default_factory=list)
    num_bytes: int = 0
    descriptions: Mapping[int, bytes] = field(default_factory=dict)


@dataclass
class _Segment:
    path: Path
    fd: int
    size: int = 0
    descriptions: set[int] = field(default_factory=set)
    description_bytes: int = 0
    used: float = 0.0

    def is_full(self, segment_bytes: int) -> bool:
        """Larger where descriptions, which the next segment has to repeat, would be more than an eighth of it."""
        return self.size >= min(max(segment_bytes, 8 * self.description_bytes), 4 * segment_bytes)


class Writer:
    """The segments that a receiver appends to, one for each run.

    One call at a time.

    Args:
        folder: of the journal.
        number: of the receiver, for the names of its segments.
        segment_bytes: a segment that is at least so large gets nothing more; up to four times as large where it has
            many descriptions.
    """

    def __init__(self, folder: Path, number: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._number = number
        self._segment_bytes = segment_bytes
        self._segments: dict[str, _Segment] = {}
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="journal")
        self._count = 0

    def append(self, entries: Sequence[Entry]) -> dict[str, OSError]:
        """Writes entries, with one write and one sync for each run.

        Returns:
            For runs that failed, why: none of their entries may be acknowledged, though readers may find some. What
            comes later goes to a new segment.
        """
        by_run: dict[str, list[Entry]] = {}
        for entry in entries:
            by_run.setdefault(entry.run, []).append(entry)
        if len(by_run) == 1:
            outcomes = [self._append(run, of_run) for run, of_run in by_run.items()]
        else:  # syncs of several files that run at once cost little more than one
            outcomes = list(self._threads.map(self._append, by_run.keys(), by_run.values()))
        return {run: error for run, error in zip(by_run, outcomes, strict=True) if error is not None}

    def end_segments(self, idle_only: bool = True) -> None:
        """Ends segments, so that they can be pruned: those that nothing has come to for a minute, or all."""
        now = time.monotonic()
        for run, segment in list(self._segments.items()):
            if not idle_only or now - segment.used > _IDLE_SECONDS:
                del self._segments[run]
                _end(segment)

    def close(self) -> None:
        self.end_segments(idle_only=False)
        self._threads.shutdown()

    def _append(self, run: str, entries: list[Entry]) -> OSError | None:
        try:
            for _ in range(_ATTEMPTS):
                segment = self._segments.get(run)
                if segment is None:
                    segment = self._begin(run)
                    self._segments[run] = segment
                self._write(segment, entries, run)
                os.fdatasync(segment.fd)
                if segment.used == 0.0:  # its first batch: the names have to be on the disk too
                    _sync_folder(segment.path.parent)
                    _sync_folder(self._folder)
                segment.used = time.monotonic()
                deleted = not os.fstat(segment.fd).st_nlink
                if deleted or segment.is_full(self._segment_bytes):
                    del self._segments[run]
                    _end(segment)
                if not deleted:
                    return None
            raise OSError(f"the segments of run {run} are deleted as fast as they are written")
        except OSError as error:
            self._abandon(run)
            return error

    def _begin(self, run: str) -> _Segment:
        folder = self._folder / run
        folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        name = f"{time.time_ns():020d}-{self._number:03d}-{os.getpid()}-{self._count}{fmt.SUFFIX}"
        fd = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        # Says that it is being written to. Pruning may be quicker and delete it as empty, which _append sees.
        fcntl.flock(fd, fcntl.LOCK_EX)
        return _Segment(folder / name, fd)

    def _write(self, segment: _Segment, entries: list[Entry], run: str) -> None:
        records: list[bytes] = []
        payloads: list[bytes | memoryview] = []
        if not segment.size:
            name = run.encode()
            records.append(fmt.pack_payload(fmt.RUN, name))
            payloads.append(name)
        num_bytes = 0
        new: set[int] = set()
        for entry in entries:
            for description_id, content in entry.descriptions.items():
                if description_id not in segment.descriptions and description_id not in new:
                    new.add(description_id)
                    records.append(fmt.pack_description(content, description_id))
                    payloads.append(content)
                    num_bytes += len(content)
                    segment.description_bytes += len(content)
            records += entry.records
            payloads += entry.payloads
            num_bytes += entry.num_bytes
            if num_bytes >= _BATCH_BYTES:
                _write_batch(segment, records, payloads)
                records, payloads, num_bytes = [], [], 0
        if records:
            _write_batch(segment, records, payloads)
        segment.descriptions |= new

    def _abandon(self, run: str) -> None:
        """Leaves a segment as far as it is whole."""
        segment = self._segments.pop(run, None)
        if segment is None:
            return
        with contextlib.suppress(OSError):  # what is left only takes up room
            if not segment.size:
                os.unlink(segment.path)
            elif os.fstat(segment.fd).st_size > segment.size:  # the beginning of a batch: readers have not gone into it
                os.ftruncate(segment.fd, segment.size)
        _close(segment)


def _write_batch(segment: _Segment, records: list[bytes], payloads: list[bytes | memoryview]) -> None:
    buffers, length = fmt.encode(segment.size, records, payloads)
    remaining = iter(buffers)
    while chunk := list(islice(remaining, _MAX_BUFFERS)):
        _write_all(segment.fd, chunk)
    segment.size += length


def _write_all(fd: int, buffers: list[bytes | memoryview]) -> None:
    expected = sum(map(len, buffers))
    written = os.writev(fd, buffers)
    if written < expected:  # rare: a nearly full disk, or a signal
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _end(segment: _Segment) -> None:
    """Says to readers that nothing more comes; where that cannot be written they find out that nothing does."""
    with contextlib.suppress(OSError):
        _write_batch(segment, [], [])
    _close(segment)


def _close(segment: _Segment) -> None:
    with contextlib.suppress(OSError):  # whether what was acknowledged is on the disk the sync has told
        os.close(segment.fd)
