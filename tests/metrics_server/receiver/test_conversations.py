"""What a receiver takes, what it refuses, and with which words."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from steptron_metrics.journal.retention import delete_run
from steptron_metrics.journal.tail import Tail
from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import Series, serialize
from steptron_metrics.results import Event
from tests.metrics_server.journal.frames import content_of, everything
from tests.metrics_server.receiver.process import (
    DESCRIPTION,
    Conversation,
    Receiver,
    channel,
    files,
    frame,
    frames,
    hello,
    names,
    receiver,
    settings,
    values_of,
)


@pytest.fixture(scope="module")
def through(shared: Receiver) -> Iterator[grpc.Channel]:
    with channel(shared.port) as one:
        yield one


def refused(conversation: Conversation, content: bytes) -> grpc.RpcError:
    conversation.send(content)
    with pytest.raises(grpc.RpcError) as raised:
        conversation.receive()
    return raised.value


def test_frames_are_in_the_journal_once_they_are_stored(shared: Receiver, through: grpc.Channel) -> None:
    conversation = Conversation(through)
    welcome = conversation.greet("stored", world_size=4, session_ns=17)
    assert (welcome.max_frames, welcome.max_frame_bytes, welcome.max_message_bytes) == (256, 1 << 20, 4 << 20)
    tail = Tail(shared.settings.journal)
    events = [messages.Event(kind="skipped", detail="gradient norm inf")]
    answer = conversation.ask(frames(1, frame(0, 1, events=events), frame(3, 1, description=b"")))
    # The second has the id of an empty description, and yet values.
    assert (answer.number, answer.result, len(answer.refusals)) == (1, messages.STORED, 1)
    answer = conversation.ask(frames(5, frame(3, 1), frame(2, 1, dropped=7)))
    assert (answer.number, answer.result, len(answer.refusals)) == (5, messages.STORED, 0)
    notices = [notice for notice in tail.poll() if notice.run == "stored"]
    assert [(n.rank, n.iteration, n.session_ns, n.world_size) for n in notices] == [(r, 1, 17, 4) for r in (0, 3, 2)]
    assert [content_of(notice) for notice in notices] == [values_of(rank, 1) for rank in (0, 3, 2)]
    assert notices[0].events == (Event("skipped", "gradient norm inf"),) and notices[1].events == ()
    assert (notices[2].dropped, notices[2].seconds, notices[2].ended_ns) == (7, 1.5, 10**18 + 1)
    assert tail.description(notices[0]) == DESCRIPTION
    conversation.end()


def test_a_description_is_sent_once_and_may_be_empty(shared: Receiver, through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("once")
    later = frame(1, 2)
    later.ClearField("description")
    assert "has not come over this connection" in conversation.ask(frames(1, later)).refusals[0].reason
    empty = messages.Frame(rank=2, iteration=2, description_id=messages.checksum(b""), checksum=messages.checksum(b""))
    answer = conversation.ask(frames(2, frame(0, 2), later, empty))
    assert answer.result == messages.STORED and not answer.refusals
    notices = [notice for notice in everything(shared.settings.journal) if notice.run == "once"]
    assert sorted(notice.length for notice in notices) == [0, 204, 204]
    assert [content_of(notice) for notice in notices if not notice.length] == [b""]
    conversation.end()


def test_a_heartbeat_is_answered(through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("heartbeat")
    answer = conversation.ask(frames(9))
    assert (answer.number, answer.result) == (9, messages.STORED)
    conversation.end()


HELLOS = [
    (b"\xff\xff\xff", "INVALID_ARGUMENT", "no message of this protocol"),
    (b"", "INVALID_ARGUMENT", "must be a Hello"),
    (frames(1, frame()), "INVALID_ARGUMENT", "must be a Hello"),
    (hello(protocol=2), "FAILED_PRECONDITION", "speaks version 2, this server version 1"),
    (hello(protocol=0), "FAILED_PRECONDITION", "version 0"),
    *[
        (hello(run=name), "INVALID_ARGUMENT", "no name of a run")
        for name in ("", ".", "..", "../x", "a/b", "/etc", "-a", ".deleted-a", "a\n", "a\0", "ä", "a b", "x" * 129)
    ],
    (hello(world_size=0), "INVALID_ARGUMENT", "world_size: 0, expected 1 to 65536"),
    (hello(world_size=65_537), "INVALID_ARGUMENT", "world_size: 65537"),
    (hello(session_ns=0), "INVALID_ARGUMENT", "started_ns: 0"),
    (
        hello(session_ns=time.time_ns() + 10**15),
        "INVALID_ARGUMENT",
        "60 s ahead of the server's clock, which says 2",
    ),
    (hello(session_ns=2**64 - 1), "INVALID_ARGUMENT", "started_ns: 18446744073709551615"),
]


@pytest.mark.parametrize(("content", "code", "reason"), HELLOS, ids=[str(index) for index in range(len(HELLOS))])
def test_a_wrong_hello_is_refused(
    shared: Receiver, through: grpc.Channel, content: bytes, code: str, reason: str
) -> None:
    before = files(shared.settings.journal)
    error: Any = refused(Conversation(through), content)
    assert error.code() is grpc.StatusCode[code]
    assert reason in error.details()
    assert files(shared.settings.journal) == before


def test_names_at_the_limit_are_taken(through: grpc.Channel) -> None:
    for name in ("x" * 128, "a..b", "0", "a.-_"):
        conversation = Conversation(through)
        conversation.greet(name)
        assert conversation.ask(frames(1, frame())).result == messages.STORED
        conversation.end()


def test_connections_of_a_session_agree_on_its_size(through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("size", world_size=8)
    error: Any = refused(Conversation(through), hello("size", world_size=9))
    assert (
        error.code() is grpc.StatusCode.INVALID_ARGUMENT
        and "other connections of this session say 8" in error.details()
    )
    other = Conversation(through)
    other.greet("size", world_size=9, session_ns=2)
    conversation.end()
    other.end()


def test_a_second_hello_is_answered_as_refused(through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("twice")
    answer = conversation.ask(hello("twice"))
    assert answer.result == messages.REFUSED and "only Frames" in answer.reason
    assert conversation.ask(frames(2, frame())).result == messages.STORED
    conversation.end()


def long(count: int) -> bytes:
    return serialize([Series("moe.tokens", count=count)])


BAD = [
    (frame(8, 1), "rank 8: the session has ranks 0 to 7"),
    (frame(2**32 - 1, 1), "rank 4294967295"),
    (frame(1, 0), "iteration 0: expected 1 to 2^53"),
    (frame(1, 2**53), "iteration 9007199254740992: expected 1 to 2^53 - 1"),
    (frame(seconds=math.nan), "seconds nan"),
    (frame(seconds=math.inf), "seconds inf"),
    (frame(seconds=-1), "seconds -1.0"),
    (frame(ended_ns=2**63), "ended_ns 9223372036854775808: expected less than 2^63"),
    (frame(consumed_tokens=2**64 - 1), "consumed_tokens"),
    (frame(dropped=2**63), "dropped"),
    (frame(checksum=1), "checksum: not the XXH3"),
    (frame(values=b"\0" * 200), "values: 200 bytes, by the description there are 204"),
    (frame(values=b"\0" * 205), "values: 205 bytes"),
    (frame(values=b""), "values: 0 bytes"),
    (frame(values=bytes(4 * 300_000), description=long(300_000)), "values: 1200000 bytes, at most 1048576"),
    (frame(description_id=5), "description_id 0000000000000005 is not the XXH3"),
    (frame(description=b"\xff"), "the description is no protobuf message"),
    (frame(description=serialize([Series("Upper")])), "series 0: metric 'Upper'"),
    (frame(description=serialize([Series("a", layer=4096)])), "series 0: layer 4096"),
    (frame(description=serialize([Series("a"), Series("a")])), "series 1: a of layer -1, item 0 twice"),
    (
        frame(description=serialize([Series("a.b", 0, 4, 3), Series("a"), Series("a.b", 0, 0, 5)])),
        "series 2: a.b of layer 0, item 4 twice (also in series 0)",
    ),
    (
        frame(description=serialize([Series("a", layer, 2**20 - 1) for layer in range(5)])),
        "5242880 items in all metrics and layers together, each counted up to its largest; at most 2097152",
    ),
    (frame(description=serialize([Series("a", first=2**32 - 1, count=2**32 - 1)])), "series 0: items"),
    (frame(events=[messages.Event(kind="", detail="x")]), "event kind: 0 characters"),
    (frame(events=[messages.Event(kind="k" * 33)]), "event kind: 33 characters"),
    (frame(events=[messages.Event(kind="k", detail="d" * 1001)]), "event detail: 1001 characters"),
    (frame(events=[messages.Event(kind="k", detail="a\0b")]), "NUL"),
    (frame(events=[messages.Event(kind="k")] * 65), "events: 65"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_frame_is_refused_alone(shared: Receiver, through: grpc.Channel, bad: Any, reason: str) -> None:
    conversation = Conversation(through)
    run = "bad"
    conversation.greet(run)
    tail = Tail(shared.settings.journal)
    while tail.poll():
        pass
    answer = conversation.ask(frames(1, frame(1, 1), bad, frame(2, 1)))
    assert (answer.number, answer.result) == (1, messages.STORED)
    ((index, why),) = names(answer.refusals)
    assert index == 1 and reason in why
    notices = tail.poll()
    assert [notice.rank for notice in notices] == [1, 2]
    assert [content_of(notice) for notice in notices] == [values_of(1, 1), values_of(2, 1)]
    conversation.end()


def test_a_message_with_too_many_frames_or_bytes_is_refused_whole(through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("whole")
    answer = conversation.ask(frames(3, *[frame(1, i + 1) for i in range(257)]))
    assert (answer.number, answer.result) == (3, messages.REFUSED) and "257 frames, at most 256" in answer.reason
    answer = conversation.ask(frames(4, *[frame(1, 1, values=bytes(1 << 20)) for _ in range(4)]))
    assert answer.result == messages.REFUSED and "at most 4194304 are taken" in answer.reason
    assert conversation.ask(frames(5, frame())).result == messages.STORED
    error: Any = refused(conversation, frames(6, *[frame(values=bytes(1 << 20)) for _ in range(6)]))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # by gRPC, before it has taken it


def test_nothing_is_unpacked(shared: Receiver) -> None:
    """A message of 60 MB that is small on the wire."""
    with channel(shared.port) as one:
        conversation = Conversation(one, compression=grpc.Compression.Gzip)
        conversation.send(hello("bomb") + bytes([0x22, 0x80, 0x8E, 0xCE, 0x1C]) + bytes(60_000_000))
        with pytest.raises(grpc.RpcError) as raised:
            conversation.receive()
        error: Any = raised.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "compressed ones are not taken" in error.details()
    with open(f"/proc/{shared.pid}/status") as status:
        (peak,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak < 250_000


def test_requests_go_to_connections_of_rank_0(shared: Receiver, through: grpc.Channel) -> None:
    folder = shared.settings.requests
    folder.mkdir(exist_ok=True)
    path = folder / "asked.json"
    path.write_text(json.dumps({"requests": [{"number": 4, "kind": "checkpoint", "reason": "layer 44, expert 17"}]}))
    first, second = Conversation(through), Conversation(through)
    first.greet("asked")
    second.greet("asked")
    answer = first.ask(frames(1, frame(0, 1)))
    assert [(r.number, r.kind, r.reason) for r in answer.requests] == [(4, messages.CHECKPOINT, "layer 44, expert 17")]
    assert not second.ask(frames(1, frame(1, 1))).requests
    assert len(first.ask(frames(2)).requests) == 1  # again, also without frames
    path.write_text("{")
    time.sleep(1.05)
    assert not first.ask(frames(3)).requests
    first.end()
    second.end()


def test_a_deleted_run_begins_anew_under_its_connections(shared: Receiver, through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("deleted")
    assert conversation.ask(frames(1, frame(1, 1))).result == messages.STORED
    delete_run(shared.settings.journal, "deleted")
    later = frame(1, 2)
    later.ClearField("description")
    assert conversation.ask(frames(2, later)).result == messages.STORED
    notices = [notice for notice in everything(shared.settings.journal) if notice.run == "deleted"]
    assert [notice.iteration for notice in notices] == [2] and content_of(notices[0]) == values_of(1, 2)
    assert Tail(shared.settings.journal).description(notices[0]) == DESCRIPTION
    conversation.end()


def test_bytes_that_are_no_grpc_do_not_disturb(shared: Receiver, through: grpc.Channel) -> None:
    conversation = Conversation(through)
    conversation.greet("raw")
    for content in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000,
    ):
        with socket.create_connection(("127.0.0.1", shared.port), timeout=5) as raw:
            raw.sendall(content)
    assert conversation.ask(frames(1, frame())).result == messages.STORED
    conversation.end()


def test_counters(tmp_path: Path) -> None:
    with receiver(settings(tmp_path)) as one, channel(one.port) as through:
        conversation = Conversation(through)
        conversation.greet()
        conversation.ask(frames(1, frame(1, 1), frame(9, 1), frame(2, 1)))
        refused(Conversation(through), hello(protocol=9))
        status = one.wait_for(messages=1)  # written once a second
        assert (status["pid"], status["number"], status["port"]) == (one.pid, 0, one.port)
        assert (status["frames"], status["bytes"], status["refused"], status["later"]) == (2, 2 * 204, 1, 0)
        assert (status["connections"], status["connected"], status["rejected"], status["commits"]) == (1, 2, 1, 1)
        conversation.end()


def test_the_number_of_runs_is_limited(shared: Receiver, through: grpc.Channel) -> None:
    """The last of this file: it uses up the shared receiver's runs."""
    error: Any = None
    for number in range(41):
        conversation = Conversation(through)
        try:
            conversation.greet(f"many-{number}")
            conversation.end()
        except grpc.RpcError as raised:
            error = raised
            break
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "at most 40 are taken" in error.details()
    conversation = Conversation(through)
    conversation.greet("many-0")  # there already
    conversation.end()
    assert len(list(shared.settings.journal.iterdir())) == 40
