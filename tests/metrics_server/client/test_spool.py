"""What the disk keeps for later, and what becomes of it when the disk, the process or the bytes go wrong."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptron_metrics.client import MetricsClient, Series
from steptron_metrics.client.frame import Layout, Pending, frame_body
from steptron_metrics.client.outbox import Outbox
from steptron_metrics.client.spool import segment
from steptron_metrics.client.spool.spool import Spool, SpoolError
from steptron_metrics.protocol import messages
from tests.metrics_server.client.conftest import SESSION, MakeClient, assert_whole, check, send
from tests.metrics_server.client.fake_server import FakeServer, Store, wait_for

LAYOUT = Layout.of([Series("a", 0, 0, 64)])


def hello(run: str = "run-a", started_ns: int = SESSION) -> bytes:
    session = messages.Session(run=run, started_ns=started_ns, world_size=64)
    return bytes(messages.Hello(protocol=1, session=session).SerializeToString())


def pending(outbox: Outbox, rank: int, iteration: int, layout: Layout = LAYOUT) -> Pending:
    values = np.full(layout.size, iteration, np.float32)
    frame = Pending(rank, layout, frame_body(rank, iteration, layout, values.view(np.uint8).data, 1, 0.5, 1, ()), 0.0)
    outbox.put(frame)
    return frame


def iterations(frames: list[Pending]) -> list[int]:
    return [messages.Frame.FromString(frame.body).iteration for frame in frames]


def open_spool(root: Path, outbox: Outbox, max_bytes: int = 1 << 20, segment_bytes: int = 1 << 14) -> Spool:
    return Spool(root, max_bytes, segment_bytes, 0, outbox)


def read_all(spool: Spool, session: bytes) -> list[Pending]:
    read: list[Pending] = []
    while some := spool.read(session, 3000):
        read += some
    return read


# Clients.


def test_without_a_server_everything_waits_on_disk_and_the_next_process_sends_it(
    store: Store, make_client: MakeClient, free_address: str
) -> None:
    first = make_client(free_address)
    for iteration in range(1, 21):
        send(first, 2, iteration)
    status = check(first.close(0.1))
    assert (status.spooled, status.queued, status.dropped) == (20, 0, 0)
    with FakeServer(store) as server:
        second = make_client(server.address, started_ns=SESSION + 5)
        send(second, 0, 1)
        status = check(second.close(10))
    assert (status.accepted, status.found, status.stored, status.spooled) == (1, 20, 21, 0)
    assert {key for key in store.frames if key[1] == SESSION} == {("run-a", SESSION, 2, i) for i in range(1, 21)}
    assert_whole(store, 1, 1, SESSION + 5)
    assert status.spool is not None and not list(status.spool.glob("*.frames"))


def test_what_a_resumed_run_has_made_again_is_no_trouble(
    store: Store, make_client: MakeClient, free_address: str
) -> None:
    """Left over in the spool it is not sent in vain for ever, nor warned of; of a run's own frames it is."""

    def decide(message: Any) -> Any:
        answer = messages.Answer(result=messages.STORED)
        for index, frame in enumerate(message.frames):
            if frame.iteration > 10:
                answer.refusals.add(index=index, reason="a later session has begun", superseded=True)
        return answer if answer.refusals else None

    first = make_client(free_address)
    for iteration in range(1, 21):
        send(first, 2, iteration)
    check(first.close(0.1))
    warnings: list[str] = []
    with FakeServer(store, decide=decide) as server:
        second = make_client(server.address, started_ns=SESSION + 5, warn=warnings.append)
        send(second, 0, 1)
        wait_for(lambda: second.status().spooled == 0 and second.status().queued == 0, "all to be answered")
        assert warnings == [] and second.status().last_error is None
        send(second, 0, 11)
        status = check(second.close(10))
    assert (status.found, status.stored, status.superseded, status.refused) == (20, 11, 11, 0)
    assert len(warnings) == 1 and "has no use for 1 frame(s): a later session has begun" in warnings[0]
    assert status.spool is not None and not list(status.spool.glob("*.frames"))


def test_closing_does_not_wait_for_a_server_that_is_gone(make_client: MakeClient, free_address: str) -> None:
    client = make_client(free_address)
    send(client, 0, 1)
    start = time.monotonic()
    assert check(client.close(30.0)).spooled == 1
    assert time.monotonic() - start < 5


