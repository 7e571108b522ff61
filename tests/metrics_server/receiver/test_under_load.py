"""Many connections, kill -9, short disks: what was acknowledged is in the journal, exactly."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from steptron_metrics.journal.retention import prune
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import Series, serialize
from tests.metrics_server.journal.frames import content_of, everything
from tests.metrics_server.receiver.process import (
    METHOD,
    Conversation,
    Receiver,
    channel,
    frame,
    frames,
    free_port,
    hello,
    open_files,
    receiver,
    settings,
    values_of,
)


def large_frame(rank: int, iteration: int, count: int) -> Any:
    """Its description is that of ``count`` values."""
    made = frame(
        rank, iteration, serialize([Series("moe.tokens", count=count)]), values=values_of(rank, iteration, count)
    )
    made.checksum = messages.checksum(made.values)
    return made


class Sender(threading.Thread):
    """Sends iterations of its ranks until the connection breaks; ``acknowledged`` are (rank, iteration)."""

    def __init__(self, port: int, ranks: range, first: int, count: int) -> None:
        super().__init__(daemon=True)
        self._port, self._ranks, self._first, self._count = port, ranks, first, count
        self.acknowledged: list[tuple[int, int]] = []

    def run(self) -> None:
        with channel(self._port) as through, contextlib.suppress(grpc.RpcError, StopIteration):
            conversation = Conversation(through)
            conversation.greet(world_size=64)
            for iteration in range(self._first, self._first + 10_000):
                several = [large_frame(rank, iteration, self._count) for rank in self._ranks]
                if conversation.ask(frames(iteration, *several)).result == messages.STORED:
                    self.acknowledged += [(rank, iteration) for rank in self._ranks]


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    made = settings(tmp_path)
    acknowledged: list[tuple[int, int]] = []
    tail, notices = Tail(made.journal), list[Notice]()
    counts = {range(0, 2): 51, range(2, 6): 3000, range(6, 8): 60_000}
    for attempt, moment in enumerate((0.05, 0.37, 0.61)):
        with receiver(made) as one:
            senders = [Sender(one.port, ranks, 1 + 10_000 * attempt, count) for ranks, count in counts.items()]
            for sender in senders:
                sender.start()
            deadline = time.monotonic() + 10
            while not all(sender.acknowledged for sender in senders) and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(moment)
            one.kill()
            for sender in senders:
                sender.join(10)
                assert sender.acknowledged
                acknowledged += sender.acknowledged
        while new := tail.poll():
            notices += new
    count_of = {rank: count for ranks, count in counts.items() for rank in ranks}
    for announced in (notices, everything(made.journal)):  # by one that was there all the time, and by a new one
        found = {(notice.rank, notice.iteration): notice for notice in announced}
        assert len(found) == len(announced)  # nothing was resent, so nothing is doubled
        assert set(acknowledged) <= found.keys()
        for (rank, iteration), notice in found.items():
            assert content_of(notice) == values_of(rank, iteration, count_of[rank])
    assert tail.damaged == 0


def test_512_connections_over_two_processes_on_one_port(tmp_path: Path) -> None:
    made = settings(tmp_path, max_connections=514)
    port = free_port()
    with receiver(made, 0, port) as first, receiver(made, 1, port) as second:
        asyncio.run(_open_512(made.folder, port, [first, second]))
        assert first.stop() == 0 and second.stop() == 0
    found = {(n.rank, n.iteration): content_of(n) for n in everything(made.journal) if n.run == "many"}
    assert found == {(rank, i): values_of(rank, i) for rank in range(1024) for i in (1, 2)}


async def _open_512(folder: Path, port: int, receivers: list[Receiver]) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(514)]
    calls = [one.stream_stream(METHOD)(timeout=60) for one in channels]

    async def greet(call: Any, run: str = "many") -> None:
        await call.write(hello(run, world_size=1024))
        assert messages.ToClient.FromString(await call.read()).WhichOneof("content") == "welcome"

    await asyncio.gather(*map(greet, calls[:512]))
    # Two that hold up nobody: one does not go on after its Hello, one never reads its answers.
    await greet(calls[512], "slow")
    await greet(calls[513], "deaf")
    for number in range(200):
        await calls[513].write(frames(number, frame(1, number + 1)))

    async def send(index: int, iteration: int) -> None:
        several = [frame(rank, iteration) for rank in (2 * index, 2 * index + 1)]
        await calls[index].write(frames(iteration, *several))
        answer = messages.ToClient.FromString(await calls[index].read()).answer
        assert answer.result == messages.STORED and not answer.refusals

    for iteration in (1, 2):
        async with asyncio.timeout(20):
            await asyncio.gather(*(send(index, iteration) for index in range(512)))
    deadline = time.monotonic() + 5
    while sum(connections := [one.status()["connections"] for one in receivers]) != 514:
        assert time.monotonic() < deadline, connections
        await asyncio.sleep(0.05)
    assert min(connections) > 100  # the kernel spreads them
    assert sum(open_files(one.pid) for one in receivers) > 514
    async with asyncio.timeout(10):  # each process hears of the other's connections within about two seconds
        while True:
            one_more = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            call = one_more.stream_stream(METHOD)(timeout=10)
            try:
                await call.write(hello("many", world_size=1024))
                assert await call.read() is not grpc.aio.EOF
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            refused = call.done() and await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await one_more.close()
            if refused:
                assert "at most 514 are taken" in await call.details()
                break
            await asyncio.sleep(0.2)
    await asyncio.gather(*(one.close() for one in channels))


def test_a_full_journal_puts_clients_off_until_it_is_pruned(tmp_path: Path) -> None:
    """What is done never leads to that, what is not done does."""
    made = settings(tmp_path, journal_bytes=4 << 20)
    with receiver(made) as one, channel(one.port) as through:
        conversation = Conversation(through)
        conversation.greet()
        stored = []
        for iteration in range(1, 100):
            answer = conversation.ask(frames(iteration, large_frame(0, iteration, 50_000)))
            if answer.result == messages.LATER:
                break
            assert answer.result == messages.STORED
            stored.append(iteration)
        assert answer.result == messages.LATER and "not reduced yet, of 4194304" in answer.reason
        assert 10 <= len(stored) <= 20
        prune(made.journal, lambda *_: False, 0, made.journal_bytes)
        time.sleep(1.1)
        assert conversation.ask(frames(200, large_frame(0, 200, 50_000))).result == messages.LATER
        assert conversation.ask(frames(201)).result == messages.STORED  # a heartbeat
        prune(made.journal, lambda run, session, iteration: iteration <= 9, 1, made.journal_bytes)
        deadline = time.monotonic() + 5
        while conversation.ask(frames(202, large_frame(0, 202, 50_000))).result != messages.STORED:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        conversation.end()
        assert one.wait_for(connections=0)["later"] >= 2
    found = {notice.iteration: content_of(notice) for notice in everything(made.journal)}
    assert {i for i in stored if i > 9} | {202} <= found.keys() <= {*stored, 202}
    assert all(content == values_of(0, i, 50_000) for i, content in found.items())


def test_a_journal_full_of_what_is_done_in_open_segments_is_freed(tmp_path: Path) -> None:
    """Many small runs, each with a segment that is not full: these are ended so that they can be pruned."""
    made = settings(tmp_path, journal_bytes=2 << 20)
    put_off = 0
    with receiver(made) as one, channel(one.port) as through:
        deadline = time.monotonic() + 15
        for number in range(60):  # of 48 kB each
            conversation = Conversation(through)
            conversation.greet(f"run-{number}")
            while conversation.ask(frames(1, large_frame(1, 1, 12_000))).result != messages.STORED:
                put_off += 1
                prune(made.journal, lambda *_: True, 0, made.journal_bytes)
                assert time.monotonic() < deadline
                time.sleep(0.1)
            conversation.end()
    assert put_off


def test_a_disk_that_does_not_take_more(tmp_path: Path) -> None:
    """The kernel is told to let the receiver's files grow to 100 kB only: a real error, in the middle of a batch."""
    made = settings(tmp_path)
    with receiver(made) as one, channel(one.port) as through:
        conversation = Conversation(through)
        conversation.greet()
        for iteration in (1, 2, 3):
            assert conversation.ask(frames(iteration, large_frame(0, iteration, 5000))).result == messages.STORED
        limits = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (100_000, limits[1]))
        answer = conversation.ask(frames(4, *(large_frame(rank, 4, 5000) for rank in range(5))))
        assert answer.result == messages.LATER and "File too large" in answer.reason
        answer = conversation.ask(frames(5, large_frame(0, 5, 5000)))
        assert answer.result == messages.LATER  # for a second nothing is tried
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, limits)
        time.sleep(1.05)
        for iteration in (4, 5):
            several = [large_frame(rank, iteration, 5000) for rank in range(5)]
            assert conversation.ask(frames(iteration, *several)).result == messages.STORED
        conversation.end()
    found = {(notice.rank, notice.iteration): content_of(notice) for notice in everything(made.journal)}
    expected = {(0, 1), (0, 2), (0, 3)} | {(rank, iteration) for rank in range(5) for iteration in (4, 5)}
    assert found == {(rank, iteration): values_of(rank, iteration, 5000) for rank, iteration in expected}


