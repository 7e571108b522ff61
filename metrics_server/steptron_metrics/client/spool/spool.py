"""The frames of a folder: appended at the end, read from the front, given up from the front when there is no room."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from steptron_metrics.client.frame import Layout, Pending
from steptron_metrics.client.outbox import Outbox
from steptron_metrics.client.spool.lock import FolderLock
from steptron_metrics.client.spool.segment import (
    HEADER_BYTES,
    SUFFIX,
    Kind,
    Segment,
    record,
    records,
    scan,
    write_all,
)
from steptron_metrics.protocol.messages import checksum

MAX_SLOTS = 4096
UNREPORTED = "unreported.json"


class SpoolError(Exception):
    """The disk does not do what it should; the message says what and where."""


class Spool:
    """A client's part of a spool folder: the first subfolder ``0``, ``1``, ... that no other live client has.

    What dead ones have left in the others moves here. All methods are for one thread, as they wait for the disk.

    Args:
        root: the spool folder.
        max_bytes: that the files take up.
        segment_bytes: after so many a new file is begun.
        min_free_bytes: the spool does not grow while the disk has less room.
        outbox: where frames are counted.

    Raises:
        SpoolError: the folder cannot be made, locked or read.
    """

    def __init__(self, root: Path, max_bytes: int, segment_bytes: int, min_free_bytes: int, outbox: Outbox) -> None:
        self._max_bytes = max_bytes
        self._segment_bytes = max(1, min(segment_bytes, max_bytes // 8))
        self._min_free_bytes = min_free_bytes
        self._outbox = outbox
        self._segments: list[Segment] = []
        self._writing: tuple[Segment, int] | None = None
        self._next = 1
        self._bytes = 0
        self._said: dict[int, int] = {}
        self.damage: list[str] = []
        try:
            self.folder, self._lock = _free_slot(root)
        except OSError as error:
            raise SpoolError(f"spool {root}: {error.strerror or error}") from error
        try:
            self._find(self.folder)
            for other in sorted(root.iterdir()):
                if other.name.isdecimal() and other != self.folder:
                    self._adopt(other)
            self.report()
        except OSError as error:
            self._lock.release()
            raise SpoolError(f"spool {self.folder}: {error.strerror or error}") from error

    # Reading; these two may be asked from any thread.

    @property
    def num_bytes(self) -> int:
        """That the files take up."""
        return self._bytes

    def unread(self, hello: bytes) -> int:
        """Frames of a session that have not been read."""
        return sum(segment.unread for segment in tuple(self._segments) if segment.hello == hello)

    def sessions(self) -> list[bytes]:
        """The serialized Hellos of its frames, the oldest first."""
        return list(dict.fromkeys(segment.hello for segment in self._segments))

    def read(self, hello: bytes, max_bytes: int) -> list[Pending]:
        """The oldest unread frames of a session; at least one, if there is one.

        Raises:
            SpoolError: a file cannot be read; its unread frames count as dropped.
        """
        for segment in list(self._segments):
            if segment.hello == hello and segment.unread:
                try:
                    frames = self._read(segment, max_bytes)
                except OSError as error:
                    self._give_up(segment)
                    raise SpoolError(f"{segment.path}: {error.strerror or error}") from error
                if frames:
                    return frames
        return []

    def settle(self, frames: Iterable[Pending]) -> None:
        """Forgets frames that the server has answered, and deletes files none of whose frames are left."""
        for frame in frames:
            if frame.segment is not None:
                frame.segment.frames -= 1
                if frame.segment.frames == 0:
                    self._delete(frame.segment)
        self.report()

    # Writing.

    def append(self, hello: bytes, frames: Sequence[Pending]) -> int:
        """Writes frames of a session; to make room, files whose frames are all unread are deleted, the oldest first.

        Returns:
            How many of them are written, from the first on, or dropped because nothing else can give way.

        Raises:
            SpoolError: none was written, the folder does not take them.
        """
        done = 0
        try:
            self._check_free()
            while done < len(frames):
                done += self._append_some(hello, frames[done:])
        except OSError as error:
            self._close_segment()
            if not done:
                raise SpoolError(f"spool {self.folder}: {error.strerror or error}") from error
        return done

    def close(self) -> None:
        """Lets others have the folder."""
        self.report()
        self._close_segment()
        self._lock.release()

    def _append_some(self, hello: bytes, frames: Sequence[Pending]) -> int:
        # As many as the current file takes, in one write.
        if self._writing and (
            self._writing[0].size >= self._segment_bytes
            or self._writing[0].hello != hello
            or self._writing[0] not in self._segments
        ):
            self._close_segment()
        segment = self._writing[0] if self._writing else Segment(self._path(), hello)
        parts: list[bytes] = []
        count, size = segment.records, 0
        if not count:
            parts += (record(Kind.SESSION, 0, hello), hello)
            count, size = 1, HEADER_BYTES + len(hello)
        layouts: dict[int, Layout] = {}
        taken = 0
        for frame in frames:
            layout = frame.layout
            new = layout.id not in segment.layouts and layout.id not in layouts
            more = HEADER_BYTES + len(frame.body) + (HEADER_BYTES + len(layout.content) if new else 0)
            if taken and segment.size + size + more > self._segment_bytes:
                break
            if new:
                layouts[layout.id] = layout
                parts += (record(Kind.DESCRIPTION, count, layout.content, description_id=layout.id), layout.content)
                count += 1
            parts += (
                record(Kind.FRAME, count, frame.body, frame.rank, frame.dropped, layout.id),
                frame.body,
            )
            count += 1
            size += more
            taken += 1
        if not self._make_room(size, keep=segment):
            self._outbox.dropped(frames[:taken])
            return taken
        self._write(segment, b"".join(parts))
        segment.records = count
        segment.layouts.update(layouts)
        for frame in frames[:taken]:
            segment.frames += 1
            segment.unread += 1
            segment.by_rank[frame.rank] = segment.by_rank.get(frame.rank, 0) + 1 + frame.dropped
        self._outbox.spooled(frames[:taken])
        return taken

    def _write(self, segment: Segment, content: bytes) -> None:
        if self._writing is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(segment.path, flags, 0o600)
            self._next += 1
            self._writing = (segment, descriptor)
            self._segments.append(segment)
        write_all(self._writing[1], content)
        segment.size += len(content)
        self._bytes += len(content)

    def _make_room(self, size: int, keep: Segment) -> bool:
        if size > self._max_bytes:
            return False
        while self._bytes + size > self._max_bytes:
            oldest = next((s for s in self._segments if s.untouched and s is not keep), None)
            if oldest is None:
                return False
            self._give_up(oldest)
        return True

    def _check_free(self) -> None:
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < self._min_free_bytes:
            raise OSError(0, f"the disk has {free} bytes left, the spool leaves {self._min_free_bytes} free")

    def _close_segment(self) -> None:
        if self._writing is None:
            return
        (segment, descriptor), self._writing = self._writing, None
        with contextlib.suppress(OSError):
            os.fdatasync(descriptor)
        with contextlib.suppress(OSError):
            os.close(descriptor)
        if not segment.frames:
            self._delete(segment)

    # Giving up and deleting.

    def _give_up(self, segment: Segment) -> None:
        # The books first: a crash in between must not make a drop a silent one.
        self._outbox.dropped_unread(segment.unread, segment.by_rank)
        segment.frames -= segment.unread
        segment.unread = 0
        segment.by_rank = {}
        self.report()
        if not segment.frames:
            self._delete(segment)

    def _delete(self, segment: Segment) -> None:
        if self._writing and self._writing[0] is segment:
            _, descriptor = self._writing
            self._writing = None
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if segment in self._segments:
            self._segments.remove(segment)
            self._bytes -= segment.size
            with contextlib.suppress(OSError):
                segment.path.unlink()

    def report(self) -> None:
        """Keeps on disk which drops no frame has reported yet, for a later process; as far as the disk lets it."""
        unreported = self._outbox.unreported()
        if unreported == self._said:
            return
        path = self.folder / UNREPORTED
        with contextlib.suppress(OSError):
            if unreported:
                part = path.with_suffix(".part")
                part.write_text(json.dumps({str(rank): count for rank, count in unreported.items()}), encoding="ascii")
                part.replace(path)
            else:
                path.unlink(missing_ok=True)
            self._said = unreported

    # What earlier processes have left.

    def _path(self) -> Path:
        return self.folder / f"{self._next:012d}{SUFFIX}"

    def _find(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if not path.stem.isdecimal():
                continue
            found = scan(path)
            if found is None:
                if path.stat().st_size:
                    self.damage.append(f"{path} holds no frame that can be read; deleted")
                path.unlink()
                continue
            segment, missing = found
            if folder != self.folder:
                path.rename(self._path())
                segment.path = self._path()
                self._next += 1
            else:
                self._next = segment.number + 1
            self._segments.append(segment)
            self._bytes += segment.size
            self._outbox.found(segment.frames, {})
            if missing:
                self._outbox.lost(missing)
                self.damage.append(f"{path} is damaged: {missing} records are missing")
        self._take_unreported(folder / UNREPORTED)

    def _take_unreported(self, path: Path) -> None:
        try:
            unreported = {int(rank): int(count) for rank, count in json.loads(path.read_bytes()).items()}
        except FileNotFoundError:
            return
        except (ValueError, AttributeError, TypeError):
            self.damage.append(f"{path} cannot be read; how many frames an earlier process dropped is not known")
            path.unlink()
            return
        self._outbox.found(0, unreported)
        if path.parent == self.folder:
            self._said = unreported
        else:
            self.report()
            path.unlink()

    def _adopt(self, folder: Path) -> None:
        try:
            lock = FolderLock(folder)
        except OSError:
            return
        try:
            self._find(folder)
        finally:
            lock.release()

    def _read(self, segment: Segment, max_bytes: int) -> list[Pending]:
        with segment.path.open("rb") as file:
            file.seek(segment.position)
            chunk = file.read(min(max_bytes, segment.size - segment.position))
            frames = self._frames(segment, chunk)
            if not frames and segment.unread:
                # A record that is larger than what was asked for, or the rest of a torn file.
                file.seek(segment.position)
                frames = self._frames(segment, file.read(segment.size - segment.position), only_one=True)
                if not frames and segment.unread:
                    self._give_up(segment)
            return frames

    def _frames(self, segment: Segment, chunk: bytes, only_one: bool = False) -> list[Pending]:
        frames: list[Pending] = []
        base = segment.position
        for one in records(chunk, 0, len(chunk)):
            if only_one and frames:
                break
            segment.position = base + one.end
            content = chunk[one.start : one.end]
            whole = checksum(content) == one.checksum
            if one.kind == Kind.DESCRIPTION and whole:
                with contextlib.suppress(ValueError):
                    segment.layouts[one.description_id] = Layout.read(content)
            if one.kind != Kind.FRAME:
                continue
            reported = 1 + one.dropped
            segment.unread -= 1
            segment.by_rank[one.rank] = segment.by_rank.get(one.rank, 0) - reported
            layout = segment.layouts.get(one.description_id)
            if not whole or layout is None:
                self.damage.append(f"{segment.path} is damaged: a frame of rank {one.rank} cannot be read")
                self._outbox.dropped_unread(1, {one.rank: reported})
                segment.frames -= 1
                continue
            frame = Pending(one.rank, layout, content, 0.0)
            frame.dropped = frame.recorded = one.dropped
            frame.segment = segment
            frames.append(frame)
        if not segment.frames:
            self._delete(segment)
        return frames


def _free_slot(root: Path) -> tuple[Path, FolderLock]:
    for number in range(MAX_SLOTS):
        try:
            return root / str(number), FolderLock(root / str(number))
        except BlockingIOError:
            continue
    raise OSError(0, f"all of its {MAX_SLOTS} subfolders are used by live processes")