def test_closing_in_the_middle_of_a_slow_server_keeps_the_rest(store: Store, make_client: MakeClient) -> None:
    with FakeServer(store, decide=lambda _: time.sleep(0.15), limits=(2, 4 << 20, 16 << 20)) as server:
        client = make_client(server.address)
        for iteration in range(1, 41):
            send(client, 0, iteration)
        status = check(client.close(0.3))
        assert status.spooled > 20 and status.dropped == status.queued == 0
    with FakeServer(store) as server:
        assert check(make_client(server.address).close(10)).found == status.spooled
    assert_whole(store, 1, 40)


def test_two_live_clients_never_use_the_same_files(store: Store, make_client: MakeClient, free_address: str) -> None:
    clients = [make_client(free_address, run=f"run-{number}") for number in range(3)]
    for number, client in enumerate(clients):
        for iteration in range(1, 11):
            send(client, number, iteration)
    wait_for(lambda: all(client.status().spooled == 10 for client in clients), "all to be spooled")
    folders = [client.status().spool for client in clients]
    assert {folder.name for folder in folders if folder} == {"0", "1", "2"}
    for client in clients:
        check(client.close(0))
    with FakeServer(store) as server:
        later = make_client(server.address, run="later")
        wait_for(lambda: later.status().stored == 30, "what they have left")
        assert check(later.close()).found == 30
    assert {(key[0], key[2]) for key in store.frames} == {("run-0", 0), ("run-1", 1), ("run-2", 2)}


def test_what_a_full_spool_gives_up_is_counted_said_and_reported(
    store: Store, make_client: MakeClient, free_address: str
) -> None:
    """The server hears of each dropped frame exactly once, in a frame of the same rank."""
    warnings: list[str] = []
    client = make_client(free_address, spool_bytes=20_000, warn=warnings.append)
    for iteration in range(1, 101):
        for rank in range(3):
            send(client, rank, iteration)
        if iteration % 10 == 0:
            wait_for(lambda: client.status().queued == 0, "the spool")
    status = client.status()
    assert status.spooled_bytes <= 20_000
    assert status.dropped + status.spooled == 300 and status.dropped > 200
    wait_for(lambda: any(f"{status.dropped} in all" in warning for warning in warnings), "the warning")
    port = int(free_address.rpartition(":")[2])
    with FakeServer(store, port):
        wait_for(lambda: client.status().spooled == 0, "the server to get the rest")
        for rank in range(3):
            send(client, rank, 101)
        end = check(client.close(10))
    assert (end.dropped, end.stored) == (status.dropped, 303 - status.dropped)
    assert len(store.frames) == end.stored
    for rank in range(3):
        mine = [frame for key, frame in store.frames.items() if key[2] == rank]
        assert sum(frame.dropped for frame in mine) == 101 - len(mine)
        assert min(frame.iteration for frame in mine) > 50, "the oldest go first"


def test_drops_that_were_not_reported_are_reported_by_the_next_process(
    store: Store, make_client: MakeClient, free_address: str
) -> None:
    client = make_client(free_address, spool_bytes=6_000)
    for iteration in range(1, 101):
        send(client, 7, iteration)
    status = check(client.close(0))
    assert status.dropped > 50
    with FakeServer(store) as server:
        check(make_client(server.address, started_ns=SESSION + 1).close(10))
    assert store.dropped() == status.dropped == 100 - len(store.frames)


