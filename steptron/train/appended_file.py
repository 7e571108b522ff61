"""A file that records are appended to one after the other, and that a full disk does not harm."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from steptron.errors import UserError
from steptron.train.messages import warn

MEMORY_BYTES = 64 * 2**20
"""Most bytes of records that wait for one file."""
_FLAGS = os.O_WRONLY | os.O_APPEND
_FULL = (errno.ENOSPC, errno.EDQUOT)


class AppendedFile:
    """Whole records, in order, each handed to the operating system at once.

    A record that cannot be written is kept in memory and written before the next one as soon as that is possible; what
    the file took of it is cut off again. There is one message when that begins and one when the file is whole again.
    Of records that are more than ``memory_bytes`` together the oldest are dropped, and counted.

    The file is opened for each record: one that was moved or deleted goes on as a new one, with a message, and a file
    system that reports its faults on closing (NFS) reports them while the record is still there to be written again.

    Args:
        path: the file; it and its folder are made where missing.
        report: gets the messages.
        memory_bytes: see above; the newest record is kept however long.

    Raises:
        OSError: the file cannot be made or opened, unless for want of space.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = warn, memory_bytes: int = MEMORY_BYTES) -> None:
        self._path = path
        self._report = report
        self._memory_bytes = memory_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._fault: OSError | None = None
        self._cut_to: int | None = None  # where the last whole record ends, if something else may follow it
        self._is_made = False
        self._is_closed = False
        try:
            os.close(self._open())
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def append(self, record: bytes) -> None:
        """Writes a record, after those that wait, or keeps it."""
        if self._is_closed:
            raise ValueError(f"{self._path} is closed")
        waited = len(self._waiting)
        self._waiting.append(record)
        self._waiting_bytes += len(record)
        self._write(waited)
        while self._waiting_bytes > self._memory_bytes and len(self._waiting) > 1:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped += 1
            if self._dropped == 1:
                self._report(f"more than {self._memory_bytes} bytes wait for {self._path}: the oldest records are lost")

    def close(self) -> None:
        """Writes what waits, if that is possible by now; a second call does nothing.

        Raises:
            UserError: records were lost; the message names the file, the reason and their number.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._waiting:
            self._write(len(self._waiting))
        if lost := self._dropped + len(self._waiting):
            reason = "" if self._fault is None else f" cannot be written ({_reason(self._fault)})"
            raise UserError(f"{self._path}{reason}: {_lost(lost)}")

    def _write(self, waited: int) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            if self._fault is None:
                self._report(f"{self._path} cannot be written ({_reason(error)}): records are kept until it can be")
            self._fault = error
            return
        if self._fault is not None:
            self._fault = None
            lost = _lost(self._dropped) if self._dropped else "no record is lost"
            self._report(f"{self._path} is written again: {lost} ({waited} had waited)")

    def _write_waiting(self) -> None:
        descriptor = self._open()
        try:
            if self._cut_to is not None and os.fstat(descriptor).st_size > self._cut_to:
                os.ftruncate(descriptor, self._cut_to)
            self._cut_to = os.fstat(descriptor).st_size
            written, end, fault = _append(descriptor, self._cut_to, self._waiting)
        finally:
            os.close(descriptor)
        # Closing has failed where this is not reached: then nothing counts as written, and all of it is cut off.
        for _ in range(written):
            self._waiting_bytes -= len(self._waiting.popleft())
        self._cut_to = None if fault is None else end
        if fault is not None:
            raise fault

    def _open(self) -> int:
        try:
            descriptor = os.open(self._path, _FLAGS)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, _FLAGS | os.O_CREAT, 0o666)
            if self._is_made:
                self._report(f"{self._path} was moved or deleted under the run, which goes on in a new file")
        self._is_made = True
        return descriptor


def _append(descriptor: int, end: int, records: Iterable[bytes]) -> tuple[int, int, OSError | None]:
    """Writes records as long as that is possible: how many, where the last whole one ends, and what went wrong."""
    written = 0
    try:
        for record in records:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            end += len(record)
            written += 1
    except OSError as error:
        # If this fails too, it is done before anything else is written.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        return written, end, error
    return written, end, None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _lost(count: int) -> str:
    return f"{count} records are lost" if count > 1 else "1 record is lost"
