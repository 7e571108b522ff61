"""What is in a segment: batches one after the other, everything little-endian and 8-byte aligned.

A batch is a header of 48 bytes, a table of records of 80 bytes each, and the records' payloads in the order of the
table, each padded to 8 bytes. The header's checksum covers the header, its table checksum the table, and a record's
checksum its payload, so that a reader can tell whether a batch is whole without reading on. A batch that holds no
record says that the writer has ended the segment.

Record kinds: RUN (payload: the run's name; first record of a segment), DESCRIPTION (a serialized description, before
the first frame that it is of), FRAME (its values, float32) and EVENTS (JSON, ``[[kind, detail], ...]``, of the frame
before).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steptron_metrics.protocol.messages import checksum
from steptron_metrics.results import Event

SUFFIX = ".segment"
ALIGNMENT = 8

RUN, DESCRIPTION, FRAME, EVENTS = 1, 2, 3, 4

_MAGIC = b"STMJRNL\x01"
_HEAD = struct.Struct("<8sQQQQ")  # magic with version, offset in the file, length with all, records, table's checksum
_SEAL = struct.Struct("<Q")  # checksum of the above
HEAD_SIZE = _HEAD.size + _SEAL.size

RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("rank", "<u4"),
        ("world_size", "<u4"),
        ("seconds", "<f4"),
        ("session_ns", "<u8"),
        ("iteration", "<u8"),
        ("description_id", "<u8"),
        ("ended_ns", "<u8"),
        ("consumed_tokens", "<u8"),
        ("dropped", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""A record of a batch's table. ``length`` and ``checksum`` (XXH3) are of the payload."""

pack_record = struct.Struct("<IIIfQQQQQQQQ").pack
"""Its fields, in order, as bytes."""

MAX_BATCH_BYTES = 1 << 30
"""No batch is longer: a reader does not believe a header that says so."""


class Head(NamedTuple):
    """Header of a batch: its whole length in bytes, its number of records, its table's checksum."""

    length: int
    records: int
    table_checksum: int


def pack_description(content: bytes, description_id: int) -> bytes:
    return pack_record(DESCRIPTION, 0, 0, 0.0, 0, 0, description_id, 0, 0, 0, len(content), description_id)


def pack_payload(kind: int, content: bytes) -> bytes:
    """Record of a RUN or EVENTS payload."""
    return pack_record(kind, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, len(content), checksum(content))


def encode_events(events: Sequence[Event]) -> bytes:
    return json.dumps([[event.kind, event.detail] for event in events], ensure_ascii=False).encode()


def decode_events(content: bytes | memoryview) -> tuple[Event, ...]:
    return tuple(Event(kind, detail) for kind, detail in json.loads(bytes(content)))


_PADDING = [b"", *(bytes(ALIGNMENT - over) for over in range(1, ALIGNMENT))]


def encode(
    offset: int, records: Sequence[bytes], payloads: Sequence[bytes | memoryview]
) -> tuple[list[bytes | memoryview], int]:
    """A batch that begins at ``offset`` of its file: buffers to be written one after the other, and their length."""
    table = b"".join(records)
    buffers: list[bytes | memoryview] = [b"", table]
    length = HEAD_SIZE + len(table)
    for payload in payloads:
        size = len(payload)
        length += size
        buffers.append(payload)
        over = size % ALIGNMENT
        if over:
            buffers.append(_PADDING[over])
            length += ALIGNMENT - over
    head = _HEAD.pack(_MAGIC, offset, length, len(records), checksum(table))
    buffers[0] = head + _SEAL.pack(checksum(head))
    return buffers, length


def decode_head(content: bytes, offset: int) -> Head | None:
    """The header at ``offset`` of a file; None when these bytes are none."""
    if len(content) != HEAD_SIZE or content[:8] != _MAGIC:
        return None
    _, at, length, records, table_checksum = _HEAD.unpack_from(content)
    (seal,) = _SEAL.unpack_from(content, _HEAD.size)
    if seal != checksum(content[: _HEAD.size]) or at != offset:
        return None
    if not HEAD_SIZE + records * RECORD.itemsize <= length <= MAX_BATCH_BYTES:
        return None
    return Head(length, records, table_checksum)


def decode_table(content: bytes | memoryview, head: Head) -> np.ndarray | None:
    """The records of a batch, from the bytes that follow its header; None when they are not as they were written."""
    table = memoryview(content)[: head.records * RECORD.itemsize]
    if len(table) != head.records * RECORD.itemsize or checksum(table) != head.table_checksum:
        return None
    return np.frombuffer(table, RECORD)


def payload_offsets(table: np.ndarray) -> np.ndarray:
    """int64 [records + 1]: where each payload begins, from the beginning of the batch, and where the last ends."""
    padded = (table["length"].astype(np.int64) + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    return np.concatenate([[0], np.cumsum(padded)]) + (HEAD_SIZE + len(table) * RECORD.itemsize)
