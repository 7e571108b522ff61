"""Sessions of a run: resumed ones, those that are in each other's way, and clocks that are wrong; limits of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from steptron_metrics.journal.retention import delete_run
from steptron_metrics.journal.tail import Tail
from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import Combination, Folding, Limits, Series, serialize
from tests.metrics_server.receiver.process import (
    Conversation,
    Receiver,
    channel,
    frame,
    frames,
    free_port,
    names,
    receiver,
    settings,
)


def stored(answer: Any) -> bool:
    return bool(answer.result == messages.STORED and not answer.refusals)


def test_two_runs_of_a_name_are_told_of_each_other(shared: Receiver) -> None:
    now_ns = time.time_ns()
    with channel(shared.port) as through:
        first, second = Conversation(through), Conversation(through)
        first.greet("twice", session_ns=now_ns)
        for iteration in range(1, 5):
            assert stored(first.ask(frames(iteration, frame(0, iteration))))
        second.greet("twice", session_ns=now_ns + 1)
        assert stored(first.ask(frames(5, frame(0, 5))))  # nothing is in its place yet
        assert stored(second.ask(frames(1, frame(0, 3))))
        answer = first.ask(frames(6, frame(0, 2), frame(0, 6), frame(1, 3)))
        assert answer.result == messages.STORED
        assert [(one.index, one.superseded) for one in answer.refusals] == [(1, True), (2, True)]
        reason = answer.refusals[0].reason
        begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_ns / 1e9))
        for part in (
            "iteration 6",
            f"a later session of run 'twice', begun at {begun}",
            "iteration 3",
            "telemetry.run",
        ):
            assert part in reason
        assert stored(second.ask(frames(2, frame(0, 2))))  # its least iteration may come late
        assert first.ask(frames(7, frame(1, 2))).refusals[0].superseded
        assert shared.wait_for(superseded=3)["refused"] == shared.status()["refused"]
        for conversation in (first, second):
            conversation.end()


def test_what_an_ended_session_has_left_is_taken_up_to_where_it_was_resumed(tmp_path: Path) -> None:
    """By other receivers, and after all of them were killed."""
    port = free_port()
    made = settings(tmp_path)
    with receiver(made, 0, port) as one, channel(one.port) as through:
        conversation = Conversation(through)
        conversation.greet(session_ns=10)
        assert stored(conversation.ask(frames(1, frame(0, 1), frame(0, 5))))
        one.kill()
    with receiver(made, 1, port) as two, channel(two.port) as through:
        resumed = Conversation(through)
        resumed.greet(session_ns=20)
        assert stored(resumed.ask(frames(1, frame(0, 4))))
        with receiver(made, 2) as three, channel(three.port) as elsewhere:
            leftover = Conversation(elsewhere)
            leftover.greet(session_ns=10)
            answer = leftover.ask(frames(1, frame(1, 2), frame(1, 3), frame(1, 4), frame(1, 5)))
            assert [(one.index, one.superseded) for one in answer.refusals] == [(2, True), (3, True)]
            # The later one goes back further, told by the other receiver.
            assert stored(resumed.ask(frames(2, frame(0, 3))))
            assert [one.index for one in leftover.ask(frames(2, frame(2, 2), frame(2, 3))).refusals] == [1]
    found = {(n.session_ns, n.rank, n.iteration) for n in Tail(made.journal).poll()}
    assert found == {(10, 0, 1), (10, 0, 5), (20, 0, 4), (20, 0, 3), (10, 1, 2), (10, 1, 3), (10, 2, 2)}


def test_a_frame_that_is_refused_takes_no_place(shared: Receiver) -> None:
    with channel(shared.port) as through:
        first, second = Conversation(through), Conversation(through)
        first.greet("place", session_ns=1)
        second.greet("place", session_ns=2)
        assert second.ask(frames(1, frame(0, 1, checksum=1), frame(9, 1))).refusals
        assert stored(first.ask(frames(1, frame(0, 7))))


def test_a_clock_that_was_ahead_is_named(shared: Receiver) -> None:
    now_ns = time.time_ns()
    with channel(shared.port) as through:
        far, near, true = (Conversation(through) for _ in range(3))
        with pytest.raises(grpc.RpcError) as raised:
            far.greet("clock", session_ns=now_ns + 3600 * 10**9)
        assert "at most 60 s ahead of the server's clock, which says" in raised.value.details()
        near.greet("clock", session_ns=now_ns + 50 * 10**9)
        assert stored(near.ask(frames(1, frame(0, 1))))
        near.end()
        true.greet("clock", session_ns=now_ns)
        (refusal,) = true.ask(frames(1, frame(0, 5))).refusals
        assert refusal.superseded and "by a clock that was 50." in refusal.reason.replace("49.", "50.")
        true.end()


def test_a_deleted_run_knows_no_earlier_sessions(shared: Receiver) -> None:
    with channel(shared.port) as through:
        earlier, later = Conversation(through), Conversation(through)
        earlier.greet("gone", session_ns=1)
        later.greet("gone", session_ns=2)
        assert stored(later.ask(frames(1, frame(0, 1))))
        assert earlier.ask(frames(1, frame(0, 1))).refusals
        delete_run(shared.settings.journal, "gone")
        assert stored(earlier.ask(frames(2, frame(0, 1))))
        assert stored(later.ask(frames(2, frame(0, 2))))
        assert earlier.ask(frames(3, frame(0, 2))).refusals


def described(series: list[Series], rank: int = 0, iteration: int = 1) -> Any:
    size = sum(one.size for one in series)
    values = np.zeros(size, "<f4").tobytes()
    return frame(rank, iteration, serialize(series), values=values, checksum=messages.checksum(values))


def test_the_series_of_a_run_are_limited_and_other_runs_go_on(tmp_path: Path) -> None:
    limits = Limits(run_series=100, run_metrics=20, total_items=4096)
    with receiver(settings(tmp_path, limits=limits)) as one, channel(one.port) as through:
        conversation, other = Conversation(through), Conversation(through)
        conversation.greet("many", world_size=64)
        other.greet("few")
        for number in range(10):
            series = [Series(f"a.m{number}", layer) for layer in range(12)]
            answer = conversation.ask(frames(number + 1, described(series, iteration=number + 1)))
            assert stored(answer) == (number < 8)
        assert "would have 108 series, counted by metric and layer, at most 100" in answer.refusals[0].reason
        names_only = described([Series(f"b.m{number}") for number in range(13)])
        assert "would have 21 metrics, at most 20" in conversation.ask(frames(20, names_only)).refusals[0].reason
        wide = described([Series("a.m0", 0, 4000, 1)])
        assert "4191 items in all" in conversation.ask(frames(21, wide)).refusals[0].reason
        # Its items are the ranks, whatever it says.
        by_rank = [Series("rank.compute_seconds")]
        assert stored(conversation.ask(frames(22, described(by_rank))))
        assert stored(other.ask(frames(1, described([Series("c.m", 3, 100, 4)]))))
        # What it has described it may go on sending.
        assert stored(conversation.ask(frames(23, described([Series("a.m0", layer) for layer in range(12)], 0, 50))))


def test_ranks_do_not_contradict_each_other(shared: Receiver) -> None:
    with channel(shared.port) as through:
        conversation = Conversation(through)
        conversation.greet("mixed", session_ns=7)
        plain, summed = [Series("b.x", 0, 0, 2)], [Series("b.x", 0, 0, 2, combination=Combination.SUM)]
        folded = [Series("b.x", 0, 0, 2, folding=Folding.MOMENTS)]
        assert stored(conversation.ask(frames(1, described(plain))))
        answer = conversation.ask(frames(2, described(summed, 1), described(folded, 2)))
        ((index, reason),) = names(answer.refusals)  # folded ones are samples, too
        assert index == 0 and "combination SUM, in this session it is SAMPLES already" in reason
        resumed = Conversation(through)
        resumed.greet("mixed", session_ns=8)
        assert stored(resumed.ask(frames(1, described(summed, 1, iteration=9))))


MOMENTS = [Series("train.loss"), Series("moe.tokens", 3, 8, 2, 0, Folding.MOMENTS), Series("a", first=4, count=3)]
GOOD: list[list[float]] = [[4, 0], [10, 0], [30, 0], [1, np.inf], [4, -np.inf]]


def moments(*rows: Any, rank: int = 0) -> Any:
    values = np.concatenate([[1], np.ravel(rows), [1, 2, 3]]).astype("<f4").tobytes()
    return frame(rank, 1, serialize(MOMENTS), values=values, checksum=messages.checksum(values))


def changed(row: int, item: int, to: float) -> list[list[float]]:
    rows = [list(one) for one in GOOD]
    rows[row][item] = to
    return rows


IMPOSSIBLE = [
    (changed(0, 0, -1), "item 8: a count of -1"),
    (changed(0, 1, 1.5), "item 9: a count of 1.5, expected an integer from 0 to 2^24"),
    (changed(0, 0, 3e38), "a count of 3e+38"),
    (changed(0, 0, np.inf), "a count of inf"),
    (changed(2, 0, -1), "item 8: a sum of squares of -1"),
    (changed(3, 0, 5), "moe.tokens of layer 3, item 8: a minimum of 5 and a maximum of 4"),
]


def test_impossible_moments_are_refused_each_for_itself(shared: Receiver) -> None:
    with channel(shared.port) as through:
        conversation = Conversation(through)
        conversation.greet("moments", world_size=64)
        good = moments(*GOOD, rank=60)
        several = [moments(*rows, rank=rank) for rank, (rows, _) in enumerate(IMPOSSIBLE)]
        answer = conversation.ask(frames(1, good, *several, moments(*GOOD, rank=61)))
        refusals = names(answer.refusals)
        assert [index for index, _ in refusals] == [1, 2, 3, 4, 5, 6]
        for (_, why), (_, reason) in zip(refusals, IMPOSSIBLE, strict=True):
            assert reason in why
        # What was not measured, or not finite, is no contradiction: it has to be seen.
        nan = np.full((5, 2), np.nan)
        fine: list[Any] = [nan, changed(3, 0, np.nan), changed(4, 0, np.inf), changed(1, 0, np.nan), np.zeros((5, 2))]
        for number, rows in enumerate(fine):
            assert stored(conversation.ask(frames(number + 2, moments(*rows, rank=number))))
