"""Entries for a journal's writer, made without a receiver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.reading import read_values
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.journal.writer import Entry
from steptron_metrics.protocol.description import Series, serialize
from steptron_metrics.protocol.messages import checksum
from steptron_metrics.results import Event

WORLD_SIZE = 8

Key = tuple[str, int, int, int]  # run, session_ns, iteration, rank


def description(count: int) -> bytes:
    return serialize([Series("moe.tokens", layer=3, count=count)])


def values_of(run: str, session_ns: int, iteration: int, rank: int, count: int) -> bytes:
    """Values that belong to a frame and to no other."""
    seed = [*run.encode(), session_ns, iteration, rank, count]
    return np.random.default_rng(seed).normal(size=count).astype("<f4").tobytes()


def entry(
    run: str = "run",
    iteration: int = 1,
    ranks: Sequence[int] = range(2),
    *,
    session_ns: int = 1,
    count: int = 7,
    events: Sequence[Event] = (),
) -> Entry:
    """A message's worth of frames; the events are of the first."""
    content = description(count)
    description_id = checksum(content)
    made = Entry(run, num_bytes=4 * count * len(ranks), descriptions={description_id: content})
    for rank in ranks:
        values = values_of(run, session_ns, iteration, rank, count)
        made.records.append(
            fmt.pack_record(
                fmt.FRAME,
                rank,
                WORLD_SIZE,
                0.5 + rank,
                session_ns,
                iteration,
                description_id,
                10**18 + iteration,
                1000 * iteration,
                rank,
                len(values),
                checksum(values),
            )
        )
        made.payloads.append(values)
        if events and rank == ranks[0]:
            encoded = fmt.encode_events(events)
            made.records.append(fmt.pack_payload(fmt.EVENTS, encoded))
            made.payloads.append(encoded)
    return made


def key(notice: Notice) -> Key:
    return notice.run, notice.session_ns, notice.iteration, notice.rank


def keys(notices: Sequence[Notice]) -> list[Key]:
    return [key(notice) for notice in notices]


def content_of(notice: Notice) -> bytes:
    return read_values(notice.segment, notice.offset, notice.length).tobytes()


def assert_as_made(notices: Sequence[Notice]) -> None:
    """That values, description and times are those that ``entry`` makes."""
    for notice in notices:
        assert content_of(notice) == values_of(*key(notice), notice.length // 4)
        assert notice.offset % 8 == 0
        assert (notice.world_size, notice.seconds, notice.dropped) == (WORLD_SIZE, 0.5 + notice.rank, notice.rank)
        assert (notice.ended_ns, notice.consumed_tokens) == (10**18 + notice.iteration, 1000 * notice.iteration)


def everything(folder: Path) -> list[Notice]:
    """All frames of a journal."""
    tail, notices = Tail(folder), []
    while new := tail.poll():
        notices += new
    return notices


def segments(folder: Path, run: str = "run") -> list[Path]:
    return sorted((folder / run).glob(f"*{fmt.SUFFIX}"))
