"""Sends the frames of one session: connects, keeps to the server's limits, and knows what is unanswered."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from steptron_metrics.client.background import Background
from steptron_metrics.client.frame import FRAME_OVERHEAD, MESSAGE_OVERHEAD, Pending, frames_message
from steptron_metrics.client.outbox import Outbox
from steptron_metrics.client.reports import Reports, logger
from steptron_metrics.client.settings import Tuning
from steptron_metrics.client.spool.spool import Spool, SpoolError
from steptron_metrics.protocol import messages

OPTIONS = (
    # A connection of its own for each client, and reconnecting at our own pace.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Proxies are for the world outside; variables such as http_proxy must not send metrics there.
    ("grpc.enable_http_proxy", 0),
)
REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Ends of a call that trying again soon does not mend."""
MAX_REASON = 500


class Lost(Exception):
    """The connection ended or is of no use; the message names the server and what happened."""


class Refused(Lost):
    """The server does not want this client."""


@dataclass(frozen=True)
class Server:
    """Where frames go.

    Attributes:
        address: "host:port".
        token: bearer token, if the server asks for one.
        certificate: PEM root certificate; None: no TLS.
    """

    address: str
    token: str | None
    certificate: bytes | None

    def channel(self) -> grpc.aio.Channel:
        if self.certificate is None:
            return grpc.aio.insecure_channel(self.address, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(root_certificates=self.certificate)
        return grpc.aio.secure_channel(self.address, credentials, options=OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


@dataclass
class Message:
    """Sent and not answered."""

    number: int
    frames: list[Pending]
    size: int
    sent: float


class Line:
    """The frames of one session on their way to the server. Lives in the event loop.

    Args:
        server, tuning: see there.
        hello: serialized ``Hello`` of the session.
        outbox: the books, and where new frames come from.
        takes_new: whether it does take new ones, and thus never ends by itself; otherwise only what is in the spool.
        spool: gives the spool once it is open.
        on_requests: gets the requests of answers.
    """

    def __init__(
        self,
        server: Server,
        tuning: Tuning,
        hello: bytes,
        outbox: Outbox,
        takes_new: bool,
        background: Background,
        spool: Callable[[], Spool | None],
        reports: Reports,
        on_requests: Callable[[Sequence[Any]], None],
    ) -> None:
        self._server = server
        self._tuning = tuning
        self._hello = hello
        self._outbox = outbox
        self._takes_new = takes_new
        self._background = background
        self._spool = spool
        self._reports = reports
        self._on_requests = on_requests
        # Frames that come before all others: read from the spool, or sent in vain.
        self._first: deque[Pending] = deque()
        self._unanswered: deque[Message] = deque()
        self._unanswered_bytes = 0
        self._known: set[int] = set()
        self._changed = asyncio.Event()
        self._later_until = 0.0
        self._later_pause = 0.0
        self._progress = False
        self._welcome: Any = None
        self.connected = False
        self._last_try = asyncio.Event()
        self.hopeless = False

    def hurry(self) -> None:
        """The end is near: a pause ends now, and if the server cannot be had then, the line is ``hopeless``."""
        self._last_try.set()
        self._changed.set()

    def wake(self) -> None:
        """There is something to send."""
        self._changed.set()

    @property
    def finished(self) -> bool:
        """Whether it has nothing to send that it knows of."""
        spool = self._spool()
        unread = spool.unread(self._hello) if spool else 0
        return not (self._first or self._unanswered or unread)

    def take_due(self, before: float, max_bytes: int) -> list[Pending]:
        """Takes back frames sent in vain that are in memory only and older than ``before``, to be spooled, up to a
        number of bytes."""
        due, kept = [], deque[Pending]()
        for frame in self._first:
            if frame.segment is None and frame.since < before and max_bytes > 0:
                due.append(frame)
                max_bytes -= frame.room
            else:
                kept.append(frame)
        self._first = kept
        return due

    async def run(self) -> None:
        """Sends until it is cancelled or, when it takes no new frames, until all are answered."""
        failures = 0
        while True:
            try:
                await self._connection()
                return
            except Lost as lost:
                refused = isinstance(lost, Refused)
                failures = 0 if self._progress else failures + 1
                self._reports.error("refused" if refused else "lost", str(lost))
            except Exception as error:
                # Whatever it is, the trainer goes on, and so does the spool.
                refused, failures = False, failures + 1
                logger.exception("sending to metrics server %s failed", self._server.address)
                self._reports.last_error = f"metrics server {self._server.address}: {error!r}"
            self.hopeless = self._last_try.is_set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(failures, refused)):
                    await (asyncio.Event() if self.hopeless else self._last_try).wait()

    def _pause(self, failures: int, refused: bool) -> float:
        if refused:
            return self._tuning.refused_retry * random.uniform(0.75, 1.25)
        longest = min(self._tuning.first_retry * 2 ** min(failures, 16), self._tuning.last_retry)
        return longest * random.uniform(0.25, 1.0)

    # One connection.

    async def _connection(self) -> None:
        self._progress = False
        self._known.clear()
        reader: asyncio.Task[None] | None = None
        channel = self._server.channel()
        try:
            call = channel.stream_stream(f"/{messages.SERVICE}/{messages.METHOD}")(metadata=self._server.metadata)
            self._welcome = await self._greet(call)
            self.connected = True
            reader = asyncio.create_task(self._read(call))
            reader.add_done_callback(lambda _: self._changed.set())
            await self._send(call, reader)
            reader.cancel()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await call.done_writing()
        except grpc.aio.AioRpcError as error:
            raise self._lost(error.code(), error.details()) from error
        except asyncio.CancelledError:
            # gRPC raises it also where the server has cancelled the call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Lost(f"metrics server {self._server.address} cancelled the connection") from None
        finally:
            self.connected = False
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            while self._unanswered:
                self._first.extend(self._unanswered.popleft().frames)
            self._unanswered_bytes = 0
            await channel.close()

    async def _greet(self, call: Any) -> Any:
        hello = messages.Hello.FromString(self._hello)
        what = f"metrics server {self._server.address} has not answered within {self._tuning.connect:g} s"
        try:
            async with asyncio.timeout(self._tuning.connect):
                with contextlib.suppress(asyncio.InvalidStateError):
                    await call.write(messages.ToServer(hello=hello).SerializeToString())
                content = await call.read()
        except TimeoutError:
            raise Lost(what) from None
        if content is grpc.aio.EOF:
            raise await self._ended(call)
        answer = self._parsed(content)
        welcome = answer.welcome
        if answer.WhichOneof("content") != "welcome" or not (
            welcome.max_frames and welcome.max_frame_bytes and welcome.max_message_bytes
        ):
            raise Lost(f"metrics server {self._server.address} does not answer a Hello with a Welcome of this protocol")
        return welcome

    async def _send(self, call: Any, reader: asyncio.Task[None]) -> None:
        number = 0
        last = time.monotonic()
        while True:
            if reader.done():
                await reader
            self._changed.clear()
            now = time.monotonic()
            if self._unanswered and now - self._unanswered[0].sent > self._tuning.answer:
                raise self._silent("answered a message")
            frames: list[Pending] = []
            if now >= self._later_until and self._room():
                await self._read_ahead()
                frames = self._compose()
            idle = now - last >= self._tuning.heartbeat and not self._unanswered
            if frames or idle:
                number += 1
                await self._write(call, number, frames)
                last = time.monotonic()
                continue
            if not self._takes_new and self.finished:
                return
            await self._wait(now, last)

    async def _write(self, call: Any, number: int, frames: list[Pending]) -> None:
        content = frames_message(number, frames, self._known)
        self._unanswered.append(Message(number, frames, len(content), time.monotonic()))
        self._unanswered_bytes += len(content)
        try:
            async with asyncio.timeout(self._tuning.answer):
                await call.write(content)
        except TimeoutError:
            raise self._silent("taken a message") from None
        except asyncio.InvalidStateError:
            raise await self._ended(call) from None

    async def _wait(self, now: float, last: float) -> None:
        until = last + self._tuning.heartbeat
        if self._unanswered:
            until = self._unanswered[0].sent + self._tuning.answer
        if self._later_until > now:
            until = min(until, self._later_until)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - now, 0) + 0.001):
                await self._changed.wait()

    def _room(self) -> bool:
        return len(self._unanswered) < self._tuning.unanswered and (
            not self._unanswered
            or self._unanswered_bytes < min(2 * self._tuning.message_bytes, self._outbox.max_bytes // 4)
        )

    # What to send next.

    async def _read_ahead(self) -> None:
        spool = self._spool()
        if self._first or spool is None or not spool.unread(self._hello):
            return
        try:
            frames = await self._background.on_disk(spool.read, self._hello, self._tuning.message_bytes)
            self._first.extend(frames)  # what is first may have become another queue meanwhile
        except SpoolError as error:
            self._reports.error("spool", str(error))

    def _compose(self) -> list[Pending]:
        """Takes the frames of the next message, the oldest there are."""
        welcome = self._welcome
        budget = min(welcome.max_message_bytes, self._tuning.message_bytes) - MESSAGE_OVERHEAD
        described = set(self._known)
        count = 0
        refused: list[Pending] = []

        def fits(frame: Pending) -> bool:
            nonlocal budget, count
            size = len(frame.body) + FRAME_OVERHEAD
            if frame.layout.id not in described:
                size += len(frame.layout.content)
            if self._too_large(frame):
                refused.append(frame)
                return True
            if count == welcome.max_frames or (count and size > budget):
                return False
            described.add(frame.layout.id)
            budget -= size
            count += 1
            return True

        frames: list[Pending] = []
        while self._first and fits(self._first[0]):
            frames.append(self._first.popleft())
        spool = self._spool()
        if self._takes_new and not self._first and not (spool and spool.unread(self._hello)):
            frames += self._outbox.take(fits)
        if refused:
            frames = [frame for frame in frames if frame not in refused]
            self._refuse(
                refused,
                f"the server takes {welcome.max_frame_bytes} bytes a frame and "
                f"{welcome.max_message_bytes} bytes a message",
            )
        for frame in frames:
            self._outbox.attach(frame)
        return frames

    def _too_large(self, frame: Pending) -> bool:
        whole = len(frame.body) + len(frame.layout.content) + FRAME_OVERHEAD + MESSAGE_OVERHEAD
        return 4 * frame.layout.size > self._welcome.max_frame_bytes or whole > self._welcome.max_message_bytes

    # Answers.

    async def _read(self, call: Any) -> None:
        while True:
            content = await call.read()
            if content is grpc.aio.EOF:
                raise await self._ended(call)
            answer = self._parsed(content)
            if answer.WhichOneof("content") != "answer":
                raise Lost(f"metrics server {self._server.address} sent something else than an answer")
            self._take(answer.answer)
            self._changed.set()

    def _take(self, answer: Any) -> None:
        # A server that cannot read a message cannot name it: it refuses number 0, in order as ever.
        unread = answer.result == messages.REFUSED and answer.number == 0
        if not self._unanswered or not (unread or self._unanswered[0].number == answer.number):
            expected = self._unanswered[0].number if self._unanswered else "nothing"
            raise Lost(
                f"metrics server {self._server.address} answered message {answer.number}, expected was {expected}"
            )
        if answer.result not in (messages.STORED, messages.LATER, messages.REFUSED):
            raise Lost(f"metrics server {self._server.address} answered with result {answer.result}, which is unknown")
        message = self._unanswered.popleft()
        self._unanswered_bytes -= message.size
        if answer.result == messages.LATER:
            self._later(message, answer.reason)
        elif answer.result == messages.REFUSED:
            self._progress = True
            if message.frames:
                self._refuse(message.frames, answer.reason)
        else:
            self._stored(message, {refusal.index: refusal for refusal in answer.refusals})
        if answer.requests:
            self._on_requests(answer.requests)

    def _stored(self, message: Message, refusals: dict[int, Any]) -> None:
        self._progress = True
        self._later_pause = 0.0
        kept = message.frames
        if refusals:
            kept = [frame for index, frame in enumerate(message.frames) if index not in refusals]
            superseded = []
            for index, frame in enumerate(message.frames):
                if index in refusals:
                    if refusals[index].superseded:
                        superseded.append(frame)
                        reason = refusals[index].reason
                    else:
                        self._refuse([frame], refusals[index].reason)
            if superseded:
                self._supersede(superseded, reason)
        self._known.update(frame.layout.id for frame in kept)
        self._outbox.stored(kept)
        self._settle(kept)

    def _supersede(self, frames: list[Pending], reason: str) -> None:
        self._outbox.superseded(frames)
        self._settle(frames)
        message = (
            f"metrics server {self._server.address} has no use for {len(frames)} frame(s): "
            f"{reason[:MAX_REASON] or 'a later session has made their iterations again'}"
        )
        if self._takes_new:
            self._reports.error("superseded", message)
        else:  # what an earlier process has left, and the run has made again since, is no loss
            logger.info("%s", message)

    def _later(self, message: Message, reason: str) -> None:
        self._first.extend(message.frames)
        now = time.monotonic()
        if now >= self._later_until:
            longest = self._later_pause = min(max(2 * self._later_pause, self._tuning.later), self._tuning.last_later)
            self._later_until = now + longest * random.uniform(0.5, 1.0)
        self._reports.error(
            "later", f"metrics server {self._server.address} asks to wait: {reason[:MAX_REASON] or 'without a reason'}"
        )

    def _refuse(self, frames: list[Pending], reason: str) -> None:
        self._outbox.refused(frames)
        self._settle(frames)
        ranks = sorted({frame.rank for frame in frames})
        names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        self._reports.error(
            "refused frames",
            f"metrics server {self._server.address} refuses {len(frames)} frame(s) of rank {names}: "
            f"{reason[:MAX_REASON] or 'without a reason'}",
        )

    def _settle(self, frames: list[Pending]) -> None:
        spool = self._spool()
        on_disk = [frame for frame in frames if frame.segment is not None]
        if on_disk and spool is not None:
            self._background.later_on_disk(spool.settle, on_disk)

    # Ends.

    def _parsed(self, content: bytes) -> Any:
        try:
            return messages.ToClient.FromString(content)
        except DecodeError:
            raise Lost(f"metrics server {self._server.address} does not speak this protocol") from None

    def _silent(self, what: str) -> Lost:
        return Lost(f"metrics server {self._server.address} has not {what} for {self._tuning.answer:g} s")

    async def _ended(self, call: Any) -> Lost:
        try:
            async with asyncio.timeout(self._tuning.connect):
                return self._lost(await call.code(), await call.details())
        except TimeoutError:
            return self._silent("ended the call")

    def _lost(self, code: Any, details: str | None) -> Lost:
        where = f"metrics server {self._server.address}"
        if code in REFUSALS:
            return Refused(f"{where} refuses: {(details or code.name)[:MAX_REASON]}")
        if code is grpc.StatusCode.OK:
            return Lost(f"{where} ended the connection")
        return Lost(f"{where}: {code.name.lower().replace('_', ' ')}: {(details or 'no details')[:MAX_REASON]}")


def read_certificate(path: Path) -> bytes:
    """A PEM file of root certificates; raises ``OSError``, or ``ValueError`` when there is none in it."""
    content = path.read_bytes()
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ValueError("there is no certificate in it (-----BEGIN CERTIFICATE-----)")
    return content
