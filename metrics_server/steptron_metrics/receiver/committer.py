"""Group commit: what connections bring while one sync runs goes to the disk with the next."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from steptron_metrics.journal.writer import Entry, Writer
from steptron_metrics.receiver.counters import Counters
from steptron_metrics.receiver.room import Room

log = logging.getLogger(__name__)

READ_BELOW = 64 << 20
"""With more bytes than that waiting to be written no connection is read from."""
MAX_WAITING = 512 << 20
"""What connections had read before that goes beyond this: their clients send it again."""
_GROUP_BYTES = 64 << 20
_MAX_WAIT_SECONDS = 10.0
_LOG_EVERY_SECONDS = 30.0
_OVERHEAD = 200
"""Bytes of the journal and of memory that a record takes beside its payload, roughly."""


class Committer:
    """Hands entries to the journal's writer, in a thread, one group after the other.

    Args:
        writer: of the journal; the committer is the only one to use it.
        room: what there is.
        counters: of the process.
    """

    def __init__(self, writer: Writer, room: Room, counters: Counters) -> None:
        self._writer = writer
        self._room = room
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._waiting: list[tuple[Entry, asyncio.Future[str | None]]] = []
        self._arrived = asyncio.Event()
        self._readable = asyncio.Event()
        self._readable.set()
        self._waiting_bytes = 0
        self._logged_at = -float("inf")
        self._task = asyncio.create_task(self._run())

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def why_not(self, run: str, num_bytes: int) -> str | None:
        """Why so many bytes more of a run are not taken now; None when they are."""
        if self._waiting_bytes + num_bytes > MAX_WAITING:
            return "too much is waiting to be written to the server's disk"
        return self._room.why_not(run, self._waiting_bytes + num_bytes)

    async def may_read(self) -> None:
        """Waits, for a while, until little enough is waiting that more should be read."""
        if not self._readable.is_set():
            try:
                async with asyncio.timeout(_MAX_WAIT_SECONDS):
                    await self._readable.wait()
            except TimeoutError:
                pass  # the disk hangs: what is read now is told to wait once MAX_WAITING is reached

    async def store(self, entry: Entry) -> str | None:
        """Waits until an entry is on the disk; why it is not, when it could not be written."""
        size = _size(entry)
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, done))
        self._waiting_bytes += size
        if self._waiting_bytes > READ_BELOW:
            self._readable.clear()
        self._arrived.set()
        return await done

    async def tidy(self) -> None:
        """Ends segments that nothing comes to, and all when pruning needs them; once a second."""
        idle_only = not self._room.is_short
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.end_segments, idle_only)

    async def close(self) -> None:
        """Commits what is waiting and ends the segments."""
        while self._waiting_bytes:
            await asyncio.sleep(0.005)
        self._task.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            group, size = self._next_group()
            began = time.perf_counter()
            entries = [entry for entry, _ in group]
            failures: dict[str, OSError] = {}
            try:
                failures = await loop.run_in_executor(self._thread, self._writer.append, entries)
            except Exception as error:  # a mistake of ours: nothing is acknowledged, and the server goes on
                log.exception("appending to the journal failed")
                failure_of_all = OSError(str(error))
                failures = {entry.run: failure_of_all for entry in entries}
            self._counters.commits += 1
            self._counters.commit_seconds += time.perf_counter() - began
            if failures:
                self._failed(next(iter(failures.values())))
            for entry in entries:
                self._room.took(entry.run, _size(entry))
            for entry, done in group:
                if not done.done():  # the client may have gone
                    failure = failures.get(entry.run)
                    done.set_result(None if failure is None else f"the server cannot write: {failure}")
            self._waiting_bytes -= size
            if self._waiting_bytes <= READ_BELOW:
                self._readable.set()

    def _next_group(self) -> tuple[list[tuple[Entry, asyncio.Future[str | None]]], int]:
        size = count = 0
        for entry, _ in self._waiting:
            size += _size(entry)
            count += 1
            if size >= _GROUP_BYTES:
                break
        group = self._waiting[:count]
        del self._waiting[:count]
        if not self._waiting:
            self._arrived.clear()
        return group, size

    def _failed(self, error: OSError) -> None:
        self._room.failed(error)
        if time.monotonic() - self._logged_at > _LOG_EVERY_SECONDS:
            self._logged_at = time.monotonic()
            log.error("cannot write to the journal: %s; clients are told to wait", error)


def _size(entry: Entry) -> int:
    return entry.num_bytes + _OVERHEAD * len(entry.records)
