"""Checks frames before anything is made of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.writer import Entry
from steptron_metrics.protocol.messages import checksum
from steptron_metrics.receiver.descriptions import Descriptions, Known
from steptron_metrics.results import Event

MAX_ITERATION = 1 << 53
"""Iterations are exact in the float64 of JSON."""
MAX_DESCRIPTIONS = 4096
"""Distinct ones over a connection."""
MAX_DESCRIPTION_BYTES = 64 << 20
MAX_EVENTS = 64
MAX_KIND_LENGTH = 32
MAX_DETAIL_LENGTH = 1000

_EMPTY = Known(b"", 0)
_EMPTY_ID = checksum(b"")
_MAX_INT64 = (1 << 63) - 1
_SMALL = 16 << 10
"""A description of so many bytes is checked at once; larger ones in a thread, so that other connections go on."""


class TooManyDescriptions(Exception):
    """A connection has sent as many as it may; over a new one it can begin anew."""


@dataclass
class Checked:
    """What is left of a message's frames: what to store, and index and reason of frames that were not taken."""

    entry: Entry
    num_frames: int = 0
    refusals: list[tuple[int, str]] = field(default_factory=list)


class Checker:
    """Checks the frames of a connection.

    Args:
        run, session_ns, world_size: of its session.
        max_frame_bytes: of a frame's values.
        descriptions: those of the process.

    Attributes:
        carries_rank_0: a frame of rank 0 has come over it.
    """

    def __init__(
        self, run: str, session_ns: int, world_size: int, max_frame_bytes: int, descriptions: Descriptions
    ) -> None:
        self._run = run
        self._session_ns = session_ns
        self._world_size = world_size
        self._max_frame_bytes = max_frame_bytes
        self._descriptions = descriptions
        self._known: dict[int, Known] = {_EMPTY_ID: _EMPTY}
        self._known_bytes = 0
        self.carries_rank_0 = False

    async def learn(self, frames: Sequence[Any]) -> dict[int, str]:
        """Takes the descriptions that come with frames.

        Returns:
            Why those are refused that are, by the frame's index.

        Raises:
            TooManyDescriptions: for this connection.
            NoRoom: for the process.
        """
        refusals: dict[int, str] = {}
        for index, frame in enumerate(frames):
            content = frame.description
            if content:
                try:
                    await self._learn(frame.description_id, content)
                except ValueError as error:
                    refusals[index] = str(error)
        return refusals

    async def _learn(self, description_id: int, content: bytes) -> None:
        before = self._known.get(description_id)
        if before is not None and before.content == content:
            return
        if checksum(content) != description_id:
            raise ValueError(f"description_id {description_id:016x} is not the XXH3 of the description")
        if before is not None:
            raise ValueError(f"description_id {description_id:016x} is that of another description of this connection")
        known = self._descriptions.find(content)
        if known is None:
            if len(content) <= _SMALL:
                num_bytes = self._descriptions.check(content)
            else:
                num_bytes = await asyncio.to_thread(self._descriptions.check, content)
            known = self._descriptions.add(content, num_bytes)
        if len(self._known) >= MAX_DESCRIPTIONS or self._known_bytes + len(content) > MAX_DESCRIPTION_BYTES:
            raise TooManyDescriptions("too many descriptions over one connection: begin another")
        self._known[description_id] = known
        self._known_bytes += len(content)

    def check(self, frames: Sequence[Any], values_of: Sequence[bytes | memoryview], refused: dict[int, str]) -> Checked:
        """Checks frames each for itself.

        Args:
            frames: of a message.
            values_of: their values; these of the frames themselves are not looked at.
            refused: those whose descriptions were.
        """
        descriptions: dict[int, bytes] = {}
        records: list[bytes] = []
        payloads: list[bytes | memoryview] = []
        refusals: list[tuple[int, str]] = []
        num_frames = num_bytes = 0
        for index, (frame, values) in enumerate(zip(frames, values_of, strict=True)):
            if index in refused:
                refusals.append((index, refused[index]))
                continue
            try:
                record = self._record(frame, values)
                events = _events(frame.events) if frame.events else None
            except ValueError as error:
                refusals.append((index, str(error)))
                continue
            description_id = frame.description_id
            if description_id not in descriptions:
                descriptions[description_id] = self._known[description_id].content
            records.append(record)
            payloads.append(values)
            num_bytes += len(values)
            num_frames += 1
            if events is not None:
                records.append(fmt.pack_payload(fmt.EVENTS, events))
                payloads.append(events)
                num_bytes += len(events)
        return Checked(Entry(self._run, records, payloads, num_bytes, descriptions), num_frames, refusals)

    def _record(self, frame: Any, values: bytes | memoryview) -> bytes:
        rank, iteration, seconds = frame.rank, frame.iteration, frame.seconds
        if rank >= self._world_size:
            raise ValueError(f"rank {rank}: the session has ranks 0 to {self._world_size - 1}")
        if not 1 <= iteration <= MAX_ITERATION:
            raise ValueError(f"iteration {iteration}: expected 1 to 2^53")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds {seconds}: expected a finite number, not negative")
        ended_ns, tokens, dropped = frame.ended_ns, frame.consumed_tokens, frame.dropped
        for name, number in (("ended_ns", ended_ns), ("consumed_tokens", tokens), ("dropped", dropped)):
            if number > _MAX_INT64:
                raise ValueError(f"{name} {number}: expected less than 2^63")
        description_id = frame.description_id
        known = self._known.get(description_id)
        if known is None:
            raise ValueError(f"description {description_id:016x} has not come over this connection")
        length = len(values)
        if length > self._max_frame_bytes:
            raise ValueError(f"values: {length} bytes, at most {self._max_frame_bytes} are taken")
        if length != known.num_bytes:
            raise ValueError(f"values: {length} bytes, by the description there are {known.num_bytes}")
        if checksum(values) != frame.checksum:
            raise ValueError("checksum: not the XXH3 of the values")
        if rank == 0:
            self.carries_rank_0 = True
        return fmt.pack_record(
            fmt.FRAME,
            rank,
            self._world_size,
            seconds,
            self._session_ns,
            iteration,
            description_id,
            ended_ns,
            tokens,
            dropped,
            length,
            frame.checksum,
        )


def _events(events: Sequence[Any]) -> bytes:
    if len(events) > MAX_EVENTS:
        raise ValueError(f"events: {len(events)}, at most {MAX_EVENTS} are taken")
    taken = []
    for event in events:
        if not 1 <= len(event.kind) <= MAX_KIND_LENGTH:
            raise ValueError(f"event kind: {len(event.kind)} characters, expected 1 to {MAX_KIND_LENGTH}")
        if len(event.detail) > MAX_DETAIL_LENGTH:
            raise ValueError(f"event detail: {len(event.detail)} characters, at most {MAX_DETAIL_LENGTH} are taken")
        if "\0" in event.kind or "\0" in event.detail:
            raise ValueError("event: a character NUL, which databases do not take")
        taken.append(Event(event.kind, event.detail))
    return fmt.encode_events(taken)
