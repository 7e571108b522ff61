"""Frames as the client keeps them: already serialized, so that sending, spooling and sending again only copy bytes.

What is written here by hand is protobuf's encoding of ``Frame``, ``Frames`` and ``ToServer``: fields may come in any
order, so a message grows by appending the fields that are known last. The classes of the protocol would copy the values
at every level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import MAX_ITERATION, Limits, Series, parse, serialize
from steptron_metrics.results import Event

if TYPE_CHECKING:
    from steptron_metrics.client.spool.segment import Segment

MAX_EVENTS = 64
MAX_KIND, MAX_DETAIL = 32, 1000
"""Characters of an event."""

_ROOM_BESIDE_BODY = 512
"""Counted for a frame beside its bytes, so that frames without values are bounded too."""

_LENGTH_DELIMITED, _VARINT = 2, 0


def _tag(message: Any, field: str, wire_type: int) -> bytes:
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type])


_VALUES = _tag(messages.Frame, "values", _LENGTH_DELIMITED)
_DESCRIPTION = _tag(messages.Frame, "description", _LENGTH_DELIMITED)
_DROPPED = _tag(messages.Frame, "dropped", _VARINT)
_NUMBER = _tag(messages.Frames, "number", _VARINT)
_FRAME = _tag(messages.Frames, "frames", _LENGTH_DELIMITED)
_FRAMES = _tag(messages.ToServer, "frames", _LENGTH_DELIMITED)

FRAME_OVERHEAD = 32
"""At least as many bytes as a frame's tags, lengths and ``dropped`` take up in a message."""
MESSAGE_OVERHEAD = 32


def varint(number: int) -> bytes:
    """Protobuf's encoding of an unsigned number."""
    if number < 0x80:
        return bytes((number,))
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a frame's values are, in order.

    Attributes:
        id: XXH3 of ``content``.
        content: the serialized description.
        size: number of values.
    """

    id: int
    content: bytes
    size: int

    @classmethod
    def of(cls, series: Sequence[Series]) -> Layout:
        """Raises ``ValueError`` naming the series and the field where they are beyond the protocol."""
        return cls.read(serialize(series))

    @classmethod
    def read(cls, content: bytes) -> Layout:
        """From a serialized description; raises like :meth:`of`."""
        size = sum(one.size for one in parse(content, Limits()))
        return cls(messages.checksum(content), content, size)


class Pending:
    """A frame that the server has not answered.

    Attributes:
        rank: its rank.
        layout: of its values.
        body: the serialized frame, without ``description`` and ``dropped``.
        since: when it was given to the client, by the monotonic clock.
        dropped: frames of its rank that it reports as given up.
        recorded: how many of these the spool's record of it says too.
        segment: where it is in the spool; None while it is in memory only.
    """

    __slots__ = ("body", "dropped", "layout", "rank", "recorded", "segment", "since")

    def __init__(self, rank: int, layout: Layout, body: bytes, since: float) -> None:
        self.rank = rank
        self.layout = layout
        self.body = body
        self.since = since
        self.dropped = 0
        self.recorded = 0
        self.segment: Segment | None = None

    @property
    def room(self) -> int:
        """Bytes that it is counted as while it is in memory."""
        return len(self.body) + _ROOM_BESIDE_BODY


def frame_body(
    rank: int,
    iteration: int,
    layout: Layout,
    values: memoryview,
    ended_ns: int,
    seconds: float,
    consumed_tokens: int,
    events: Sequence[Event],
) -> bytes:
    """Serializes a frame, without ``description`` and ``dropped``; copies the values once.

    Args:
        values: float32 little-endian, as bytes.

    Raises:
        ValueError: a number is beyond its field, or something that a server refuses; the message names the field.
    """
    if not 1 <= iteration <= MAX_ITERATION:
        raise ValueError(f"iteration {iteration}: expected 1 to 2^53 - 1")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds {seconds}: expected a finite number, not negative")
    if len(events) > MAX_EVENTS or not all(event.kind for event in events):
        raise ValueError(f"events: {len(events)} of them, expected at most {MAX_EVENTS}, each with a kind")
    head = messages.Frame(
        rank=rank,
        iteration=iteration,
        description_id=layout.id,
        ended_ns=ended_ns,
        seconds=seconds,
        consumed_tokens=consumed_tokens,
        checksum=messages.checksum(values),
    )
    for event in events:
        # Databases do not take the character NUL.
        head.events.add(kind=_clean(event.kind, MAX_KIND), detail=_clean(event.detail, MAX_DETAIL))
    return b"".join((head.SerializeToString(), _VALUES, varint(len(values)), values))


def _clean(text: str, length: int) -> str:
    return text[:length].replace("\0", "\N{REPLACEMENT CHARACTER}")


def frames_message(number: int, frames: Iterable[Pending], known: Iterable[int]) -> bytes:
    """A serialized ``ToServer`` with frames.

    Args:
        number: of the message.
        frames: what it carries.
        known: ids of the descriptions that the server has; the others go along, each once.
    """
    sent = set(known)
    parts = [_NUMBER, varint(number)]
    for frame in frames:
        extra = b""
        if frame.layout.id not in sent:
            sent.add(frame.layout.id)
            extra = _DESCRIPTION + varint(len(frame.layout.content)) + frame.layout.content
        if frame.dropped:
            extra += _DROPPED + varint(frame.dropped)
        parts += (_FRAME, varint(len(frame.body) + len(extra)), frame.body, extra)
    length = sum(map(len, parts))
    return b"".join((_FRAMES, varint(length), *parts))
