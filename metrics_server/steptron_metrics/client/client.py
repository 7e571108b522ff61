"""What a trainer holds: takes frames without waiting, and sees to it that they arrive."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from steptron_metrics.client import background
from steptron_metrics.client.frame import Layout, Pending, frame_body
from steptron_metrics.client.line import Line, Server, read_certificate
from steptron_metrics.client.outbox import Outbox
from steptron_metrics.client.reports import Reports, logger
from steptron_metrics.client.settings import Tuning
from steptron_metrics.client.spool.spool import Spool, SpoolError
from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol import VERSION, messages
from steptron_metrics.protocol.description import RUN_NAME, Series
from steptron_metrics.results import Event

ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
CHUNK_BYTES = 4 << 20
"""Written to the spool at once, or half of the queue if that is less: a disk that hangs must leave room for the frames
that the network takes."""
REMEMBERED_REQUESTS = 10_000
SPOOL_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """What the server asks of the run.

    Attributes:
        number: the same request has the same number.
        kind: "checkpoint": write one after the current step.
        reason: for people.
    """

    number: int
    kind: str
    reason: str


@dataclass(frozen=True)
class ClientStatus:
    """Counts are of frames since the client began; ``accepted + found`` are all others together.

    Attributes:
        accepted: given to ``send``.
        found: that earlier processes had left in the spool folder.
        queued: in memory, on the way or waiting.
        spooled: on disk, waiting.
        stored: on the server's disk.
        superseded: that the server has no use for, since a later session of the run has made their iterations again.
        refused: that the server will not have; ``last_error`` and a warning say why.
        dropped: given up for want of room or because of damage; also said to the server.
        queued_bytes, spooled_bytes: what those take up.
        connected: whether the server has answered the current connection's Hello.
        last_error: the last thing that went wrong, even if it is over; None: nothing yet.
        spool: the folder that this client's spool is in; None while there is none.
    """

    accepted: int
    found: int
    queued: int
    spooled: int
    stored: int
    superseded: int
    refused: int
    dropped: int
    queued_bytes: int
    spooled_bytes: int
    connected: bool
    last_error: str | None
    spool: Path | None


class MetricsClient:
    """Sends frames of one or more ranks of a run over one connection.

    ``send`` copies the frame into a bounded queue and returns; it never waits for network or disk. Two threads that all
    clients of the process share do the rest: frames go to the server as soon as it takes them, to the spool folder when
    it does not for a while, and from there to the server later, the oldest first. What a process leaves in the folder,
    killed or not, the next one that is given the same folder sends, under the session it belongs to.

    When the spool is full its oldest file is given up; when memory is full because the disk does not keep up either,
    the oldest waiting frame is. Both are counted, warned of, and reported to the server in a later frame of the rank.

    A forked child must not use its parent's client: its methods raise ``MetricsError`` there, and nothing of the
    parent's is disturbed. It may make one of its own only if its parent has made none before the fork, as gRPC does not
    survive one.

    Args:
        address: "host:port" of the server.
        run: name of the run.
        started_ns: when the session began, nanoseconds since 1970; the same on all ranks, larger in later sessions.
        world_size: ranks that send a frame of each iteration.
        spool: folder for frames that cannot be sent; may be shared, each live client uses a subfolder of its own. On a
            local disk, preferably.
        token: bearer token.
        certificate: PEM file of the root certificate; turns TLS on.
        software: what sends, for people.
        queue_bytes: that frames in memory take up at most.
        spool_bytes: that the spool takes up at most.
        warn: gets warnings, on a thread of the client's; None: they are logged as ``steptron_metrics.client``.
        tuning: times and sizes.

    Raises:
        MetricsError: an argument is none that a server could take. That nobody answers is no error.
    """

    def __init__(
        self,
        address: str,
        run: str,
        started_ns: int,
        world_size: int,
        *,
        spool: Path,
        token: str | None = None,
        certificate: Path | None = None,
        software: str = "",
        queue_bytes: int = 64 << 20,
        spool_bytes: int = 1 << 30,
        warn: Callable[[str], None] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        _check(address, run, started_ns, world_size, token, queue_bytes, spool_bytes)
        self._process = os.getpid()
        self._world_size = world_size
        self._spool_folder = Path(spool)
        self._spool_bytes = spool_bytes
        self._chunk_bytes = min(CHUNK_BYTES, queue_bytes // 2)
        self._tuning = tuning or Tuning()
        self._server = Server(address, token, _read(certificate))
        session = messages.Session(run=run, started_ns=started_ns, world_size=world_size)
        self._hello: bytes = messages.Hello(protocol=VERSION, session=session, client=software[:200]).SerializeToString(
            deterministic=True
        )
        self._reports = Reports(warn, self._tuning.warn_every)
        self._outbox = Outbox(queue_bytes)
        self._background = background.shared()
        self._requests: dict[int, None] = {}
        self._new_requests: list[Request] = []
        self._requests_lock = threading.Lock()
        self._spool: Spool | None = None
        self._looked_for_spool = False
        self._spool_retry = 0.0
        self._warned_dropped = 0
        self._look = asyncio.Event()
        self._stopping = False
        self._closed = False
        self._close_lock = threading.Lock()
        self._line = self._new_line(self._hello, takes_new=True)
        self._earlier: Line | None = None
        self._sending_earlier: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._background.loop.call_soon_threadsafe(self._start)
        _open.add(self)

    # The trainer's side.

    def describe(self, series: Sequence[Series]) -> Layout:
        """What frames carry; made once and given to ``send`` with each.

        Raises:
            MetricsError: the server would refuse it; the message names the series and the field.
        """
        try:
            return Layout.of(series)
        except (ValueError, TypeError) as error:
            raise MetricsError(f"description: {error}") from error

    def send(
        self,
        rank: int,
        iteration: int,
        layout: Layout,
        values: np.ndarray | bytes | bytearray | memoryview,
        *,
        ended_ns: int,
        seconds: float,
        consumed_tokens: int,
        events: Sequence[Event] = (),
    ) -> None:
        """Takes what a rank measured in an iteration; to be called once for each, also without values. Never waits.

        Args:
            rank: 0 to ``world_size - 1``.
            iteration: from 1.
            layout: of the values.
            values: float32 [layout.size] (an array of any shape with so many), or their bytes, little-endian; copied.
            ended_ns: when the iteration ended, nanoseconds since 1970.
            seconds: how long it took.
            consumed_tokens: by the run, this iteration included.
            events: what happened beside; kinds longer than 32 characters and details longer than 1000 are cut.

        Raises:
            MetricsError: an argument does not fit, the client is closed, or this is a forked child. Never because of
                the server or the disk.
        """
        if os.getpid() != self._process or self._closed:
            self._check_open()
        if not 0 <= rank < self._world_size:
            raise MetricsError(f"rank {rank}: expected 0 to {self._world_size - 1}")
        content = _bytes_of(values)
        if len(content) != 4 * layout.size:
            raise MetricsError(
                f"{len(content)} bytes of values, the layout has {layout.size} of float32: {4 * layout.size} bytes"
            )
        try:
            body = frame_body(rank, iteration, layout, content, ended_ns, seconds, consumed_tokens, events)
        except (ValueError, TypeError) as error:
            raise MetricsError(f"frame of rank {rank}, iteration {iteration}: {error}") from error
        if self._outbox.put(Pending(rank, layout, body, time.monotonic())):
            self._background.loop.call_soon_threadsafe(self._wake)

    def requests(self) -> list[Request]:
        """What the server has asked for since the last call; each request is handed out once."""
        self._check_process()
        with self._requests_lock:
            new, self._new_requests = self._new_requests, []
        return new

    def status(self) -> ClientStatus:
        """How things stand; does not wait."""
        self._check_process()
        counts, spool = self._outbox.counts(), self._spool
        return ClientStatus(
            accepted=counts.accepted,
            found=counts.found,
            queued=counts.queued,
            spooled=counts.spooled,
            stored=counts.stored,
            superseded=counts.superseded,
            refused=counts.refused,
            dropped=counts.dropped,
            queued_bytes=self._outbox.bytes,
            spooled_bytes=spool.num_bytes if spool else 0,
            connected=self._line.connected,
            last_error=self._reports.last_error,
            spool=spool.folder if spool else None,
        )

    def close(self, timeout: float = 5.0) -> ClientStatus:
        """Sends what is left for up to ``timeout`` seconds, unless there is no connection, and has the rest spooled.

        Waits a few seconds more at most for a disk that hangs. May be called again.
        """
        self._check_process()
        with self._close_lock:
            if not self._closed:
                self._closed = True
                ended = asyncio.run_coroutine_threadsafe(self._end(timeout), self._background.loop)
                try:
                    ended.result(timeout + 4 * self._tuning.disk)
                except concurrent.futures.TimeoutError:
                    self._reports.error(
                        "close",
                        f"metrics client of {self._server.address}: its threads have not ended within "
                        f"{timeout + 4 * self._tuning.disk:g} s; {self._outbox.counts().queued} frames may be lost",
                    )
        return self.status()

    def __enter__(self) -> MetricsClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._check_process()
        raise MetricsError("the metrics client is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise MetricsError(
                f"the metrics client of process {self._process} cannot be used in its forked child {os.getpid()}"
            )

    # The event loop's side.

    def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._line.run())]

    def _wake(self) -> None:
        self._background.loop.call_later(self._tuning.linger, self._line.wake)
        if self._outbox.pressed:
            self._look.set()

    def _new_line(self, hello: bytes, takes_new: bool) -> Line:
        return Line(
            self._server,
            self._tuning,
            hello,
            self._outbox,
            takes_new,
            self._background,
            lambda: self._spool,
            self._reports,
            self._take_requests,
        )

    def _take_requests(self, requests: Sequence[Any]) -> None:
        for request in requests:
            if request.kind == messages.CHECKPOINT and request.number not in self._requests:
                self._requests[request.number] = None
                if len(self._requests) > REMEMBERED_REQUESTS:
                    del self._requests[next(iter(self._requests))]
                with self._requests_lock:
                    self._new_requests.append(Request(request.number, "checkpoint", request.reason))

    async def _keep(self) -> None:
        """Moves frames that wait too long to the spool, and says what had to be dropped."""
        while not self._stopping:
            self._look.clear()
            try:
                await self._open_spool()
                await self._spool_due(time.monotonic() - self._tuning.spool_after)
                self._warn_dropped()
            except Exception:
                # Whatever it is, the trainer goes on, and so does sending.
                logger.exception("spooling to %s failed", self._spool_folder)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tuning.look_every):
                    await self._look.wait()

    async def _open_spool(self) -> None:
        now = time.monotonic()
        if self._spool is not None or now < self._spool_retry:
            return
        self._spool_retry = now + SPOOL_RETRY_SECONDS
        tuning = self._tuning
        try:
            self._spool = await self._background.on_disk(
                Spool, self._spool_folder, self._spool_bytes, tuning.segment_bytes, tuning.min_free_bytes, self._outbox
            )
        except SpoolError as error:
            self._reports.error(
                "spool", f"{error}; frames that cannot be sent stay in memory, then the oldest are dropped"
            )
            return
        finally:
            self._looked_for_spool = True
        if any(hello != self._hello for hello in self._spool.sessions()):
            self._sending_earlier = asyncio.create_task(self._send_earlier(self._spool))
            self._tasks.append(self._sending_earlier)
        self._line.wake()

    async def _send_earlier(self, spool: Spool) -> None:
        for hello in spool.sessions():
            if hello != self._hello:
                self._earlier = self._new_line(hello, takes_new=False)
                await self._earlier.run()

    async def _spool_due(self, before: float) -> None:
        spool = self._spool
        if spool is None:
            return
        written = False
        while True:
            frames = self._line.take_due(before, self._chunk_bytes) or self._outbox.take_due(before, self._chunk_bytes)
            if not frames:
                break
            try:
                done = await self._background.on_disk(spool.append, self._hello, frames)
            except SpoolError as error:
                self._outbox.put_back(frames)
                self._reports.error("spool", f"{error}; frames stay in memory, then the oldest are dropped")
                break
            written = True
            self._outbox.put_back(frames[done:])
        await self._background.on_disk(spool.report)
        while spool.damage:
            self._reports.error("damage", spool.damage.pop())
        if written:
            self._line.wake()

    def _warn_dropped(self, always: bool = False) -> None:
        dropped = self._outbox.counts().dropped
        if dropped > self._warned_dropped and self._reports.warn(
            "dropped",
            f"metrics for {self._server.address}: {dropped - self._warned_dropped} frames dropped, {dropped} in all: "
            f"neither the server nor the spool {self._spool_folder} has taken them",
            always,
        ):
            self._warned_dropped = dropped

    # The end.

    async def _end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._line.hurry()
        if self._earlier:
            self._earlier.hurry()
        while time.monotonic() < deadline and not self._flushed():
            await asyncio.sleep(0.005)
        keeper, *lines = self._tasks
        for task in lines:
            task.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
        self._stopping = True
        self._look.set()
        try:
            async with asyncio.timeout(2 * self._tuning.disk):
                await keeper
                await self._spool_due(math.inf)
                self._drop_rest()
                if self._spool is not None:
                    await self._background.on_disk(self._spool.close)
        except TimeoutError:
            self._reports.error(
                "disk", f"spool {self._spool_folder}: the disk has not answered within {2 * self._tuning.disk:g} s"
            )
        self._drop_rest()
        self._warn_dropped(always=True)
        _open.discard(self)

    def _drop_rest(self) -> None:
        for waiting in (self._line, self._outbox):
            self._outbox.dropped(waiting.take_due(math.inf, sys.maxsize))

    def _flushed(self) -> bool:
        if not self._looked_for_spool:
            return False
        counts = self._outbox.counts()
        if self._line.hopeless or not counts.queued + counts.spooled:
            return True
        earlier, sending = self._earlier, self._sending_earlier
        # Its task may not have come to run yet.
        earlier_is_done = sending is None or sending.done() or (earlier is not None and earlier.hopeless)
        return not counts.queued and self._line.finished and earlier_is_done


def _check(
    address: str, run: str, started_ns: int, world_size: int, token: str | None, queue_bytes: int, spool_bytes: int
) -> None:
    match = ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65_536:
        raise MetricsError(f"address {address!r}: expected host:port, such as metrics.example.com:7077 or [::1]:7077")
    if not RUN_NAME.fullmatch(run):
        raise MetricsError(f"run {run!r}: expected a name of {RUN_NAME.pattern}")
    if not 0 < started_ns < 1 << 64:
        raise MetricsError(f"started_ns {started_ns}: expected nanoseconds since 1970")
    if not 0 < world_size < 1 << 32:
        raise MetricsError(f"world_size {world_size}: expected at least 1")
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise MetricsError("token: expected printable ASCII without spaces")
    if queue_bytes < 1 or spool_bytes < 1:
        raise MetricsError(f"queue_bytes {queue_bytes}, spool_bytes {spool_bytes}: expected positive numbers")


def _read(certificate: Path | None) -> bytes | None:
    if certificate is None:
        return None
    try:
        return read_certificate(certificate)
    except (OSError, ValueError) as error:
        raise MetricsError(f"certificate {certificate}: {error}") from error


def _bytes_of(values: np.ndarray | bytes | bytearray | memoryview) -> memoryview:
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f" or values.dtype.itemsize != 4:
            raise MetricsError(f"values of type {values.dtype}: expected float32")
        return np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data
    return memoryview(values).cast("B")


_open: weakref.WeakSet[MetricsClient] = weakref.WeakSet()


def _close_all(process: int = os.getpid()) -> None:
    if os.getpid() == process:
        for client in list(_open):
            with contextlib.suppress(MetricsError):
                client.close(timeout=1.0)


def _forget_all() -> None:
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)
