"""Checks frames before anything is made of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.registry import Mark
from steptron_metrics.journal.writer import Entry
from steptron_metrics.protocol.description import MAX_ITERATION
from steptron_metrics.protocol.messages import checksum
from steptron_metrics.receiver.descriptions import Descriptions, Known
from steptron_metrics.receiver.greeting import utc
from steptron_metrics.receiver.moments import Moments, what_is_wrong
from steptron_metrics.results import Event

MAX_DESCRIPTIONS = 4096
"""Distinct ones over a connection."""
MAX_DESCRIPTION_BYTES = 64 << 20
MAX_EVENTS = 64
MAX_KIND_LENGTH = 32
MAX_DETAIL_LENGTH = 1000

_EMPTY = Known(b"", ())
_EMPTY_ID = checksum(b"")
_MAX_INT64 = (1 << 63) - 1
_SMALL = 16 << 10
"""A description of so many bytes is checked at once; larger ones in a thread, so that other connections go on."""


class TooManyDescriptions(Exception):
    """A connection has sent as many as it may; over a new one it can begin anew."""


class Refusal(NamedTuple):
    """Why a frame is not taken: where it is in the message, and whether only a later session is in its way."""

    at: int
    reason: str
    superseded: bool = False


@dataclass
class Checked:
    """What is left of a message's frames: what to store, the least iteration in it, and what was not taken."""

    entry: Entry
    num_frames: int = 0
    first: int = MAX_ITERATION
    refusals: list[Refusal] = field(default_factory=list)


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
                checked = self._descriptions.check(content)
            else:
                checked = await asyncio.to_thread(self._descriptions.check, content)
            known = self._descriptions.add(checked)
        if len(self._known) >= MAX_DESCRIPTIONS or self._known_bytes + len(content) > MAX_DESCRIPTION_BYTES:
            raise TooManyDescriptions("too many descriptions over one connection: begin another")
        self._known[description_id] = known
        self._known_bytes += len(content)

    def used(self, frames: Sequence[Any]) -> dict[int, Known]:
        """The descriptions that frames need, as far as they have come, by id."""
        ids = {frame.description_id for frame in frames}
        return {one: known for one in ids if (known := self._known.get(one)) is not None}

    def check(
        self,
        frames: Sequence[Any],
        values_of: Sequence[bytes | memoryview],
        refused: dict[int, str],
        not_admitted: Mapping[int, str],
        later: Mark | None,
    ) -> Checked:
        """Checks frames each for itself.

        Args:
            frames: of a message.
            values_of: their values; these of the frames themselves are not looked at.
            refused: those whose descriptions were, by index.
            not_admitted: why the run does not take descriptions, by id.
            later: the session that has taken the place of this one.
        """
        descriptions: dict[int, bytes] = {}
        records: list[bytes] = []
        payloads: list[bytes | memoryview] = []
        refusals: list[Refusal] = []
        num_frames = num_bytes = 0
        first = MAX_ITERATION
        impossible = self._impossible(frames, values_of)
        end = MAX_ITERATION + 1 if later is None else later.first
        for index, (frame, values) in enumerate(zip(frames, values_of, strict=True)):
            if index in refused:
                refusals.append(Refusal(index, refused[index]))
                continue
            if frame.description_id in not_admitted:
                refusals.append(Refusal(index, not_admitted[frame.description_id]))
                continue
            try:
                record = self._record(frame, values)
                if index in impossible:
                    known = self._known[frame.description_id]
                    raise ValueError(what_is_wrong(self._descriptions.series(known), np.frombuffer(values, "<f4")))
                events = _events(frame.events) if frame.events else None
            except ValueError as error:
                refusals.append(Refusal(index, str(error)))
                continue
            iteration = frame.iteration
            if later is not None and iteration >= end:
                refusals.append(Refusal(index, _superseded(self._run, iteration, later), superseded=True))
                continue
            first = min(first, iteration)
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
        return Checked(Entry(self._run, records, payloads, num_bytes, descriptions), num_frames, first, refusals)

    def _impossible(self, frames: Sequence[Any], values_of: Sequence[bytes | memoryview]) -> set[int]:
        """Indices of frames whose folded values can be none."""
        groups: dict[Moments, tuple[list[int], list[np.ndarray]]] = {}
        for index, (frame, values) in enumerate(zip(frames, values_of, strict=True)):
            known = self._known.get(frame.description_id)
            if known is not None and known.folded is not None and len(values) == known.num_bytes:
                begin, moments = known.folded
                indices, arrays = groups.setdefault(moments, ([], []))
                indices.append(index)
                arrays.append(np.frombuffer(values, "<f4", offset=4 * begin))
        impossible: set[int] = set()
        for moments, (indices, arrays) in groups.items():
            impossible.update(np.array(indices)[~moments.are_possible(arrays)].tolist())
        return impossible

    def _record(self, frame: Any, values: bytes | memoryview) -> bytes:
        rank, iteration, seconds = frame.rank, frame.iteration, frame.seconds
        if rank >= self._world_size:
            raise ValueError(f"rank {rank}: the session has ranks 0 to {self._world_size - 1}")
        if not 1 <= iteration <= MAX_ITERATION:
            raise ValueError(f"iteration {iteration}: expected 1 to 2^53 - 1")
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


def _superseded(run: str, iteration: int, later: Mark) -> str:
    ahead = (later.started_ns - later.seen_ns) / 1e9
    clock = f" (by a clock that was {ahead:.1f} s ahead of the server's)" if ahead > 1 else ""
    return (
        f"iteration {iteration}: a later session of run {run!r}, begun at {utc(later.started_ns)}{clock}, has begun at "
        f"iteration {later.first} in the place of this session. Where this one still trains, another process trains "
        "under the same name: give one of them another (telemetry.run)"
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