def test_closing_at_once_still_sends_what_an_earlier_process_has_left(
    store: Store, make_client: MakeClient, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that sends it comes to run only after the spool has been looked at."""
    client = make_client(free_address)
    for iteration in range(1, 11):
        send(client, 0, iteration)
    assert check(client.close(0)).spooled == 10
    send_earlier = MetricsClient._send_earlier

    async def late(self: MetricsClient, spool: Spool) -> None:
        await asyncio.sleep(0.1)
        await send_earlier(self, spool)

    monkeypatch.setattr(MetricsClient, "_send_earlier", late)
    with FakeServer(store) as server:
        assert check(make_client(server.address, started_ns=SESSION + 1).close(10)).stored == 10
    assert_whole(store, 1, 10)


def test_memory_is_bounded_when_the_disk_does_not_take_frames(
    store: Store, make_client: MakeClient, free_address: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    warnings: list[str] = []
    client = make_client(free_address, spool=tmp_path / "file" / "spool", queue_bytes=50_000, warn=warnings.append)
    for iteration in range(1, 1001):
        send(client, 3, iteration)
        assert client.status().queued_bytes <= 50_000
    status = client.status()
    assert status.spool is None and status.spooled == 0
    assert status.dropped + status.queued == 1000 and 20 < status.queued < 60
    wait_for(lambda: any("Not a directory" in w for w in warnings), "the warning about the disk")
    wait_for(lambda: any(f"{status.dropped} in all" in w for w in warnings), "the warning about the drops")
    with FakeServer(store, int(free_address.rpartition(":")[2])):
        wait_for(lambda: client.status().stored == status.queued, "the rest")
        check(client.close())
    assert {key[3] for key in store.frames} == set(range(1001 - status.queued, 1001)), "the newest"
    assert store.dropped() == status.dropped


def test_a_disk_that_fails_in_the_middle_loses_nothing_that_memory_holds(
    store: Store, make_client: MakeClient, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    write = os.write

    def failing(descriptor: int, content: Any) -> int:
        if full.is_set() and threading.current_thread().name == "metrics-disk":
            write(descriptor, memoryview(content)[: len(content) // 3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(segment.os, "write", failing)
    client = make_client(free_address)
    for iteration in range(1, 31):
        send(client, 0, iteration)
        if iteration == 10:
            wait_for(lambda: client.status().spooled == 10, "the spool")
            full.set()
        if iteration == 20:
            wait_for(lambda: "No space left" in str(client.status().last_error), "the error")
            assert client.status().spooled == 10
            full.clear()
    wait_for(lambda: client.status().spooled == 30, "the spool")
    check(client.close(0))
    with FakeServer(store) as server:
        check(make_client(server.address).close(10))
    assert_whole(store, 1, 30)


def test_a_disk_that_hangs_holds_up_neither_send_nor_the_network(
    store: Store, make_client: MakeClient, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    append = Spool.append
    monkeypatch.setattr(Spool, "append", lambda *arguments: hang.wait(30) and append(*arguments))
    client = make_client(free_address, queue_bytes=20_000, tuning={"disk": 0.2})
    other = make_client(free_address)
    try:
        # When the client's thread looks, all frames are due; the disk must leave room for those that come later.
        client._background.loop.call_soon_threadsafe(time.sleep, 0.5)
        for iteration in range(1, 201):
            send(client, 0, iteration)
        send(other, 1, 1)
        wait_for(lambda: client.status().dropped > 100, "drops")
        with FakeServer(store, int(free_address.rpartition(":")[2])):
            wait_for(lambda: other.status().connected and client.status().connected, "the connections")
            wait_for(lambda: client.status().stored > 0, "what the disk has left over")
            send(other, 1, 2)
            send(client, 0, 201)
            wait_for(lambda: ("run-a", SESSION, 1, 2) in store.frames, "the network")
            wait_for(lambda: ("run-a", SESSION, 0, 201) in store.frames, "the network")
            client.close(0.1)
    finally:
        hang.set()
    other.close(0)


def test_what_a_slow_disk_reads_is_sent_whatever_is_spooled_meanwhile(
    store: Store, make_client: MakeClient, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames sent in vain are looked for while frames before them are read back; neither must be lost."""
    read = Spool.read

    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return read(*arguments)

    monkeypatch.setattr(Spool, "read", slow)
    client = make_client(free_address)
    for iteration in range(1, 11):
        send(client, 0, iteration)
    wait_for(lambda: client.status().spooled == 10, "the spool")
    with FakeServer(store, int(free_address.rpartition(":")[2])):
        wait_for(lambda: client.status().stored == 10, "all to be stored")
        check(client.close())
    assert_whole(store, 1, 10)


# Processes.

CHILD = """
import sys, time
import numpy as np
from steptron_metrics.client import MetricsClient, Tuning
from tests.metrics_server.client.conftest import SESSION, QUICK, send
address, spool, started = sys.argv[1], sys.argv[2], int(sys.argv[3])
from dataclasses import replace
tuning = replace(QUICK, segment_bytes=20_000, spool_after=0.0)
client = MetricsClient(address, "run-a", started, 64, spool=spool, tuning=tuning)
iteration = 0
while True:
    iteration += 1
    send(client, 0, iteration)
    if iteration % 5 == 0:
        print(client.status().spooled, flush=True)
        time.sleep(0.002)
"""


def test_what_a_killed_process_has_spooled_is_delivered(
    store: Store, make_client: MakeClient, free_address: str, tmp_path: Path
) -> None:
    """No server: frames are spooled in order, so that a count of n names the first n of them."""
    spooled = []
    for turn in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, free_address, str(tmp_path / "spool"), str(SESSION + turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        last, start = 0, None
        deadline = random.Random(turn).uniform(0.05, 0.4)
        killer = threading.Timer(20, child.kill)
        killer.start()
        own = 0
        for line in child.stdout:
            own = int(line) - sum(spooled)
            last = max(last, own)
            start = start or (time.monotonic() if own > 0 else None)
            if start and time.monotonic() - start > deadline:
                os.kill(child.pid, signal.SIGKILL)
                break
        rest = child.stdout.read().split("\n")[:-1]
        child.wait(10)
        killer.cancel()
        assert child.returncode == -signal.SIGKILL
        last = max([last, *(int(line) - sum(spooled) for line in rest)])
        assert last > 0
        spooled.append(last)
        # The next child counts what it finds, perhaps more than this one could still say.
        outbox = Outbox(1 << 20)
        spool = Spool(tmp_path / "spool", 1 << 30, 1 << 20, 0, outbox)
        spooled[-1] = outbox.counts().found - sum(spooled[:-1])
        assert spooled[-1] >= last
        spool.close()
    with FakeServer(store) as server:
        client = make_client(server.address, run="later")
        wait_for(lambda: client.status().stored == sum(spooled), "all that they have spooled")
        status = check(client.close())
    assert status.dropped == 0
    for turn, count in enumerate(spooled):
        assert {key[2:] for key in store.frames if key[1] == SESSION + turn} == {(0, i) for i in range(1, count + 1)}


def test_the_end_of_a_process_without_close_spools_and_is_quiet(
    store: Store, make_client: MakeClient, free_address: str, tmp_path: Path
) -> None:
    code = CHILD.split("iteration = 0")[0] + "for i in range(1, 6): send(client, 0, i)\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace("spool_after=0.0", "spool_after=60"),
            free_address,
            tmp_path / "spool",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if "failed to connect" not in line]
    with FakeServer(store) as server:
        assert check(make_client(server.address).close(10)).found == 5


def test_a_forked_child_leaves_its_parents_client_alone(store: Store, tmp_path: Path) -> None:
    """In a process of its own, as the fork of one with many threads is what is to be tried."""
    code = """
import os, sys
from steptron_metrics.client import MetricsClient
from steptron_metrics.errors import MetricsError
from tests.metrics_server.client.conftest import SESSION, QUICK, send
client = MetricsClient(sys.argv[1], "run-a", SESSION, 64, spool=sys.argv[2], tuning=QUICK)
send(client, 0, 1)
while not client.status().spool:
    pass
child = os.fork()
if child == 0:
    for call in (lambda: send(client, 0, 2), client.status, client.requests, client.close):
        try:
            call()
        except MetricsError as error:
            assert "forked child" in str(error)
        else:
            os._exit(3)
    sys.stdin.read()
    sys.exit(0)
send(client, 0, 3)
status = client.close(10)
print(status.stored, flush=True)
os._exit(0)
"""
    with FakeServer(store) as server:
        parent = subprocess.Popen(
            # Python 3.12 warns of every fork of a process with threads.
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, server.address, tmp_path / "spool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == "2\n"
        parent.wait(10)
        # The child lives, and holds none of its parent's locks.
        with (tmp_path / "spool" / "0" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, errors = parent.communicate(timeout=10)
    assert errors == ""
    assert {key[3] for key in store.frames} == {1, 3}


# Files.


def test_frames_come_back_as_they_were_and_in_order(tmp_path: Path) -> None:
    outbox = Outbox(1 << 30)
    spool = open_spool(tmp_path, outbox)
    frames = [pending(outbox, i % 3, i) for i in range(1, 201)]
    frames[4].dropped = 9
    bodies = [frame.body for frame in frames]
    assert spool.append(hello(), frames) == 200
    assert len(list(spool.folder.glob("*.frames"))) > 3
    read = read_all(spool, hello())
    assert [frame.body for frame in read] == bodies
    assert [(frame.rank, frame.layout, frame.dropped) for frame in read] == [
        (i % 3, LAYOUT, 9 if i == 5 else 0) for i in range(1, 201)
    ]
    spool.settle(read[:150])
    spool.settle(read[150:])
    assert not list(spool.folder.glob("*.frames")) and spool.num_bytes == 0
    spool.close()


def test_a_torn_end_costs_only_the_last_frame(tmp_path: Path) -> None:
    """Cut at every byte of the last record."""
    outbox = Outbox(1 << 30)
    spool = open_spool(tmp_path / "a", outbox)
    spool.append(hello(), [pending(outbox, 0, i) for i in (1, 2, 3)])
    spool.close()
    [path] = (tmp_path / "a" / "0").glob("*.frames")
    content = path.read_bytes()
    last = content.rindex(segment.MAGIC)
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        outbox = Outbox(1 << 30)
        spool = open_spool(tmp_path / "a", outbox)
        read = read_all(spool, hello())
        assert iterations(read) == [1, 2]
        assert outbox.counts().dropped == 0 and spool.damage == []
        spool.close()


def test_damage_costs_the_damaged_frame_and_is_counted(tmp_path: Path) -> None:
    """One byte flipped anywhere: all other frames come back unharmed, and the books say how many are gone."""
    outbox = Outbox(1 << 30)
    spool = open_spool(tmp_path / "a", outbox)
    spool.append(hello(), [pending(outbox, i, i) for i in range(1, 7)])
    spool.close()
    [path] = (tmp_path / "a" / "0").glob("*.frames")
    whole = path.read_bytes()
    starts = [one.start - segment.HEADER_BYTES for one in segment.records(whole, 0, len(whole))]
    for position in range(starts[2], starts[7], 7):
        broken = bytearray(whole)
        broken[position] ^= 0x41
        path.write_bytes(broken)
        outbox = Outbox(1 << 30)
        spool = open_spool(tmp_path / "a", outbox)
        read = read_all(spool, hello())
        hit = sum(position >= start for start in starts[2:])
        assert iterations(read) == [i for i in range(1, 7) if i != hit], position
        for frame in read:
            assert (
                messages.checksum(messages.Frame.FromString(frame.body).values)
                == messages.Frame.FromString(frame.body).checksum
            )
        assert outbox.counts().dropped == 1 and len(spool.damage) == 1
        spool.close()


@pytest.mark.parametrize("content", [b"", b"SMF1", bytes(1000), b"SMF1" * 300, os.urandom(500)])
def test_files_that_are_no_segments_are_no_trouble(tmp_path: Path, content: bytes) -> None:
    outbox = Outbox(1 << 30)
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "000000000007.frames").write_bytes(content)
    (folder / "unreported.json").write_bytes(content[:50])
    (folder / "notes.frames").write_text("of somebody")
    spool = open_spool(tmp_path, outbox)
    assert spool.sessions() == [] and outbox.counts().found == 0
    spool.append(hello(), [pending(outbox, 0, 1)])
    assert iterations(read_all(spool, hello())) == [1]
    spool.close()


def test_a_frame_that_is_larger_than_the_spool_is_dropped(tmp_path: Path) -> None:
    outbox = Outbox(1 << 30)
    spool = open_spool(tmp_path, outbox, max_bytes=5000)
    big = Layout.of([Series("a", 0, 0, 2000)])
    small, large = pending(outbox, 1, 1), pending(outbox, 2, 2, big)
    assert spool.append(hello(), [small, large]) == 2
    counts = outbox.counts()
    assert (counts.dropped, counts.spooled, counts.queued) == (1, 1, 0)
    assert outbox.unreported() == {2: 1}
    assert iterations(spool.read(hello(), 1)) == [1], "it takes no other with it"
    spool.close()


def test_what_is_being_sent_is_not_given_up(tmp_path: Path) -> None:
    outbox = Outbox(1 << 30)
    spool = open_spool(tmp_path, outbox, max_bytes=8000, segment_bytes=1000)
    spool.append(hello(), [pending(outbox, 0, i) for i in range(1, 9)])
    reading = spool.read(hello(), 1)
    spool.append(hello(), [pending(outbox, 0, i) for i in range(9, 60)])
    assert reading[0].segment is not None and reading[0].segment.path.exists()
    assert spool.num_bytes <= 8000
    spool.settle(reading)
    rest = read_all(spool, hello())
    counts = outbox.counts()
    assert counts.dropped + len(rest) + len(reading) == 59
    assert outbox.unreported() == {0: counts.dropped}
    spool.close()


def test_the_spool_leaves_room_on_the_disk(tmp_path: Path) -> None:
    outbox = Outbox(1 << 30)
    spool = Spool(tmp_path, 1 << 20, 1 << 14, 1 << 62, outbox)
    with pytest.raises(SpoolError, match="leaves 4611686018427387904 free"):
        spool.append(hello(), [pending(outbox, 0, 1)])
    spool.close()


def test_a_spool_in_use_cannot_be_taken(tmp_path: Path) -> None:
    one = open_spool(tmp_path, Outbox(1))
    two = open_spool(tmp_path, Outbox(1))
    assert (one.folder.name, two.folder.name) == ("0", "1")
    one.close()
    three = open_spool(tmp_path, Outbox(1))
    assert three.folder.name == "0"
    two.close()
    three.close()
