"""Files of the spool: records with checksums, one after the other.

A record is a header of 48 bytes, little-endian, and its content::

    magic "SMF1", kind (uint8), 3 bytes 0, number in the segment (uint32), length of the content (uint32),
    rank (uint32), dropped (uint32), description id (uint64), XXH3 of the content (uint64), XXH3 of the header before it

The first record is a SESSION (a serialized ``Hello``). DESCRIPTION records come before the FRAME records that use them;
the content of a FRAME is a serialized ``Frame`` without ``description`` and ``dropped``. The end of a file may be torn,
and what damage leaves is found by the magic; numbers tell how many records are missing.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from steptron_metrics.client.frame import Layout
from steptron_metrics.protocol.messages import checksum

MAGIC = b"SMF1"
SUFFIX = ".frames"
MAX_UINT32 = 0xFFFFFFFF

_FIELDS = struct.Struct("<4sB3xIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Kind(IntEnum):
    SESSION = 1
    DESCRIPTION = 2
    FRAME = 3


class Record(NamedTuple):
    """Header of a record.

    Attributes:
        start, end: of its content, bytes from the beginning of the file.
    """

    kind: int
    number: int
    rank: int
    dropped: int
    description_id: int
    checksum: int
    start: int
    end: int


@dataclass(eq=False)
class Segment:
    """What is known of a file.

    Attributes:
        path: of the file.
        hello: the serialized Hello of the session that its frames belong to.
        size: bytes of the file.
        records: how many it has.
        frames: that neither the server has nor anybody gave up.
        unread: of these, frames that have not been read to be sent.
        by_rank: of the unread, how many each rank has, with the drops that they report.
        position: where the unread begin.
        layouts: by id, of the descriptions before ``position``; of a file that is being written, all.
    """

    path: Path
    hello: bytes
    size: int = 0
    records: int = 0
    frames: int = 0
    unread: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    position: int = 0
    layouts: dict[int, Layout] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of the file; later ones have larger ones."""
        return int(self.path.stem)

    @property
    def untouched(self) -> bool:
        """Whether none of its frames is in memory."""
        return self.unread == self.frames


def record(kind: Kind, number: int, content: bytes, rank: int = 0, dropped: int = 0, description_id: int = 0) -> bytes:
    """Header of a record, to be followed by its content."""
    fields = _FIELDS.pack(
        MAGIC, kind, number, len(content), rank, min(dropped, MAX_UINT32), description_id, checksum(content)
    )
    return fields + _CHECKSUM.pack(checksum(fields))


def records(data: mmap.mmap | bytes, position: int, end: int) -> Iterator[Record]:
    """Headers of whole records from a position on; damaged headers are stepped over."""
    while position + HEADER_BYTES <= end:
        fields = data[position : position + _FIELDS.size]
        (expected,) = _CHECKSUM.unpack_from(data, position + _FIELDS.size)
        magic, kind, number, length, rank, dropped, description_id, content = _FIELDS.unpack(fields)
        if magic != MAGIC or checksum(fields) != expected:
            position = data.find(MAGIC, position + 1, end)
            if position < 0:
                return
            continue
        start = position + HEADER_BYTES
        if start + length > end:
            return
        position = start + length
        yield Record(kind, number, rank, dropped, description_id, content, start, position)


def scan(path: Path) -> tuple[Segment, int] | None:
    """Looks through the headers of a file that an earlier process has left.

    Returns:
        What it holds and how many of its records are missing; None where there is no frame to be had.
    """
    size = path.stat().st_size
    if size < HEADER_BYTES:
        return None
    missing = 0
    segment: Segment | None = None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for one in records(data, 0, size):
            if segment is None:
                hello = data[one.start : one.end]
                if one.kind != Kind.SESSION or checksum(hello) != one.checksum:
                    return None
                segment = Segment(path, hello, size, position=one.end)
            missing += max(one.number - segment.records, 0)
            segment.records = one.number + 1
            if one.kind == Kind.FRAME:
                segment.frames += 1
                segment.by_rank[one.rank] = segment.by_rank.get(one.rank, 0) + 1 + one.dropped
    if segment is None or not segment.frames:
        return None
    segment.unread = segment.frames
    return segment, missing


def write_all(descriptor: int, content: bytes) -> None:
    """Appends to a file, all or nothing.

    Raises:
        OSError: it could not be written; the file is as long as before, where the system lets it.
    """
    before = os.fstat(descriptor).st_size
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise
