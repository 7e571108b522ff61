"""What the receivers of a server know of a run together: its sessions, and which series it has.

It is a file in the run's folder, one JSON array a line, that receivers append to under a lock and sync before they
store a frame that needs it. So it holds, whoever dies: what is in the journal is within the limits, and no frame is
acknowledged whose place a later session had taken.

- ``["run", name, token]``: the first line, another one each time the file is begun.
- ``["session", started_ns, first, seen_ns]``: its least iteration, and when that was written, by the server's clock.
- ``["series", metric, layer, end, combination, session_ns]``: largest item, plus 1, rounded up to a power of two (so
  that a series grows a few times only); how ranks are combined, and the latest session that said so.

Later lines of the same session or series add to those before. A line that is not whole does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from steptron_metrics.protocol.description import Combination, Limits

FILE = "registry"
_LOCK_SECONDS = 10.0
_COMPACT_BYTES = 4 << 20
_COMPACT_FACTOR = 4
"""The file is written anew when it is so large and has so many times the lines that it needs."""

_NEVER = float("inf")


class TooManySessions(Exception):
    """The run has as many as it may."""


class Mark(NamedTuple):
    """A session that has sent frames: when it began, its least iteration, and when the server saw that."""

    started_ns: int
    first: int
    seen_ns: int


class Claim(NamedTuple):
    """What a description says of a metric's layer: largest item, plus 1, and how ranks are combined."""

    metric: str
    layer: int
    end: int
    combination: Combination


@dataclass(slots=True)
class _Series:
    end: int
    combination: int
    session_ns: int


class Registry:
    """The registry of a run, as a process has read it. Calls that write do so one at a time; they may take long.

    Args:
        folder: of the run.
        limits: of a run.
        compact_bytes: see ``_COMPACT_BYTES``.
    """

    def __init__(self, folder: Path, limits: Limits, compact_bytes: int = _COMPACT_BYTES) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._limits = limits
        self._compact_bytes = compact_bytes
        self._forget()

    def _forget(self) -> None:
        self.generation = object()
        """Another one after the file was replaced or deleted: what was added before may have to be added again."""
        self._seen = (0, 0, 0)
        self._head = b""
        self._read = self._lines = self._total = 0
        self._marks: dict[int, Mark] = {}
        self._series: dict[tuple[str, int], _Series] = {}
        self._metrics: set[str] = set()

    @property
    def is_current(self) -> bool:
        """Whether nothing has been added to the file since it was read; costs one look at its status."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return _stamp(status) == self._seen

    def later(self, session_ns: int) -> Mark | None:
        """Of the sessions that are later than this one, the one that begins at the least iteration; from there on this
        session is void."""
        later = [mark for mark in list(self._marks.values()) if mark.started_ns > session_ns]
        return min(later, key=lambda mark: mark.first, default=None)

    def first(self, session_ns: int) -> float:
        """The least iteration of a session; inf where it has none."""
        mark = self._marks.get(session_ns)
        return _NEVER if mark is None else mark.first

    def update(self) -> None:
        """Reads what is new.

        Raises:
            OSError: the disk does not take or give it.
        """
        with self._locked():
            pass

    def mark(self, session_ns: int, first: int) -> None:
        """Notes that a session has sent an iteration; it is on the disk then.

        Raises:
            TooManySessions: see there.
            OSError: the disk does not take it.
        """
        with self._locked() as fd:
            if first >= self.first(session_ns):
                return
            if session_ns not in self._marks and len(self._marks) >= self._limits.run_sessions:
                raise TooManySessions(
                    f"run {self._folder.name!r} has {len(self._marks)} sessions, at most {self._limits.run_sessions} "
                    "are taken: give it another name"
                )
            self._append(fd, [["session", session_ns, first, time.time_ns()]])

    def claim(self, session_ns: int, several: Sequence[Sequence[Claim]]) -> list[str | None]:
        """Takes descriptions of a session; they are on the disk then.

        Args:
            session_ns: when it began.
            several: of each description, each metric's layer once.

        Returns:
            Why a description is not taken; None when it is.

        Raises:
            OSError: the disk does not take it.
        """
        with self._locked() as fd:
            reasons: list[str | None] = []
            lines: list[list[Any]] = []
            for claims in several:
                new = [line for claim in claims if (line := self._line(session_ns, claim)) is not None]
                reason = self._contradicts(session_ns, claims) or self._exceeds(new)
                reasons.append(reason)
                if reason is None:
                    for line in new:
                        self._take(line)
                    lines += new
            if lines:
                try:
                    self._append(fd, lines)
                except OSError:
                    self._forget()  # what was taken is not written
                    raise
            return reasons

    def _line(self, session_ns: int, claim: Claim) -> list[Any] | None:
        """What has to be written of a claim; None where nothing has."""
        known = self._series.get((claim.metric, claim.layer))
        end = 1 << (claim.end - 1).bit_length()
        if known is not None and end <= known.end and session_ns <= known.session_ns:
            return None
        if known is not None:
            end = max(end, known.end)
        return ["series", claim.metric, claim.layer, end, int(claim.combination), session_ns]

    def _contradicts(self, session_ns: int, claims: Sequence[Claim]) -> str | None:
        for claim in claims:
            known = self._series.get((claim.metric, claim.layer))
            if known is not None and known.session_ns == session_ns and known.combination != claim.combination:
                said = Combination(known.combination).name
                return (
                    f"{claim.metric} of layer {claim.layer}: combination {claim.combination.name}, in this session it "
                    f"is {said} already: give one of them another name"
                )
        return None

    def _exceeds(self, lines: Sequence[Sequence[Any]]) -> str | None:
        limits, run = self._limits, self._folder.name
        grown = [(line[3], self._series.get((line[1], line[2]))) for line in lines]
        series = len(self._series) + sum(known is None for _, known in grown)
        metrics = len(self._metrics | {line[1] for line in lines})
        total = self._total + sum(end - (0 if known is None else known.end) for end, known in grown)
        if metrics > limits.run_metrics:
            return f"with it run {run!r} would have {metrics} metrics, at most {limits.run_metrics} are taken"
        if series > limits.run_series:
            return (
                f"with it run {run!r} would have {series} series, counted by metric and layer, at most "
                f"{limits.run_series} are taken"
            )
        if total > limits.total_items:
            return (
                f"with it run {run!r} would have {total} items in all metrics and layers together, each counted up to "
                f"its largest, rounded up to a power of two; at most {limits.total_items} are taken"
            )
        return None

    # ------------------------------------------------------------------------------------ file

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, locked and read."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                _lock(fd, self._path, deadline)
                if _is_at(fd, self._path):
                    self._catch_up(fd)
                    yield fd
                    self._seen = _stamp(os.fstat(fd))
                    return
            finally:
                os.close(fd)

    def _catch_up(self, fd: int) -> None:
        if os.pread(fd, len(self._head), 0) != self._head or os.fstat(fd).st_size < self._read:
            self._forget()
        content = b""
        while more := os.pread(fd, 1 << 20, self._read + len(content)):
            content += more
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a writer died in the middle
            os.ftruncate(fd, self._read + len(whole))
        self._read += len(whole)
        for line in whole.splitlines():
            self._head = self._head or line
            self._lines += 1
            with contextlib.suppress(ValueError, TypeError, IndexError, KeyError):
                self._take(json.loads(line))

    def _take(self, line: Sequence[Any]) -> None:
        if line[0] == "session":
            mark = Mark(int(line[1]), int(line[2]), int(line[3]))
            before = self._marks.get(mark.started_ns)
            if before is None or mark.first < before.first:
                self._marks[mark.started_ns] = mark
        elif line[0] == "series":
            metric, layer, end, combination, session_ns = str(line[1]), int(line[2]), *map(int, line[3:6])
            known = self._series.get((metric, layer))
            if known is None:
                self._metrics.add(metric)
                self._series[metric, layer] = _Series(end, int(Combination(combination)), session_ns)
                self._total += end
                return
            self._total += max(end - known.end, 0)
            known.end = max(end, known.end)
            if session_ns > known.session_ns:
                known.combination, known.session_ns = combination, session_ns

    def _append(self, fd: int, lines: Sequence[Sequence[Any]]) -> None:
        is_new = not self._read
        if is_new:
            lines = [self._first_line(), *lines]
        content = _encoded(lines)
        try:
            _write(fd, content)
            os.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._read)
            raise
        if is_new:
            self._head = content.split(b"\n", 1)[0]
            for folder in (self._folder, self._folder.parent):
                _sync_folder(folder)
        self._read += len(content)
        self._lines += len(lines)
        for line in lines:
            self._take(line)
        needed = len(self._series) + len(self._marks)
        if self._read > self._compact_bytes and self._lines > _COMPACT_FACTOR * needed:
            self._compact()

    def _first_line(self) -> list[Any]:
        return ["run", self._folder.name, secrets.token_hex(8)]

    def _compact(self) -> None:
        """Replaces the file by what it comes to; every process reads it anew then."""
        lines: list[Sequence[Any]] = [self._first_line(), *(["session", *mark] for mark in self._marks.values())]
        for (metric, layer), one in self._series.items():
            lines.append(["series", metric, layer, one.end, one.combination, one.session_ns])
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, _encoded(lines))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, self._path)
        _sync_folder(self._folder)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _encoded(lines: Sequence[Sequence[Any]]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def _lock(fd: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another receiver has not let go of {path} for {_LOCK_SECONDS:g} s") from None
            time.sleep(0.002)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
