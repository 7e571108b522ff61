"""Raw values of an iteration, as ranks sent them, from a journal on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steptron_metrics.errors import MetricsError
from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.reading import batches, read_values, segments_of
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.protocol.description import RUN_NAME, Limits, Series, parse
from steptron_metrics.protocol.messages import checksum

if TYPE_CHECKING:
    import pandas as pd


def raw_values(journal: Path, run: str, iteration: int, metric: str, layer: int = -1) -> pd.DataFrame:
    """What each rank sent of a metric in an iteration of the run's latest session.

    Args:
        journal: folder of a server's journal.
        layer: -1 of what is not of a layer.

    Returns:
        data frame of ``rank``, ``row`` (the micro-batch; of folded series 0 to 4 are count, sum, sum of squares,
        minimum and maximum), ``item`` and ``value`` (float32), ordered by these.

    Raises:
        KeyError: there are no raw values of the iteration (any more), or not of the metric and layer.
    """
    import pandas as pd

    if not RUN_NAME.fullmatch(run):
        raise MetricsError(f"run {run!r}: expected a name like those of {RUN_NAME.pattern}")
    notices = _frames(journal, run, iteration)
    if not notices:
        raise KeyError(f"raw values of iteration {iteration} of run {run}")
    tail, limits = Tail(journal), Limits()
    parsed: dict[int, tuple[Series, ...]] = {}
    parts = []
    for notice in notices:
        if notice.description_id not in parsed:
            parsed[notice.description_id] = parse(tail.description(notice), limits)
        offset = 0
        for series in parsed[notice.description_id]:
            if (series.metric, series.layer) == (metric, layer):
                values = read_values(notice.segment, notice.offset + 4 * offset, 4 * series.size)
                item = np.tile(np.arange(series.first, series.first + series.count), series.rows)
                row = np.repeat(np.arange(series.rows), series.count)
                parts.append(pd.DataFrame({"rank": notice.rank, "row": row, "item": item, "value": values.copy()}))
            offset += series.size
    if not parts:
        raise KeyError(f"{metric} of layer {layer} in iteration {iteration} of run {run}")
    return pd.concat(parts).sort_values(["rank", "row", "item"], ignore_index=True)


def _frames(journal: Path, run: str, iteration: int) -> list[Notice]:
    """The iteration's frames of the latest session that has it, one a rank."""
    found: dict[int, dict[int, Notice]] = {}
    for segment in segments_of(run, str(journal / run)):
        try:
            fd = os.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # pruned meanwhile
        try:
            for begin, _, table in batches(fd):
                rows = np.flatnonzero((table["kind"] == fmt.FRAME) & (table["iteration"] == np.uint64(iteration)))
                offsets = fmt.payload_offsets(table)
                for place in rows.tolist():
                    record = table[place]
                    offset, length = begin + int(offsets[place]), int(record["length"])
                    if checksum(os.pread(fd, length, offset)) != int(record["checksum"]):
                        continue
                    session, rank = int(record["session_ns"]), int(record["rank"])
                    found.setdefault(session, {})[rank] = Notice(
                        run=run,
                        session_ns=session,
                        world_size=int(record["world_size"]),
                        rank=rank,
                        iteration=iteration,
                        description_id=int(record["description_id"]),
                        ended_ns=int(record["ended_ns"]),
                        seconds=float(record["seconds"]),
                        consumed_tokens=int(record["consumed_tokens"]),
                        dropped=int(record["dropped"]),
                        events=(),
                        segment=segment.path,
                        offset=offset,
                        length=length,
                    )
        finally:
            os.close(fd)
    return [notice for _, notice in sorted(found[max(found)].items())] if found else []
