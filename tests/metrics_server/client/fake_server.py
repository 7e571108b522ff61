"""A server of the protocol in this process, that can be slow, die, come back, refuse and talk nonsense.

It checks what clients send as strictly as the protocol asks, with the protocol's message classes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import xxhash

from steptron_metrics.protocol import messages

Key = tuple[str, int, int, int]
"""Run, session, rank, iteration."""


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s in vain for {what}"
        time.sleep(0.005)


class Store:
    """What servers have acknowledged or stored; outlives them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.frames: dict[Key, Any] = {}
        self.again = 0
        self.sizes: list[int] = []
        self.hellos: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.arrived: list[Key] = []
        self.errors: list[str] = []

    def values(self, key: Key) -> np.ndarray:
        return np.frombuffer(self.frames[key].values, "<f4")

    def dropped(self) -> int:
        return sum(frame.dropped for frame in self.frames.values())


class FakeServer:
    """
    Args:
        store: where frames go.
        port: 0 takes a free one.
        decide: gets the Frames message; returns an Answer in the place of STORED, bytes to send as they are, "die" to
            end the call, "lose" to store and then end the call without an answer, "silent" to store nothing and answer
            nothing (and nothing after it). None: STORED.
        greet: gets the Hello; a status code and reason to refuse it with.
        credentials: TLS.
    """

    def __init__(
        self,
        store: Store,
        port: int = 0,
        decide: Callable[[Any], Any] = lambda frames: None,
        greet: Callable[[Any], tuple[grpc.StatusCode, str] | bytes | None] = lambda hello: None,
        limits: tuple[int, int, int] = (256, 4 << 20, 16 << 20),
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.store, self.decide, self.greet, self.limits = store, decide, greet, limits
        self.server = grpc.server(
            ThreadPoolExecutor(32),
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)),
        )
        handler = grpc.stream_stream_rpc_method_handler(self._send)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(messages.SERVICE, {messages.METHOD: handler}),)
        )
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self.server.add_insecure_port(address)
        else:
            self.port = self.server.add_secure_port(address, credentials)
        assert self.port
        self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        assert self.server.stop(0).wait(10)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _send(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        store = self.store
        hello = messages.ToServer.FromString(next(requests)).hello
        with store.lock:
            store.hellos.append(hello)
            store.metadata.append(dict(context.invocation_metadata()))
        refusal = self.greet(hello)
        if isinstance(refusal, bytes):
            yield refusal
            return
        if refusal:
            context.abort(*refusal)
        frames, frame_bytes, message_bytes = self.limits
        welcome = messages.Welcome(max_frames=frames, max_frame_bytes=frame_bytes, max_message_bytes=message_bytes)
        yield messages.ToClient(welcome=welcome).SerializeToString()
        known: set[int] = set()
        last = 0
        for content in requests:
            message = messages.ToServer.FromString(content).frames
            if message.number <= last or len(message.frames) > frames or len(content) > message_bytes:
                store.errors.append(f"message {message.number}: {len(message.frames)} frames, {len(content)} bytes")
            last = message.number
            decision = self.decide(message)
            if decision == "die":
                context.abort(grpc.StatusCode.UNAVAILABLE, "dies")
            if decision == "silent":
                while context.is_active():
                    time.sleep(0.01)
                return
            if isinstance(decision, bytes):
                yield decision
                continue
            answer = decision if isinstance(decision, messages.Answer) else None
            if answer is None or answer.result == messages.STORED:
                refused = {r.index for r in answer.refusals} if answer is not None else set()
                self._store(hello.session, message, known, refused, len(content))
            if decision == "lose":
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
            if answer is None:
                answer = messages.Answer(result=messages.STORED)
            answer.number = answer.number or message.number
            yield messages.ToClient(answer=answer).SerializeToString()

    def _store(self, session: Any, message: Any, known: set[int], refused: set[int], size: int) -> None:
        store = self.store
        with store.lock:
            store.sizes.append(size)
            for index, frame in enumerate(message.frames):
                if index in refused:
                    continue
                if frame.description:
                    if xxhash.xxh3_64_intdigest(frame.description) != frame.description_id:
                        store.errors.append("description and its id differ")
                    known.add(frame.description_id)
                if frame.description_id not in known:
                    store.errors.append(f"description {frame.description_id:x} was not sent on this connection")
                if xxhash.xxh3_64_intdigest(frame.values) != frame.checksum:
                    store.errors.append("checksum of values")
                key = (session.run, session.started_ns, frame.rank, frame.iteration)
                store.arrived.append(key)
                if key in store.frames:
                    store.again += 1
                    if store.frames[key].values != frame.values:
                        store.errors.append(f"{key} came twice with different values")
                else:
                    store.frames[key] = frame
