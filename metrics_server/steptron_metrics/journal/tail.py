"""Follows a journal: what receivers have appended since the last look."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal import reading
from steptron_metrics.protocol.messages import checksum
from steptron_metrics.results import Event

_SETTLED_NS = 2_000_000_000
"""A folder's time of change tells that nothing has been added since a scan only when it is older than that: clocks of
file systems are coarse."""
_MAX_CACHED_DESCRIPTION_BYTES = 256 << 20
"""4,096 ranks that each own other matrices have 20 MB of them; one that is not remembered is looked for in its
segment."""


class Notice(NamedTuple):
    """That a frame is in the journal; its values are ``read_values(segment, offset, length)``."""

    run: str
    session_ns: int
    world_size: int
    rank: int
    iteration: int
    description_id: int
    ended_ns: int
    seconds: float
    consumed_tokens: int
    dropped: int
    events: tuple[Event, ...]
    segment: str
    offset: int
    length: int


@dataclass
class _Segment:
    run: str
    path: str
    offset: int = 0
    size: int = -1  # when last read
    unread: bool = False  # poll stopped early in it


@dataclass
class _Folder:
    run: str
    path: str
    changed_ns: int = -1
    settled: bool = False


class Tail:
    """Reads a journal from its beginning on, and goes on reading where something is added.

    One that is made anew announces everything again. Not for several threads.

    Attributes:
        damaged: frames so far whose bytes were not as they were written (and are not announced). After a power failure
            such frames were not acknowledged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, _Folder] = {}
        self._open: dict[str, _Segment] = {}
        self._known: dict[str, set[str]] = {}  # per run, paths seen
        self._descriptions: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._description_bytes = 0
        self._root = _Folder("", str(folder))
        self._buffer = bytearray(1 << 20)
        self.damaged = 0

    def poll(self, max_frames: int = 65_536, without: Container[str] = ()) -> list[Notice]:
        """Frames that are new since the last call, of all runs; in a segment in the order in which they were written.

        Stops after some ``max_frames`` (by less than a batch of each run): call it again until it returns nothing.
        Each run that has more gets its share of them, however much others have. Batches that are not whole are left
        alone until they are.

        Args:
            max_frames: see above.
            without: runs that are left alone this time.
        """
        self._look_for_segments()
        runs: dict[str, list[_Segment]] = {}
        for segment in self._open.values():
            if segment.run not in without and _has_more(segment):
                runs.setdefault(segment.run, []).append(segment)
        notices: list[Notice] = []
        for number, segments in enumerate(runs.values()):
            end = len(notices) + max(1, (max_frames - len(notices)) // (len(runs) - number))
            for segment in segments:
                if len(notices) >= end:
                    break
                try:
                    self._read(segment, notices, end)
                except FileNotFoundError:
                    self._open.pop(segment.path, None)
        return notices

    def description(self, notice: Notice) -> bytes:
        """The serialized description of a frame's values.

        Raises:
            KeyError: its segment is gone, or damaged.
        """
        key = (notice.run, notice.description_id)
        content = self._descriptions.get(key)
        if content is None:
            content = _find_description(notice)
            self._remember(key, content)
        else:
            self._descriptions.move_to_end(key)
        return content

    def _look_for_segments(self) -> None:
        if self._has_changed(self._root):
            present = {entry.name: entry.path for entry in reading.run_folders(self._folder)}
            for run in self._folders.keys() - present.keys():
                self._forget(run)
            for run, path in present.items():
                self._folders.setdefault(run, _Folder(run, path))
        added = False
        for folder in list(self._folders.values()):
            if self._has_changed(folder):
                paths = {segment.path for segment in reading.segments_of(folder.run, folder.path)}
                known = self._known.setdefault(folder.run, set())
                for path in sorted(paths - known):
                    self._open[path] = _Segment(folder.run, path)
                    added = True
                for path in known - paths:
                    self._open.pop(path, None)
                self._known[folder.run] = paths
        if added:  # the oldest first, over all runs
            self._open = dict(sorted(self._open.items(), key=lambda item: os.path.basename(item[0])))

    def _has_changed(self, folder: _Folder) -> bool:
        """Whether its entries may be others than at the last call."""
        try:
            changed_ns = os.stat(folder.path).st_mtime_ns
        except FileNotFoundError:
            changed_ns = -2
        if folder.settled and changed_ns == folder.changed_ns:
            return False
        folder.settled = time.time_ns() - changed_ns > _SETTLED_NS
        folder.changed_ns = changed_ns
        return True

    def _forget(self, run: str) -> None:
        del self._folders[run]
        for path in self._known.pop(run, set()):
            self._open.pop(path, None)

    def _read(self, segment: _Segment, notices: list[Notice], max_frames: int) -> None:
        fd = os.open(segment.path, os.O_RDONLY)
        try:
            segment.size = os.fstat(fd).st_size
            segment.unread = False
            while True:
                if len(notices) >= max_frames:
                    segment.unread = True
                    return
                head = fmt.decode_head(os.pread(fd, fmt.HEAD_SIZE, segment.offset), segment.offset)
                if head is None or segment.offset + head.length > segment.size:
                    return  # torn, or not all there yet
                if not head.records:
                    self._open.pop(segment.path, None)  # its writer has ended it
                    return
                batch = self._pread(fd, head.length, segment.offset)
                if not self._take(segment, head, batch, notices):
                    return
                segment.offset += head.length
        finally:
            os.close(fd)

    def _pread(self, fd: int, length: int, offset: int) -> memoryview:
        """Bytes of a file, valid until the next call."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        read = 0
        while read < length:
            got = os.preadv(fd, [view[read:]], offset + read)
            if not got:
                break
            read += got
        return view[:read]

    def _take(self, segment: _Segment, head: fmt.Head, batch: memoryview, notices: list[Notice]) -> bool:
        """Adds a batch's frames; False when its table is not as it was written."""
        table = fmt.decode_table(batch[fmt.HEAD_SIZE :], head)
        if table is None:
            return False
        offsets = fmt.payload_offsets(table)
        if offsets[-1] != head.length:
            return False
        starts = offsets[:-1].tolist()
        lengths, checksums = table["length"].tolist(), table["checksum"].tolist()
        whole = [
            checksum(batch[start : start + length]) == expected
            for start, length, expected in zip(starts, lengths, checksums, strict=True)
        ]
        frames = table["kind"] == fmt.FRAME
        if not all(whole):
            sound = frames & _with_all_that_belongs_to_them(table, np.array(whole))
            self.damaged += int(np.count_nonzero(frames & ~sound))
            frames = sound
        events: dict[int, tuple[Event, ...]] = {}
        for row in np.flatnonzero(table["kind"] != fmt.FRAME).tolist():
            if not whole[row]:
                continue
            content = batch[starts[row] : starts[row] + lengths[row]]
            kind = int(table["kind"][row])
            if kind == fmt.DESCRIPTION:
                self._remember((segment.run, int(table["description_id"][row])), bytes(content))
            elif kind == fmt.EVENTS:
                events[row - 1] = fmt.decode_events(content)
            elif kind == fmt.RUN and bytes(content).decode(errors="replace") != segment.run:
                self._open.pop(segment.path, None)  # not of this run: someone has moved it
                return False
        rows = np.flatnonzero(frames)
        picked = table[rows]
        notices.extend(
            map(
                Notice._make,
                zip(
                    repeat(segment.run),
                    picked["session_ns"].tolist(),
                    picked["world_size"].tolist(),
                    picked["rank"].tolist(),
                    picked["iteration"].tolist(),
                    picked["description_id"].tolist(),
                    picked["ended_ns"].tolist(),
                    picked["seconds"].tolist(),
                    picked["consumed_tokens"].tolist(),
                    picked["dropped"].tolist(),
                    [events.get(row, ()) for row in rows.tolist()] if events else repeat(()),
                    repeat(segment.path),
                    (offsets[rows] + segment.offset).tolist(),
                    picked["length"].tolist(),
                    strict=False,
                ),
            )
        )
        return True

    def _remember(self, key: tuple[str, int], content: bytes) -> None:
        if key in self._descriptions:
            return
        self._descriptions[key] = content
        self._description_bytes += len(content)
        while self._description_bytes > _MAX_CACHED_DESCRIPTION_BYTES and len(self._descriptions) > 1:
            self._description_bytes -= len(self._descriptions.popitem(last=False)[1])


def _has_more(segment: _Segment) -> bool:
    try:
        return segment.unread or os.stat(segment.path).st_size != segment.size
    except FileNotFoundError:
        return True  # reading it will tell


def _with_all_that_belongs_to_them(table: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """bool [records]: the payload is whole, and so are a frame's description and events if in this batch."""
    lost = table["description_id"][~whole & (table["kind"] == fmt.DESCRIPTION)]
    sound = whole & ~np.isin(table["description_id"], lost)
    sound[np.flatnonzero(~whole & (table["kind"] == fmt.EVENTS)) - 1] = False
    return sound


def _find_description(notice: Notice) -> bytes:
    try:
        fd = os.open(notice.segment, os.O_RDONLY)
    except FileNotFoundError:
        raise KeyError(f"{notice.segment} is gone, and with it description {notice.description_id:016x}") from None
    try:
        for offset, _, table in reading.batches(fd):
            match = (table["kind"] == fmt.DESCRIPTION) & (table["description_id"] == np.uint64(notice.description_id))
            for row in np.flatnonzero(match).tolist():
                start = offset + int(fmt.payload_offsets(table)[row])
                content = os.pread(fd, int(table["length"][row]), start)
                if checksum(content) == notice.description_id:
                    return content
    finally:
        os.close(fd)
    raise KeyError(f"{notice.segment} has no description {notice.description_id:016x}")
