"""The gRPC service: conversations with clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from steptron_metrics.access import Access
from steptron_metrics.journal.registry import TooManySessions
from steptron_metrics.protocol import messages
from steptron_metrics.receiver import greeting, wire
from steptron_metrics.receiver.checking import Checker, TooManyDescriptions
from steptron_metrics.receiver.committer import Committer
from steptron_metrics.receiver.counters import Counters
from steptron_metrics.receiver.descriptions import Descriptions, NoRoom
from steptron_metrics.receiver.requests import Requests
from steptron_metrics.receiver.runs import Run, Runs
from steptron_metrics.settings import Settings

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""A client that does not take an answer for so long is let go."""


@dataclass(eq=False)
class _Connection:
    task: asyncio.Task[Any]
    reading: bool = False


class Service:
    """Takes what clients send, answers, and never lets one of them disturb another.

    Args:
        settings: of the server.
        access: the tokens.
        committer: puts frames on the disk.
        requests: for the answers.
        counters: of the process.
        others: open connections of the other receivers.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        committer: Committer,
        requests: Requests,
        counters: Counters,
        others: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._access = access
        self._committer = committer
        self._requests = requests
        self._counters = counters
        self._others = others
        self._descriptions = Descriptions(settings.limits)
        self._runs = Runs(settings, self._descriptions)
        self._connections: set[_Connection] = set()
        self._world_sizes: dict[tuple[str, int], list[int]] = {}  # of open sessions: size, connections
        self._stopping = False
        welcome = messages.Welcome(
            max_frames=settings.max_frames,
            max_frame_bytes=settings.max_frame_bytes,
            max_message_bytes=settings.max_message_bytes,
        )
        self._welcome = messages.ToClient(welcome=welcome).SerializeToString()

    def handler(self) -> grpc.GenericRpcHandler:
        """For a server of grpc.aio; messages stay bytes, since a malformed one is to be answered."""
        method = grpc.stream_stream_rpc_method_handler(self._send)
        return grpc.method_handlers_generic_handler(messages.SERVICE, {messages.METHOD: method})

    async def stop(self, timeout: float) -> None:
        """Ends conversations: those that wait for a commit are answered first."""
        self._stopping = True
        for connection in list(self._connections):
            if connection.reading:
                connection.task.cancel()
        tasks = [connection.task for connection in self._connections]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def _send(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(task)
        self._connections.add(connection)
        self._counters.connections += 1
        self._counters.connected += 1
        session: greeting.Session | None = None
        try:
            try:
                session = await self._greet(connection, context)
                if session is not None:
                    await self._converse(connection, session, context)
            except greeting.Rejected as rejected:
                self._counters.rejected += 1
                await context.abort(rejected.code, rejected.reason)
            except asyncio.CancelledError:
                if not (self._stopping and connection.reading):
                    raise  # the client has gone
                task.uncancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            except grpc.aio.AbortError:
                raise
            except Exception:
                if context.cancelled() or context.done():
                    return  # the connection broke while something was being sent
                log.exception("a conversation failed")
                await context.abort(grpc.StatusCode.INTERNAL, "the server failed at this; its log says more")
        finally:
            self._connections.discard(connection)
            self._counters.connections -= 1
            if session is not None:
                self._leave(session)

    async def _greet(self, connection: _Connection, context: grpc.aio.ServicerContext) -> greeting.Session | None:
        settings = self._settings
        if self._stopping:
            raise greeting.Rejected(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        token = greeting.token_of(context.invocation_metadata())
        greeting.check_token(self._access, token, None)
        connections = self._counters.connections + self._others()
        if connections > settings.max_connections:
            raise greeting.Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the server has {connections - 1} connections, at most {settings.max_connections} are taken",
            )
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                content = await self._read(connection, context)
        except TimeoutError:
            raise greeting.Rejected(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello came within {HELLO_SECONDS:.0f} s"
            ) from None
        if content is None:
            return None
        session = greeting.read_hello(content, settings)
        greeting.check_token(self._access, token, session.run)
        open_session = self._world_sizes.get((session.run, session.started_ns))
        if open_session is not None and open_session[0] != session.world_size:
            raise greeting.Rejected(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"world_size: {session.world_size}, other connections of this session say {open_session[0]}",
            )
        greeting.open_run(settings, session.run, self._access.patterns(token))
        self._enter(session)
        try:
            await context.write(self._welcome)
        except BaseException:
            self._leave(session)
            raise
        return session

    async def _converse(
        self, connection: _Connection, session: greeting.Session, context: grpc.aio.ServicerContext
    ) -> None:
        checker = Checker(
            session.run, session.started_ns, session.world_size, self._settings.max_frame_bytes, self._descriptions
        )
        run = self._runs.open(session.run)
        while True:
            await self._committer.may_read()
            if self._stopping:
                raise greeting.Rejected(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            content = await self._read(connection, context)
            if content is None:
                return
            answer = await self._answer(content, session, run, checker)
            del content
            self._counters.messages += 1
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await context.write(messages.ToClient(answer=answer).SerializeToString())
            except TimeoutError:
                raise greeting.Rejected(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"the client took no answer for {ANSWER_SECONDS:.0f} s"
                ) from None

    async def _read(self, connection: _Connection, context: grpc.aio.ServicerContext) -> bytes | None:
        """The next message; None when the client has ended the conversation."""
        connection.reading = True  # and stays so when this is cancelled
        content = await context.read()
        connection.reading = False
        return None if content is grpc.aio.EOF else content

    async def _answer(self, content: bytes, session: greeting.Session, run: Run, checker: Checker) -> Any:
        if len(content) > self._settings.max_message_bytes:
            return self._refuse(
                0, f"a message of {len(content)} bytes, at most {self._settings.max_message_bytes} are taken"
            )
        try:
            message, values = wire.read(content)
        except DecodeError:
            return self._refuse(0, "no message of this protocol (compressed ones are not taken)")
        if message.WhichOneof("content") != "frames":
            return self._refuse(0, "after the Hello only Frames are expected")
        number, frames = message.frames.number, message.frames.frames
        if len(frames) > self._settings.max_frames:
            return self._refuse(number, f"{len(frames)} frames, at most {self._settings.max_frames} are taken")
        try:
            refused = await checker.learn(frames)  # in any case: clients send a description once over a connection
        except (TooManyDescriptions, NoRoom) as error:
            raise greeting.Rejected(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        later = self._committer.why_not(session.run, len(content)) if frames else None
        if later is not None:
            return self._put_off(number, later)
        try:
            not_admitted = await run.admit(session, checker.used(frames)) if frames else {}
            checked = checker.check(frames, values, refused, not_admitted, run.later(session))
            del message, frames, values, content  # what is kept while it is written is what the entry needs
            if checked.num_frames:
                await run.begin(session, checked.first)
        except OSError as error:
            return self._put_off(number, f"the server cannot write to its disk: {error.strerror or error}")
        except TooManySessions as error:
            raise greeting.Rejected(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        if checked.num_frames:
            later = await self._committer.store(checked.entry)
            if later is not None:
                return self._put_off(number, later)
            self._counters.frames += checked.num_frames
            self._counters.bytes += checked.entry.num_bytes
        answer = messages.Answer(number=number, result=messages.STORED)
        for index, reason, superseded in checked.refusals:
            answer.refusals.add(index=index, reason=reason, superseded=superseded)
            if superseded:
                self._counters.superseded += 1
            else:
                self._counters.refused += 1
        if checker.carries_rank_0:
            answer.requests.extend(self._requests.of(session.run))
        return answer

    def _refuse(self, number: int, reason: str) -> Any:
        self._counters.refused += 1
        return messages.Answer(number=number, result=messages.REFUSED, reason=reason)

    def _put_off(self, number: int, reason: str) -> Any:
        self._counters.later += 1
        return messages.Answer(number=number, result=messages.LATER, reason=reason)

    def _enter(self, session: greeting.Session) -> None:
        self._world_sizes.setdefault((session.run, session.started_ns), [session.world_size, 0])[1] += 1

    def _leave(self, session: greeting.Session) -> None:
        key = (session.run, session.started_ns)
        self._world_sizes[key][1] -= 1
        if not self._world_sizes[key][1]:
            del self._world_sizes[key]