def test_too_little_free_space_puts_clients_off(tmp_path: Path) -> None:
    made = settings(tmp_path, min_free_bytes=1 << 60)
    with receiver(made) as one, channel(one.port) as through:
        conversation = Conversation(through)
        conversation.greet()
        answer = conversation.ask(frames(1, frame()))
        assert answer.result == messages.LATER and "1152921504606846976 of which stay free" in answer.reason
        conversation.end()


def test_sigterm_ends_what_is_under_way_with_answers(tmp_path: Path) -> None:
    made = settings(tmp_path)
    with receiver(made) as one:
        senders = [Sender(one.port, range(rank, rank + 1), 1, 2000) for rank in range(4)]
        for sender in senders:
            sender.start()
        with channel(one.port) as through:
            idle = Conversation(through)
            idle.greet(world_size=64)
            time.sleep(0.4)
            began = time.monotonic()
            assert one.stop() == 0
            assert time.monotonic() - began < 4
            with pytest.raises(grpc.RpcError) as raised:
                idle.receive()
            error: Any = raised.value
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        for sender in senders:
            sender.join(10)
        assert one.errors() == ""
    acknowledged = {pair for sender in senders for pair in sender.acknowledged}
    found = {(notice.rank, notice.iteration) for notice in everything(made.journal)}
    assert acknowledged and acknowledged <= found
    assert len(found - acknowledged) <= 4  # written, and the answer did not get through
