"""Deletes what a journal no longer needs."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from steptron_metrics.journal import format as fmt
from steptron_metrics.journal import reading
from steptron_metrics.protocol.description import RUN_NAME

FILL = 0.75
"""Part of the space allowed that pruning leaves filled: what is done with then never makes a receiver tell clients to
wait, which it does at the whole of it."""

_DELETED = ".deleted-"

_PAIR = np.dtype([("session_ns", "<u8"), ("iteration", "<u8")])


@dataclass
class _Segment:
    file: reading.SegmentFile
    size: int
    pairs: np.ndarray  # [P] of _PAIR, distinct
    blocked: bool = False  # has undone iterations, or is being written to


def prune(folder: Path, is_done: Callable[[str, int, int], bool], raw_iterations: int, max_bytes: int) -> int:
    """Deletes segments that nobody needs: their iterations are all done, and none is among the latest of its run.

    If the journal takes up more than ``FILL * max_bytes`` after that, the oldest segments that are done go too, until
    it does not. What is not done, and segments that a receiver is writing to, stay in any case.

    Args:
        folder: of the journal.
        is_done: whether the iteration of a run (name, session_ns, iteration) is in the store, or never will be.
        raw_iterations: number of latest iterations of a run that are kept.
        max_bytes: see above.

    Returns:
        Bytes freed.
    """
    _finish_deletions(folder)
    segments: list[_Segment] = []
    freed = 0
    for entry in reading.run_folders(folder):
        of_run = [_look(file) for file in reading.segments_of(entry.name, entry.path)]
        present = [segment for segment in of_run if segment is not None]
        window = _window([segment.pairs for segment in present], raw_iterations)
        for segment in present:
            if not np.isin(segment.pairs, window).any() and _is_done(segment, is_done) and _delete(segment):
                freed += segment.size
            else:
                segments.append(segment)
    total = sum(segment.size for segment in segments)
    for segment in sorted(segments, key=lambda one: one.file.name):
        if total <= FILL * max_bytes:
            break
        if _is_done(segment, is_done) and _delete(segment):
            total -= segment.size
            freed += segment.size
    return freed


def delete_run(folder: Path, run: str) -> None:
    """Deletes everything of a run; nothing happens when there is no such run.

    A receiver that writes to it meanwhile begins a new segment: frames that come later are of a new run of that name.

    Raises:
        ValueError: this is no name of a run.
    """
    if not RUN_NAME.fullmatch(run):
        raise ValueError(f"{run!r} is no name of a run")
    # Renamed first: readers and receivers never see half a run.
    aside = folder / f"{_DELETED}{run}-{secrets.token_hex(4)}"
    try:
        os.rename(folder / run, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def journal_bytes(folder: Path) -> dict[str, int]:
    """What the segments of each run take up."""
    total: dict[str, int] = {}
    for entry in reading.run_folders(folder):
        total[entry.name] = 0
        try:
            with os.scandir(entry.path) as files:
                for file in files:
                    try:
                        total[entry.name] += file.stat().st_size
                    except FileNotFoundError:
                        continue
        except FileNotFoundError:
            continue
    return total


def _finish_deletions(folder: Path) -> None:
    for leftover in folder.glob(f"{_DELETED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _look(file: reading.SegmentFile) -> _Segment | None:
    try:
        status = os.stat(file.path)
        return _Segment(file, status.st_size, _pairs(file.path, status.st_ino, status.st_size))
    except FileNotFoundError:
        return None


@lru_cache(maxsize=2048)
def _pairs(path: str, inode: int, size: int) -> np.ndarray:
    """Distinct iterations of the frames in a segment of that size, [P] of _PAIR."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = [np.empty(0, _PAIR)]
        for _, _, table in reading.batches(fd):
            frames = table[table["kind"] == fmt.FRAME]
            pairs = np.empty(len(frames), _PAIR)
            pairs["session_ns"], pairs["iteration"] = frames["session_ns"], frames["iteration"]
            found.append(np.unique(pairs))
        return np.unique(np.concatenate(found))
    finally:
        os.close(fd)


def _window(pairs: list[np.ndarray], raw_iterations: int) -> np.ndarray:
    """The latest iterations that hold: those that a later session has made again do not count."""
    everything = np.unique(np.concatenate([np.empty(0, _PAIR), *pairs]))  # ascending by session, then iteration
    holds = np.ones(len(everything), bool)
    first_of_later = np.uint64(2**64 - 1)
    for session in np.unique(everything["session_ns"])[::-1]:
        of_session = everything["session_ns"] == session
        holds[of_session] = everything["iteration"][of_session] < first_of_later
        first_of_later = min(first_of_later, everything["iteration"][of_session].min())
    kept = everything[holds]
    return kept[max(len(kept) - raw_iterations, 0) :]


def _is_done(segment: _Segment, is_done: Callable[[str, int, int], bool]) -> bool:
    if not segment.blocked:
        run = segment.file.run
        segment.blocked = not all(
            is_done(run, session_ns, iteration) for session_ns, iteration in segment.pairs.tolist()
        )
    return not segment.blocked


def _delete(segment: _Segment) -> bool:
    """Deletes a segment that nobody writes to and that has not grown since it was looked at."""
    try:
        fd = os.open(segment.file.path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size != segment.size:
            return False
        os.unlink(segment.file.path)
        return True
    except (BlockingIOError, FileNotFoundError):
        segment.blocked = True
        return False
    finally:
        os.close(fd)
