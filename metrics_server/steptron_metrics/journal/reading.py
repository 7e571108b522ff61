"""Reads segments."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.protocol.description import RUN_NAME

_MAX_MAPS = 8
_maps: OrderedDict[str, mmap.mmap] = OrderedDict()
_maps_lock = threading.Lock()


def read_values(segment: str, offset: int, length: int) -> np.ndarray:
    """The values of a frame, read-only.

    The file stays mapped while the array lives; beside that, the 8 files used last stay mapped.

    Args:
        segment, offset, length: of a :class:`~steptron_metrics.journal.tail.Notice`.

    Returns:
        float32 [length / 4].

    Raises:
        FileNotFoundError: the segment has been pruned, or its run deleted.
        ValueError: the segment is shorter.
    """
    with _maps_lock:
        mapped = _maps.get(segment)
        if mapped is None or len(mapped) < offset + length:
            mapped = _map(segment)
            _maps[segment] = mapped
            if len(_maps) > _MAX_MAPS:
                _maps.popitem(last=False)  # not closed: arrays may still need it
        _maps.move_to_end(segment)
    if len(mapped) < offset + length:
        raise ValueError(f"{segment} ends at byte {len(mapped)}, before the end of values at {offset + length}")
    return np.frombuffer(mapped, "<f4", length // 4, offset)


def _map(segment: str) -> mmap.mmap:
    fd = os.open(segment, os.O_RDONLY)
    try:
        if not os.fstat(fd).st_size:
            raise ValueError(f"{segment} is empty")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


class SegmentFile(NamedTuple):
    """A segment in the folder of a journal; its name sorts by the time when it was begun."""

    run: str
    path: str
    name: str


def run_folders(folder: Path | str) -> list[os.DirEntry[str]]:
    """Folders of runs in a journal; none when there is no journal."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if RUN_NAME.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []


def segments_of(run: str, folder: str) -> list[SegmentFile]:
    """Segments of a run, the oldest first; none when the folder is gone."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(fmt.SUFFIX))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [SegmentFile(run, os.path.join(folder, name), name) for name in names]


class Batch(NamedTuple):
    """A batch's table, and where it begins in the segment."""

    offset: int
    head: fmt.Head
    table: np.ndarray


def batches(fd: int) -> Iterator[Batch]:
    """Whole batches of an open segment, without their payloads, up to the first that is torn or to its end."""
    size = os.fstat(fd).st_size
    offset = 0
    while True:
        head = fmt.decode_head(os.pread(fd, fmt.HEAD_SIZE, offset), offset)
        if head is None or not head.records or offset + head.length > size:
            return
        content = os.pread(fd, head.records * fmt.RECORD.itemsize, offset + fmt.HEAD_SIZE)
        table = fmt.decode_table(content, head)
        if table is None:
            return
        yield Batch(offset, head, table)
        offset += head.length
