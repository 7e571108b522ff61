"""From ``send`` to a server, with all that can go wrong on the way."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from steptron_metrics.client import Event, Series
from steptron_metrics.errors import MetricsError
from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import Limits, parse
from tests.metrics_server.client.conftest import (
    SERIES,
    SESSION,
    MakeClient,
    assert_whole,
    check,
    send,
    values,
)
from tests.metrics_server.client.fake_server import FakeServer, Store, wait_for


def test_frames_arrive_with_everything_that_was_given(store: Store, make_client: MakeClient) -> None:
    with FakeServer(store) as server:
        client = make_client(server.address, software="tests 1", token="secret")
        send(client, 5, 7, (Event("skipped", "the norm was infinite"), Event("k" * 40, "d\0" * 2000)))
        status = check(client.close())
    assert (status.accepted, status.stored, status.dropped, status.last_error) == (1, 1, 0, None)
    [hello] = store.hellos
    assert (hello.protocol, hello.client) == (1, "tests 1")
    assert (hello.session.run, hello.session.started_ns, hello.session.world_size) == ("run-a", SESSION, 64)
    assert store.metadata[0]["authorization"] == "Bearer secret"
    frame = store.frames["run-a", SESSION, 5, 7]
    assert (frame.rank, frame.iteration, frame.ended_ns, frame.seconds, frame.consumed_tokens, frame.dropped) == (
        *(5, 7, SESSION + 7, 0.5, 7 * 4096),
        0,
    )
    assert parse(frame.description, Limits()) == SERIES
    assert [event.kind for event in frame.events] == ["skipped", "k" * 32]
    assert frame.events[0].detail == "the norm was infinite"
    assert frame.events[1].detail == "d\ufffd" * 500


@pytest.mark.parametrize("order", ["<f4", ">f4"])
def test_values_go_as_little_endian_float32_whatever_the_array_is(
    store: Store, make_client: MakeClient, order: str
) -> None:
    array = np.arange(12, dtype=order).reshape(3, 4)
    with FakeServer(store) as server:
        client = make_client(server.address)
        layout = client.describe([Series("a", 0, 0, 4, 3)])
        for iteration, given in enumerate((array, np.asfortranarray(array), memoryview(np.arange(12, dtype="<f4"))), 1):
            client.send(0, iteration, layout, given, ended_ns=1, seconds=0, consumed_tokens=0)
        transposed = np.arange(12, dtype=order).reshape(4, 3).T
        client.send(0, 4, layout, transposed, ended_ns=1, seconds=0, consumed_tokens=0)
        check(client.close())
    for iteration in (1, 2, 3):
        assert store.frames["run-a", SESSION, 0, iteration].values == b"".join(
            int.to_bytes(bits, 4, "little") for bits in np.arange(12, dtype=np.float32).view(np.uint32).tolist()
        )
    np.testing.assert_array_equal(store.values(("run-a", SESSION, 0, 4)), transposed.ravel())


def test_what_is_sent_is_what_was_there_at_the_time(store: Store, make_client: MakeClient) -> None:
    """The caller may reuse its array."""
    with FakeServer(store) as server:
        client = make_client(server.address)
        layout = client.describe([Series("a", 0, 0, 4)])
        array = np.zeros(4, np.float32)
        for iteration in range(1, 21):
            array[:] = iteration
            client.send(0, iteration, layout, array, ended_ns=1, seconds=0, consumed_tokens=0)
        array[:] = -1
        client.close()
    assert all(set(store.values(key)) == {key[3]} for key in store.frames)
    assert len(store.frames) == 20


def test_the_limits_of_the_server_are_kept_to(store: Store, make_client: MakeClient) -> None:
    """The store checks them."""
    with FakeServer(store, limits=(5, 400, 1200)) as server:
        client = make_client(server.address)
        for iteration in range(1, 51):
            for rank in range(4):
                send(client, rank, iteration)
        big = client.describe([Series("a", 0, 0, 101)])
        client.send(0, 51, big, np.zeros(101, np.float32), ended_ns=1, seconds=0, consumed_tokens=0)
        status = check(client.close())
    assert_whole(store, 4, 50)
    assert status.refused == 1
    assert status.last_error is not None and "400 bytes a frame" in status.last_error
    assert len(store.sizes) >= 200 / 5


def test_many_frames_share_a_message(store: Store, make_client: MakeClient) -> None:
    with FakeServer(store) as server:
        client = make_client(server.address, tuning={"linger": 0.1, "heartbeat": 10.0})
        wait_for(lambda: client.status().connected, "the connection")
        for rank in range(64):
            send(client, rank, 1)
        client.close()
        assert len(store.sizes) == 1
    assert_whole(store, 64, 1)


def test_several_layouts_over_one_connection(store: Store, make_client: MakeClient) -> None:
    """The store checks that each description came before or with its frames."""
    with FakeServer(store, limits=(3, 4 << 20, 16 << 20)) as server:
        client = make_client(server.address)
        layouts = [client.describe([Series("a", layer, 0, 1 + layer)]) for layer in range(7)]
        for iteration in range(1, 31):
            layout = layouts[iteration % 7]
            client.send(0, iteration, layout, bytes(4 * layout.size), ended_ns=1, seconds=0, consumed_tokens=0)
        assert check(client.close()).stored == 30
    assert len(store.frames) == 30


def test_answers_that_are_lost_after_storing_double_nothing(store: Store, make_client: MakeClient) -> None:
    turn = iter(range(1000))
    with FakeServer(store, decide=lambda _: "lose" if next(turn) in (0, 2, 3) else None) as server:
        client = make_client(server.address)
        for iteration in range(1, 31):
            send(client, 0, iteration)
            if iteration % 10 == 0:
                wait_for(lambda seen=iteration: client.status().stored >= seen - 9, "some to be stored")
        status = check(client.close(10))
    assert_whole(store, 1, 30)
    assert store.again > 0
    assert (status.stored, status.dropped) == (30, 0)


def test_a_server_that_dies_and_comes_back_gets_everything(store: Store, make_client: MakeClient) -> None:
    server = FakeServer(store)
    client = make_client(server.address)
    for iteration in range(1, 61):
        for rank in range(4):
            send(client, rank, iteration)
        if iteration in (5, 28):
            wait_for(lambda: client.status().connected, "the connection")
        if iteration in (10, 30):
            server.stop()
            wait_for(lambda: not client.status().connected, "the client to notice")
        if iteration == 25:
            wait_for(lambda: client.status().spooled > 0, "frames to be spooled")
        if iteration in (25, 45):
            server = FakeServer(store, server.port)
    status = check(client.close(10))
    server.stop()
    assert_whole(store, 4, 60)
    assert (status.stored, status.dropped, status.spooled, status.queued) == (240, 0, 0, 0)
    assert status.last_error is not None and client._server.address in status.last_error


def test_later_means_later_and_the_spool_takes_what_waits(store: Store, make_client: MakeClient) -> None:
    full = threading.Event()
    full.set()

    def decide(_: Any) -> Any:
        return messages.Answer(result=messages.LATER, reason="the disk is full") if full.is_set() else None

    with FakeServer(store, decide=decide) as server:
        client = make_client(server.address)
        for iteration in range(1, 41):
            send(client, 1, iteration)
        wait_for(lambda: client.status().spooled == 40, "all to be spooled")
        status = client.status()
        assert status.connected and status.stored == 0
        assert status.last_error is not None and "the disk is full" in status.last_error
        full.clear()
        wait_for(lambda: client.status().stored == 40, "all to be stored")
        check(client.close())
    assert [key[3] for key in store.arrived] == list(range(1, 41)), "oldest first"
    assert {key[2:] for key in store.frames} == {(1, i) for i in range(1, 41)}


def test_refused_frames_are_counted_and_not_sent_again(store: Store, make_client: MakeClient, tmp_path: Path) -> None:
    warnings: list[str] = []
    seen: list[tuple[int, int]] = []

    def decide(message: Any) -> Any:
        seen.extend((frame.rank, frame.iteration) for frame in message.frames)
        if any(frame.iteration == 2 for frame in message.frames):
            return messages.Answer(result=messages.REFUSED, reason="iteration 2 is not liked")
        odd = [index for index, frame in enumerate(message.frames) if frame.rank % 2]
        answer = messages.Answer(result=messages.STORED)
        for index in odd:
            answer.refusals.add(index=index, reason="rank is odd")
        return answer

    with FakeServer(store, decide=decide) as server:
        client = make_client(server.address, warn=warnings.append, tuning={"linger": 0.05})
        for iteration in (1, 2, 3):
            for rank in range(8):
                send(client, rank, iteration)
            wait_for(lambda: client.status().queued == 0, "answers")
        status = check(client.close())
    assert (status.stored, status.refused, status.dropped) == (8, 16, 0)
    assert {key[2:] for key in store.frames} == {(rank, i) for rank in (0, 2, 4, 6) for i in (1, 3)}
    assert len(seen) == len(set(seen)) == 24
    assert any("iteration 2 is not liked" in warning for warning in warnings)
    assert any("rank is odd" in warning for warning in warnings)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff",
        b"",
        messages.ToClient(answer=messages.Answer(number=99, result=messages.STORED)).SerializeToString(),
        messages.ToClient(answer=messages.Answer(number=1, result=17)).SerializeToString(),
        messages.ToClient(welcome=messages.Welcome(max_frames=1)).SerializeToString(),
    ],
)
def test_nonsense_for_an_answer_loses_nothing(store: Store, make_client: MakeClient, nonsense: bytes) -> None:
    turn = iter(range(1000))
    with FakeServer(store, decide=lambda _: nonsense if next(turn) < 2 else None) as server:
        client = make_client(server.address)
        for iteration in range(1, 11):
            send(client, 0, iteration)
        wait_for(lambda: client.status().stored == 10, "all to be stored")
        assert server.address in str(check(client.close()).last_error)
    assert_whole(store, 1, 10)


def test_nonsense_for_a_welcome_loses_nothing(store: Store, make_client: MakeClient) -> None:
    welcomes = iter([b"\xff", b"", messages.ToClient(welcome=messages.Welcome()).SerializeToString()])
    with FakeServer(store, greet=lambda _: next(welcomes, None)) as server:
        client = make_client(server.address)
        send(client, 0, 1)
        wait_for(lambda: client.status().stored == 1, "the frame")
    assert_whole(store, 1, 1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "this server speaks version 2"),
        (grpc.StatusCode.UNAUTHENTICATED, "the token is unknown"),
        (grpc.StatusCode.INVALID_ARGUMENT, "the name of the run is taken"),
    ],
)
def test_a_refused_hello_is_told_and_the_spool_takes_the_frames(
    store: Store, make_client: MakeClient, code: grpc.StatusCode, reason: str
) -> None:
    warnings: list[str] = []
    refuse = threading.Event()
    refuse.set()
    with FakeServer(store, greet=lambda _: (code, reason) if refuse.is_set() else None) as server:
        client = make_client(server.address, warn=warnings.append, tuning={"warn_every": 60.0})
        for iteration in range(1, 11):
            send(client, 0, iteration)
        wait_for(lambda: client.status().spooled == 10 and len(store.hellos) >= 3, "the spool and some tries")
        status = client.status()
        assert not status.connected
        assert status.last_error == f"metrics server {server.address} refuses: {reason}"
        assert warnings == [status.last_error], "one warning, not one a try"
        refuse.clear()
        wait_for(lambda: client.status().stored == 10, "all to be stored")
    assert_whole(store, 1, 10)


def test_a_hello_that_is_refused_is_retried_slowly(store: Store, make_client: MakeClient) -> None:
    with FakeServer(store, greet=lambda _: (grpc.StatusCode.UNAUTHENTICATED, "no")) as server:
        client = make_client(server.address, tuning={"refused_retry": 60.0})
        wait_for(lambda: client.status().last_error is not None, "the refusal")
        assert not threading.Event().wait(0.4)
        assert len(store.hellos) == 1
        client.close()


def test_something_else_that_speaks_grpc_is_told(store: Store, make_client: MakeClient) -> None:
    server = grpc.server(None)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = make_client(f"127.0.0.1:{port}")
    wait_for(lambda: "Method not found" in str(client.status().last_error), "the error")
    server.stop(0).wait(5)


def test_a_silent_server_is_noticed_and_named(store: Store, make_client: MakeClient) -> None:
    turn = iter(range(1000))
    with FakeServer(store, decide=lambda _: "silent" if next(turn) == 0 else None) as server:
        client = make_client(server.address, tuning={"answer": 0.3})
        send(client, 0, 1)
        wait_for(lambda: client.status().stored == 1, "the frame over another connection")
        assert client.status().last_error == f"metrics server {server.address} has not answered a message for 0.3 s"
    assert_whole(store, 1, 1)


def test_an_idle_connection_notices_that_the_server_is_dead(store: Store, make_client: MakeClient) -> None:
    dead = threading.Event()
    with FakeServer(store, decide=lambda _: "silent" if dead.is_set() else None) as server:
        client = make_client(server.address, tuning={"answer": 0.2, "heartbeat": 0.1})
        wait_for(lambda: client.status().connected, "the connection")
        dead.set()
        wait_for(lambda: "has not answered" in str(client.status().last_error), "the client to notice")
        dead.clear()
        send(client, 0, 1)
        wait_for(lambda: client.status().stored == 1, "the frame")


def test_requests_are_handed_out_once(store: Store, make_client: MakeClient) -> None:
    def decide(_: Any) -> Any:
        answer = messages.Answer(result=messages.STORED)
        for number in (3, 4):
            answer.requests.add(number=number, kind=messages.CHECKPOINT, reason=f"because {number}")
        answer.requests.add(number=9, kind=77, reason="of a later version")
        return answer

    with FakeServer(store, decide=decide) as server:
        client = make_client(server.address)
        send(client, 0, 1)
        wait_for(lambda: client.status().stored == 1, "the frame")
        got = client.requests()
        assert [(one.number, one.kind, one.reason) for one in got] == [
            (3, "checkpoint", "because 3"),
            (4, "checkpoint", "because 4"),
        ]
        send(client, 0, 2)
        wait_for(lambda: client.status().stored == 2, "the frame")
        assert client.requests() == []


def test_many_clients_of_one_process(store: Store, make_client: MakeClient, tmp_path: Path) -> None:
    with FakeServer(store) as server:
        clients = [make_client(server.address, spool=tmp_path / "shared") for _ in range(12)]
        for iteration in range(1, 6):
            for number, client in enumerate(clients):
                for rank in range(4):
                    send(client, 4 * number + rank, iteration)
        statuses = [check(client.close()) for client in clients]
    assert_whole(store, 48, 5)
    assert len({status.spool for status in statuses}) == 12


def test_tls_and_the_wrong_certificate(store: Store, make_client: MakeClient, tmp_path: Path) -> None:
    key, certificate = self_signed("localhost", tmp_path / "right")
    _, other = self_signed("localhost", tmp_path / "other")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    with FakeServer(store, credentials=credentials) as server:
        address = f"localhost:{server.port}"
        wrong = make_client(address, certificate=other, spool=tmp_path / "a")
        send(wrong, 1, 1)
        client = make_client(address, certificate=certificate, token="t", spool=tmp_path / "b")
        send(client, 0, 1)
        assert check(client.close()).stored == 1
        wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in str(wrong.status().last_error), "the error")
        assert check(wrong.close(0)).stored == 0
    assert_whole(store, 1, 1)


def self_signed(name: str, folder: Path) -> tuple[Path, Path]:
    import subprocess

    folder.mkdir()
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [
            *command.split(),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"),
            *("-keyout", folder / "key.pem", "-out", folder / "certificate.pem"),
        ],
        check=True,
        capture_output=True,
        timeout=20,
    )
    return folder / "key.pem", folder / "certificate.pem"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": "somewhere"}, "address 'somewhere': expected host:port"),
        ({"address": "host:70000"}, "address"),
        ({"run": "../x"}, r"run '\.\./x'"),
        ({"world_size": 0}, "world_size 0"),
        ({"started_ns": 0}, "started_ns 0"),
        ({"token": "a b"}, "token"),
        ({"certificate": Path("/nowhere.pem")}, "certificate /nowhere.pem"),
        ({"queue_bytes": 0}, "queue_bytes 0"),
    ],
)
def test_impossible_settings_are_refused(make_client: MakeClient, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        make_client(change.pop("address", "127.0.0.1:1"), **change)


def test_impossible_frames_are_refused(make_client: MakeClient, free_address: str) -> None:
    client = make_client(free_address)
    layout = client.describe(SERIES)

    def try_(message: str, rank: int = 0, iteration: int = 1, given: Any = None, **change: Any) -> None:
        rest = {"ended_ns": 1, "seconds": 0.5, "consumed_tokens": 1, **change}
        with pytest.raises(MetricsError, match=message):
            client.send(rank, iteration, layout, values(0, 1) if given is None else given, **rest)

    try_("rank 64: expected 0 to 63", rank=64)
    try_("rank -1", rank=-1)
    try_("iteration 0", iteration=0)
    try_("81 of float32: 324 bytes", given=np.zeros(80, np.float32))
    try_("float64: expected float32", given=np.zeros(81))
    try_("int32: expected float32", given=np.zeros(81, np.int32))
    try_("320 bytes", given=bytes(320))
    try_("seconds nan", seconds=float("nan"))
    try_("seconds -1", seconds=-1.0)
    try_("iteration 1: ", ended_ns=-5)
    try_("iteration 1: ", consumed_tokens=1 << 64)
    try_("events", events=[Event("", "no kind")])
    try_("events", events=[Event("k", "too many")] * 65)
    with pytest.raises(MetricsError, match="series 0: metric 'Loss'"):
        client.describe([Series("Loss")])
    with pytest.raises(MetricsError, match="series 1: a of layer 0, item 0 twice"):
        client.describe([Series("a", 0), Series("a", 0)])
    assert client.status().accepted == 0
    client.close(0)
    with pytest.raises(MetricsError, match="closed"):
        send(client, 0, 1)


def test_a_thread_that_has_used_asyncio_can_open_a_client(tmp_path: Path) -> None:
    """Which leaves the thread without an event loop, for which gRPC looks."""
    program = (
        "import asyncio, sys, pathlib\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "from steptron_metrics.client import MetricsClient\n"
        "with MetricsClient('127.0.0.1:1', 'a', 1, 1, spool=pathlib.Path(sys.argv[1])): pass\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
