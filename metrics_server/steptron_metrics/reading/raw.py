"""Raw values of an iteration, as ranks sent them, from a journal on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from steptron_metrics.errors import MetricsError
from steptron_metrics.journal import format as fmt
from steptron_metrics.journal.reading import batches, read_values, segments_of
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.protocol.description import RUN_NAME, Limits, Series, parse
from steptron_metrics.protocol.messages import checksum

if TYPE_CHECKING:
    import pandas as pd

ALL_RANKS = (0, 1 << 32)
SCHEMA = pa.schema([("rank", pa.int32()), ("row", pa.int32()), ("item", pa.int32()), ("value", pa.float32())])
_ROWS_AT_ONCE = 1 << 20


class RawValues:
    """What each rank sent of a metric in an iteration of the run's latest session.

    Args:
        journal: folder of a server's journal.
        layer: -1 of what is not of a layer.
        ranks: the first and the last one.
        limits: of descriptions.

    Raises:
        KeyError: there are no raw values of the iteration (any more), or not of the metric and layer.
        MetricsError: this is no name of a run.

    Attributes:
        number: of values.
    """

    def __init__(
        self,
        journal: Path,
        run: str,
        iteration: int,
        metric: str,
        layer: int = -1,
        *,
        ranks: tuple[int, int] = ALL_RANKS,
        limits: Limits | None = None,
    ) -> None:
        if not RUN_NAME.fullmatch(run):
            raise MetricsError(f"run {run!r}: expected a name like those of {RUN_NAME.pattern}")
        notices = [one for one in _frames(journal, run, iteration) if ranks[0] <= one.rank <= ranks[1]]
        if not notices:
            raise KeyError(f"raw values of iteration {iteration} of run {run}")
        tail, checks = Tail(journal), limits or Limits()
        places: dict[int, list[tuple[int, Series]]] = {}
        self._parts: list[tuple[Notice, int, Series]] = []
        for notice in notices:
            if notice.description_id not in places:
                series = parse(tail.description(notice), checks)
                places[notice.description_id] = _places(series, metric, layer)
            self._parts += [(notice, *place) for place in places[notice.description_id]]
        if not self._parts:
            raise KeyError(f"raw values of {metric} of layer {layer} in iteration {iteration} of run {run}")
        self.number = sum(series.size for _, _, series in self._parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Batches of ``SCHEMA``, ordered by rank, row and item.

        Raises:
            FileNotFoundError: a segment has been deleted meanwhile.
        """
        held: list[np.ndarray] = []
        rows = 0
        of_rank: list[np.ndarray] = []
        for index, (notice, offset, series) in enumerate(self._parts):
            of_rank.append(_columns(notice, offset, series))
            if index + 1 < len(self._parts) and self._parts[index + 1][0].rank == notice.rank:
                continue
            columns = np.concatenate(of_rank)
            held.append(columns[np.lexsort((columns["item"], columns["row"]))])
            rows += len(columns)
            of_rank = []
            if rows >= _ROWS_AT_ONCE:
                yield _batch(held)
                held, rows = [], 0
        if held:
            yield _batch(held)


def raw_values(journal: Path, run: str, iteration: int, metric: str, layer: int = -1) -> pd.DataFrame:
    """What each rank sent of a metric in an iteration of the run's latest session; arguments and errors as of
    :class:`RawValues`.

    Returns:
        data frame of ``rank``, ``row`` (the micro-batch; of folded series 0 to 4 are count, sum, sum of squares,
        minimum and maximum), ``item`` and ``value`` (float32), ordered by these.
    """
    return frame_of(RawValues(journal, run, iteration, metric, layer).batches())


def frame_of(parts: Iterator[pa.RecordBatch]) -> pd.DataFrame:
    """Batches of ``SCHEMA`` as a data frame."""
    return pa.Table.from_batches(parts, SCHEMA).to_pandas()


def _places(described: tuple[Series, ...], metric: str, layer: int) -> list[tuple[int, Series]]:
    """Of what is wanted: at which value of a frame it begins."""
    found, offset = [], 0
    for series in described:
        if (series.metric, series.layer) == (metric, layer):
            found.append((offset, series))
        offset += series.size
    return found


_ROW = np.dtype([("rank", np.int32), ("row", np.int32), ("item", np.int32), ("value", np.float32)])


def _columns(notice: Notice, offset: int, series: Series) -> np.ndarray:
    columns = np.empty(series.size, _ROW)
    columns["rank"] = notice.rank
    columns["row"] = np.repeat(np.arange(series.rows), series.count)
    columns["item"] = np.tile(np.arange(series.first, series.first + series.count), series.rows)
    columns["value"] = read_values(notice.segment, notice.offset + 4 * offset, 4 * series.size)
    return columns


def _batch(parts: list[np.ndarray]) -> pa.RecordBatch:
    columns = np.concatenate(parts)
    return pa.RecordBatch.from_arrays(
        [pa.array(np.ascontiguousarray(columns[name])) for name in SCHEMA.names], schema=SCHEMA
    )


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
