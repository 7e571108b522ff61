"""The wire format against bytes that nobody should send."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings

from steptron_metrics.protocol import messages
from steptron_metrics.receiver import wire
from tests.metrics_server.journal.frames import content_of, everything
from tests.metrics_server.receiver.process import (
    Conversation,
    Receiver,
    channel,
    files,
    frame,
    frames,
    hello,
    values_of,
)

QUICK = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
GOOD = frames(3, frame(0, 1), frame(1, 1, events=[messages.Event(kind="skipped", detail="x")]), frame(2, 1))
LARGE = frames(3, *(frame(rank, 1, values=values_of(rank, 1, 9000)) for rank in range(3)))
"""With frames that are read without copying."""
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """A valid message with bytes changed, taken out, doubled or cut off."""
    changed = bytearray(content)
    only_set = draw(st.booleans())  # keeps the structure more often
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        # Most of a message is values: half of the changes go to where its structure is.
        if draw(st.booleans()):
            at = min(draw(st.integers(0, 60)), max(len(changed) - 1, 0))
        length = draw(st.integers(1, 12))
        kind = "set" if only_set else draw(st.sampled_from(["set", "insert", "delete", "cut", "double", "huge length"]))
        if kind == "set" and changed:
            changed[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif kind == "delete":
            del changed[at : at + length]
        elif kind == "cut":
            del changed[at:]
        elif kind == "double":
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + 1] = b"\x42" + draw(
                st.sampled_from([b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x07", b"\xff" * 12])
            )
    return bytes(changed)


def anything(valid: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=400), mutated(valid), st.just(valid).map(lambda v: v[: len(v) // 2]))


@pytest.fixture(scope="module")
def through(shared: Receiver) -> Iterator[grpc.Channel]:
    with channel(shared.port) as one:
        neighbour = Conversation(one)
        neighbour.greet("neighbour")
        assert neighbour.ask(GOOD).result == messages.STORED
        neighbour.end()
        yield one


@pytest.fixture
def unharmed(shared: Receiver, through: grpc.Channel) -> Iterator[None]:
    """Other runs are as they were, the process is the same and works, whatever the test has sent."""
    folder = shared.settings.journal / "neighbour"
    before = files(folder)
    assert before
    outside = {path.name for path in shared.settings.folder.iterdir()}
    yield
    assert files(folder) == before
    assert {path.name for path in shared.settings.folder.iterdir()} == outside
    assert {path.name for path in shared.settings.journal.iterdir()} <= {"neighbour", "fuzzed", "run", "after"}
    assert shared.runs()
    conversation = Conversation(through)
    conversation.greet("after")
    assert conversation.ask(GOOD).result == messages.STORED
    conversation.end()


def test_messages(shared: Receiver, through: grpc.Channel, unharmed: None) -> None:
    conversation = Conversation(through)
    conversation.greet("fuzzed")
    results = set()

    @QUICK
    @given(anything(GOOD))
    def send(content: bytes) -> None:
        answer = conversation.ask(content)
        results.add(answer.result)
        assert answer.result in (messages.STORED, messages.REFUSED)
        assert answer.reason or answer.result == messages.STORED
        assert all(refusal.reason for refusal in answer.refusals)

    send()
    conversation.end()
    assert results == {messages.STORED, messages.REFUSED}
    # What was stored of them is what a valid message held: a checksum stood for it.
    valid = {values_of(rank, 1) for rank in range(3)} | {b""}
    stored = [content_of(notice) for notice in everything(shared.settings.journal) if notice.run == "fuzzed"]
    assert stored and set(stored) <= valid


def test_hellos(through: grpc.Channel, unharmed: None) -> None:
    outcomes = set()

    def greet(content: bytes) -> None:
        conversation = Conversation(through)
        conversation.send(content)
        try:
            kind = conversation.receive().WhichOneof("content")
            assert kind == "welcome"
            outcomes.add(kind)
        except grpc.RpcError as raised:
            error: Any = raised
            assert error.code() in REFUSALS and error.details()
            outcomes.add(error.code())
        conversation.end()

    def made(run: str, protocol: int, world_size: int, session_ns: int) -> bytes:
        try:
            return hello(run, world_size, session_ns, protocol)
        except UnicodeEncodeError:
            return b"\x0a\x04\x12\x02\x0a\xff"

    # Names that are good are all "run", so that what is there afterwards can be told.
    names = st.one_of(st.just("run"), st.text(max_size=8).map(lambda text: "../" + text), st.just("a" * 200))
    hellos = st.builds(
        made,
        names,
        st.one_of(st.just(1), st.integers(0, 2**32 - 1)),
        st.one_of(st.just(8), st.integers(0, 2**32 - 1)),
        st.one_of(st.just(1), st.integers(0, 2**64 - 1)),
    )
    cut = st.integers(0, len(hello()) - 1).map(lambda end: hello()[:end])
    QUICK(
        given(st.one_of(hellos, cut, st.binary(max_size=100).filter(lambda content: b"\x0a" not in content)))(greet)
    )()
    assert {"welcome", grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION} <= outcomes


def outcome(content: bytes) -> Any:
    """What the library makes of a message, values apart."""
    message = messages.ToServer.FromString(content)
    values = [bytes(frame.values) for frame in message.frames.frames]
    for one in message.frames.frames:
        one.values = b""
    return message, values


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.one_of(mutated(LARGE), mutated(GOOD), mutated(LARGE[:200] + LARGE[36_000:36_300]), st.binary(max_size=200)))
def test_reading_without_copies_is_reading(content: bytes) -> None:
    try:
        expected = outcome(content)
    except DecodeError:
        with pytest.raises(DecodeError):
            wire.read(content)
        return
    message, values = wire.read(content)
    assert [bytes(one) for one in values] == expected[1]
    for one in message.frames.frames:
        one.values = b""
    assert message == expected[0]


def test_large_frames_are_not_copied() -> None:
    message, values = wire.read(LARGE)
    assert all(isinstance(one, memoryview) and one.obj is LARGE for one in values)
    assert [one.rank for one in message.frames.frames] == [0, 1, 2]
    assert struct.unpack_from("<f", values[1]) == struct.unpack_from("<f", values_of(1, 1, 9000))
