"""Frames as a receiver appends them."""

from __future__ import annotations

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.writer import Entry
from steptron_metrics.protocol.messages import checksum


def frame(
    rank: int, number: int, session: int, description: bytes, values: np.ndarray, world_size: int = 4, run: str = "run"
) -> Entry:
    content = values.astype("<f4").tobytes()
    record = fmt.pack_record(
        *(fmt.FRAME, rank, world_size, 0.5, session, number, checksum(description), 7, 9, 0),
        *(len(content), checksum(content)),
    )
    return Entry(run, [record], [content], len(content), {checksum(description): description})
