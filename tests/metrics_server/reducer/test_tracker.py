from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_metrics.journal.tail import Notice
from steptron_metrics.reducer.job import Job
from steptron_metrics.reducer.spans import Spans
from steptron_metrics.reducer.tracker import Tracker
from steptron_metrics.results import Event

AFTER = 100.0
S1, S2, S3 = 1000, 2000, 3000


def notice(iteration: int, rank: int, *, run: str = "r", session: int = S1, world: int = 4, **other: object) -> Notice:
    defaults: dict[str, object] = {
        "description_id": rank % 2,
        "ended_ns": 10 * iteration + rank,
        "seconds": 1.0 + rank,
        "consumed_tokens": 100 * iteration,
        "dropped": 0,
        "events": (),
        "segment": f"segment-{iteration % 3}",
        "offset": 1000 * iteration + 8 * rank,
        "length": 8,
    }
    return Notice(run=run, session_ns=session, world_size=world, rank=rank, iteration=iteration, **defaults | other)
    # type: ignore[arg-type]


def notices(iterations: Iterable[int], ranks: Iterable[int] = range(4), **other: object) -> list[Notice]:
    ranks = list(ranks)
    return [notice(iteration, rank, **other) for iteration in iterations for rank in ranks]  # type: ignore[arg-type]


def describe(one: Notice) -> bytes:
    return f"description {one.description_id}".encode()


def tracker(stored: Mapping[tuple[int, int], int] | None = None, **other: int) -> Tracker:
    return Tracker(AFTER, describe, lambda run: stored or {}, **other)


def work(of: Tracker, now: float, limit: int = 1000) -> list[tuple[int, int, int]]:
    """Does all jobs that are due at once: session, iteration, ranks."""
    jobs = of.due(now, limit)
    for job in jobs:
        assert of.wants(*job.key)
        of.done(*job.key, len(job.frames))
    return [(job.session_ns, job.iteration, len(job.frames)) for job in jobs]


def test_an_iteration_is_due_once_all_ranks_have_sent() -> None:
    t = tracker()
    t.take(notices([7], [3, 0, 1]), 0)
    assert t.due(AFTER - 1, 9) == []
    assert not t.is_done("r", S1, 7)
    events = (Event("skipped", "overflow"), Event("stage", "2"))
    t.take([notice(7, 2, dropped=3, events=events, seconds=9.0)], 1)
    (job,) = t.due(1, 9)
    assert (job.run, job.session_ns, job.iteration, job.world_size, job.missing) == ("r", S1, 7, 4, ())
    assert (job.ended_ns, job.seconds, job.consumed_tokens, job.dropped, job.events) == (73, 9.0, 700, 3, events)
    assert job.frames["rank"].tolist() == [0, 1, 2, 3]
    assert job.frames["offset"].tolist() == [7000, 7008, 7016, 7024]
    assert job.frames["length"].tolist() == [8, 8, 8, 8]
    assert [job.segments[one] for one in job.frames["segment"]] == ["segment-1"] * 4
    assert [job.descriptions[one] for one in job.frames["description"]] == [b"description 0", b"description 1"] * 2
    assert t.due(AFTER * 9, 9) == []
    assert not t.is_done("r", S1, 7)  # its result is not stored
    t.done("r", S1, 7, 4)
    assert t.is_done("r", S1, 7)
    assert t.num_bytes == 0


def test_the_first_frame_of_a_rank_counts_and_resent_ones_change_nothing() -> None:
    t = tracker()
    t.take([notice(1, 0, offset=11), notice(1, 0, offset=22), *notices([1], [1, 1, 2])], 0)
    assert t.due(0, 9) == []
    t.take(notices([1], [3]), 0)
    (job,) = t.due(0, 9)
    assert job.frames["offset"][0] == 11
    t.take(notices([1]), 0)  # while it is being done
    assert t.due(AFTER * 2, 9) == []
    t.done(*job.key, 4)
    t.take(notices([1]), 0)  # long after
    assert t.due(AFTER * 4, 9) == []
    assert t.is_done("r", S1, 1)
    assert t.ignored == {"duplicate": 10}


def test_a_partial_iteration_names_the_missing_ranks() -> None:
    t = tracker()
    t.take(notices([1], [2]), 10)
    t.take(notices([1], [0]), 60)
    assert t.due(9.9 + AFTER, 9) == []
    (job,) = t.due(10 + AFTER, 9)
    assert job.missing == (1, 3)
    assert job.frames["rank"].tolist() == [0, 2]


def test_late_ranks_complete_a_partial_iteration() -> None:
    t = tracker()
    t.take(notices([1], [0, 1]), 0)
    assert work(t, AFTER) == [(S1, 1, 2)]
    assert t.is_done("r", S1, 1)
    t.take(notices([1], [2]), 150)
    assert not t.is_done("r", S1, 1)
    assert work(t, 160) == []
    t.take(notices([1], [3]), 170)
    assert work(t, 170) == [(S1, 1, 4)]
    assert t.is_done("r", S1, 1)
    assert t.num_bytes == 0


def test_late_ranks_are_waited_for_as_long_again() -> None:
    t = tracker()
    t.take(notices([1], [0, 1]), 0)
    assert work(t, AFTER) == [(S1, 1, 2)]
    assert work(t, 10 * AFTER) == []  # nothing new
    t.take(notices([1], [2]), 1050)
    assert work(t, 1049 + AFTER) == []
    assert work(t, 1050 + AFTER) == [(S1, 1, 3)]
    assert t.is_done("r", S1, 1)


@pytest.mark.parametrize("complete", [False, True])
def test_ranks_that_come_while_a_partial_job_is_out(complete: bool) -> None:
    t = tracker()
    t.take(notices([1], [0, 1]), 0)
    (job,) = t.due(AFTER, 9)
    t.take(notices([1], [2, 3] if complete else [2]), 110)
    assert t.due(110 + AFTER, 9) == []  # the job is still out
    t.done(*job.key, 2)
    assert not t.is_done("r", S1, 1)
    assert work(t, 110 + AFTER) == [(S1, 1, 4 if complete else 3)]


def test_ranks_that_come_while_a_partial_job_is_out_wait_for_the_others() -> None:
    t = tracker()
    t.take(notices([1], [0, 1]), 0)
    (job,) = t.due(AFTER, 9)
    t.take(notices([1], [2]), 110)
    t.done(*job.key, 2)
    assert work(t, 109 + AFTER) == []
    assert work(t, 110 + AFTER) == [(S1, 1, 3)]


def test_a_resumed_run_makes_iterations_again() -> None:
    t = tracker()
    t.take(notices(range(1, 111)), 0)
    assert len(work(t, 0)) == 110
    t.take(notices(range(111, 116), [0, 1]), 1)  # waiting
    t.take(notices([116]), 1)
    (out,) = t.due(1, 9)
    t.take([notice(103, 2, session=S2)], 2)
    t.take([notice(101, 1, session=S2)], 2)
    assert not t.wants(*out.key)
    t.done(*out.key, 4)
    t.take(notices(range(111, 121)), 3)  # what the old session still sends
    assert t.ignored["void"] == 40
    t.take(notices(range(101, 104), session=S2), 3)
    assert work(t, 9 * AFTER) == [(S2, 101, 4), (S2, 102, 4), (S2, 103, 4)]
    for iteration in range(101, 121):
        assert t.is_done("r", S1, iteration)
    assert t.is_done("r", S1, 100)
    assert not t.is_done("r", S2, 104)
    assert t.num_bytes == 0


def test_frames_before_the_resumption_still_count() -> None:
    t = tracker()
    t.take(notices([99, 100], [0, 1, 2]), 0)
    t.take(notices([101], session=S2), 1)
    t.take(notices([99, 100], [3]), 2)
    assert work(t, 2) == [(S1, 99, 4), (S1, 100, 4), (S2, 101, 4)]


def test_an_older_session_that_is_heard_of_later() -> None:
    t = tracker()
    t.take(notices([101], session=S2), 0)
    t.take(notices([100, 101, 102], session=S1), 0)
    t.take(notices([90], session=S3), 0)
    assert work(t, 0) == [(S3, 90, 4)]
    t.take(notices([89], session=S1), 0)
    assert work(t, 0) == [(S1, 89, 4)]
    assert t.is_done("r", S2, 101)


def test_a_restart_takes_up_where_the_store_is() -> None:
    t = tracker({(S1, 1): 4, (S1, 2): 3, (S1, 3): 2})
    t.take(notices([1]), 0)
    t.take(notices([2], [0, 1, 2]), 0)
    t.take(notices([3], [0, 1, 2]), 0)
    t.take(notices([4]), 0)
    assert work(t, 0) == [(S1, 4, 4)]
    assert t.is_done("r", S1, 2)
    assert not t.is_done("r", S1, 3)  # the store has two of its three
    assert work(t, AFTER) == [(S1, 3, 3)]
    t.take(notices([2], [3]), 500)
    assert work(t, 500) == [(S1, 2, 4)]


def test_a_restart_never_makes_a_result_of_fewer_ranks() -> None:
    t = tracker({(S1, 1): 3})
    t.take(notices([1], [3]), 0)  # the segments of the others have been pruned
    assert work(t, AFTER * 5) == []
    assert t.is_done("r", S1, 1)


def test_a_restart_knows_where_later_sessions_begin() -> None:
    t = tracker({(S1, 1): 4, (S1, 100): 4, (S2, 101): 4})
    t.take(notices([101, 102], session=S1), 0)
    assert work(t, AFTER) == []
    assert t.is_done("r", S1, 102)


def test_another_world_size_is_refused() -> None:
    t = tracker()
    t.take([notice(1, 0, world=4), notice(1, 1, world=8), notice(1, 4, world=4), notice(2, 5, world=8)], 0)
    assert t.ignored == {"refused": 3}
    assert t.is_done("r", S1, 2)  # nothing will come of it, so that it may be deleted
    assert not t.is_done("r", S1, 1)
    t.take(notices([1, 2]), 0)
    assert work(t, 0) == [(S1, 1, 4), (S1, 2, 4)]
    t.take(notices([3], range(8), session=S2, world=8), 0)  # another session may have another one
    assert work(t, 0) == [(S2, 3, 8)]


def test_a_rank_that_contradicts_the_others_is_complained_of_once_and_nothing_hangs() -> None:
    t = tracker()
    t.take(notices([1, 2], range(3)) + notices([1, 2], [3], world=8), 0)
    (complaint,) = t.complaints()
    assert (
        "run r: rank 3 says in iteration 1 that 8 ranks send, others of its session (begun at 1000 ns) said 4"
        in complaint
    )
    t.take(notices([3], range(3)) + notices([3], [3], world=8), 1)
    assert t.complaints() == []
    # What the others have sent is stored without it, after the usual time.
    assert work(t, AFTER - 1) == []
    assert work(t, AFTER + 1) == [(S1, 1, 3), (S1, 2, 3), (S1, 3, 3)]
    assert t.is_done("r", S1, 3)


def test_what_is_pending() -> None:
    t = tracker()
    t.take(notices([1], range(4)) + notices([2], range(3)) + notices([7], [0], run="s"), 5.0)
    t.take(notices([3], range(2)), 6.0)
    number, oldest = t.pending(3)
    assert number == 4
    assert sorted(oldest) == [("r", 1, 4, 4, 5.0, ()), ("r", 2, 3, 4, 5.0, (3,)), ("s", 7, 1, 4, 5.0, (1, 2, 3))]
    assert work(t, 6.0) == [(S1, 1, 4)]
    assert t.pending(9)[0] == 3
    assert len(work(t, 5.0 + AFTER)) == 2  # partial results: nothing more of them is pending, until a rank comes late
    assert t.pending(9) == (1, [("r", 3, 2, 4, 6.0, (2, 3))])
    t.take(notices([2], [3]), 200.0)
    assert t.pending(9) == (2, [("r", 2, 4, 4, 5.0, ()), ("r", 3, 2, 4, 6.0, (2, 3))])


def test_a_run_with_large_iterations_does_not_hold_up_others() -> None:
    """Neither by its turns, nor by what is queued up behind it."""
    t = tracker(max_large=3)
    large = {"run": "large", "length": 10 << 20, "world": 1}
    t.take(notices(range(1, 31), [0], **large), 0)
    out = t.due(0, 100)
    assert [job.iteration for job in out] == [1, 2, 3, 4, 5, 6, 7]  # 64 MiB; others may be waiting soon
    t.take(notices(range(1, 41), run="small"), 1)
    assert [job.run for job in t.due(1, 10)] == 10 * ["small"]
    t.done(*out[0].key, 1)
    # What one large iteration takes is thousands of small ones.
    assert [job.run for job in t.due(1, 100)] == ["small"] * 30 + ["large"]
    for job in out[1:]:
        t.done(*job.key, 1)
    assert [job.iteration for job in t.due(2, 100)] == [9, 10, 11, 12, 13, 14]
    t.forget("large")
    t.take(notices([1], [0], **large), 3)
    assert [job.key for job in t.due(3, 100)] == [("large", S1, 1)]


def test_a_few_jobs_of_a_run_may_be_out_however_large_they_are() -> None:
    t = tracker(max_large=3)
    t.take(notices(range(1, 9), [0], length=200 << 20, world=1), 0)
    assert len(t.due(0, 100)) == 3
    assert t.due(0, 100) == []


def test_runs_take_turns_and_the_oldest_iterations_go_first() -> None:
    t = tracker()
    t.take(notices([5, 3, 4, 9], run="a"), 0)
    t.take(notices([2, 1], run="b"), 0)
    t.take(notices([7], run="c"), 0)
    order = [(job.run, job.iteration) for job in t.due(0, 4)]
    assert order == [("a", 3), ("b", 1), ("c", 7), ("a", 4)]
    assert [(job.run, job.iteration) for job in t.due(0, 9)] == [("b", 2), ("a", 5), ("a", 9)]


def test_runs_do_not_mix() -> None:
    t = tracker()
    t.take(notices([1], [0, 1], run="a") + notices([1], [2, 3], run="b"), 0)
    assert work(t, 0) == []
    t.take(notices([1], session=S2, run="a"), 0)
    assert not t.is_done("b", S1, 1)
    assert [job.run for job in t.due(AFTER, 9)] == ["a", "b"]


def test_a_deleted_run_is_forgotten() -> None:
    t = tracker()
    t.take(notices([1]) + notices([2], [0]), 0)
    (job,) = t.due(0, 9)
    t.forget("r")
    assert not t.wants(*job.key)
    t.done(*job.key, 4)
    assert t.num_bytes == 0
    assert not t.is_done("r", S1, 1)
    t.take(notices([1]), 0)
    assert work(t, 0) == [(S1, 1, 4)]


def test_values_that_are_gone() -> None:
    t = tracker()
    t.take(notices([1, 2]), 0)
    first, second = t.due(0, 9)
    t.drop(*first.key)
    assert t.is_done("r", S1, 1)
    t.done(*second.key, 4)
    assert t.num_bytes == 0

    def gone(_: Notice) -> bytes:
        raise KeyError("segment is gone")

    t = Tracker(AFTER, gone, lambda run: {})
    t.take(notices([1]), 0)
    assert t.ignored == {"gone": 4}
    assert t.num_bytes == 0


def test_partial_results_are_closed_when_memory_is_short() -> None:
    t = tracker(max_bytes=40_000)  # of which one run has half
    for iteration in range(1, 200):
        t.take(notices([iteration], [0, 1, 2]), iteration)
    assert t.num_bytes > 20_000
    made = work(t, 150)  # the oldest early, as many as were too many, and those whose time is over
    assert {iteration for _, iteration, _ in made} >= set(range(1, 51))
    t.take(notices([200]), 151)
    assert t.num_bytes < 21_000
    t.take(notices([1], [3]), 152)  # too late: there is a result of three
    assert work(t, 10 * AFTER) == [(S1, i, 4 if i == 200 else 3) for i in range(len(made) + 1, 201)]
    assert t.is_done("r", S1, 1)


def test_what_is_due_holds_back_more_frames_when_memory_is_short() -> None:
    t = tracker(max_bytes=40_000)
    t.take(notices(range(1, 60)), 0)
    assert t.full() == {"r"}
    work(t, 0)
    assert t.full() == frozenset()
    assert t.num_bytes == 0


def test_a_run_that_has_much_waiting_leaves_room_for_others() -> None:
    t = tracker(max_bytes=60_000)
    t.take([*notices(range(1, 60)), *notices(range(1, 200), [0], run="endless")], 0)
    t.take(notices([1], [0, 1], run="small"), 0)
    assert t.full() == {"r", "endless"}
    assert not any(job.run == "small" for job in t.due(AFTER - 1, 99)), "others' want of room is not its own"


def test_what_clients_say_they_dropped_is_bounded() -> None:
    t = tracker()
    t.take([notice(1, rank, dropped=2**63 - 1) for rank in range(4)], 0)
    assert [job.dropped for job in t.due(0, 9)] == [1 << 40]


def test_a_run_with_large_results_has_one_out_at_a_time() -> None:
    t = tracker()
    t.take([*notices(range(1, 9)), *notices(range(1, 9), run="small")], 0)
    t.reduced("r", 40 << 20)
    jobs = t.due(0, 99)
    assert [job.run for job in jobs].count("r") == 1 and len(jobs) == 9
    t.done("r", S1, 1, 4)
    assert [(job.run, job.iteration) for job in t.due(0, 99)] == [("r", 2)]


def test_pending_iterations_are_counted_and_the_oldest_named() -> None:
    t = tracker()
    t.take(notices(range(1, 4)), 0)  # whole
    t.take(notices(range(4, 304), [1, 3]), 5)  # not whole
    (job,) = t.due(5, 1)
    number, oldest = t.pending(5)
    assert number == 303
    assert [(one.iteration, one.since, one.ranks, one.missing) for one in oldest[:3]] == [
        (i, 0, 4, ()) for i in (1, 2, 3)
    ]
    assert {(one.since, one.ranks, one.missing) for one in oldest[3:]} == {(5, 2, (0, 2))}
    t.done(*job.key, 4)
    assert t.pending(5)[0] == 302
    work(t, 5 + AFTER)
    assert t.pending(5) == (0, [])  # partial results wait for nobody


def test_events_of_an_iteration_are_bounded() -> None:
    t = tracker()
    t.take([notice(1, rank, events=(Event("e", str(rank)),) * 700) for rank in (3, 1, 0, 2)], 0)
    (job,) = t.due(0, 9)
    assert len(job.events) == 1000
    assert [one.detail for one in job.events[::350]] == ["1", "3", "3"]


def test_waiting_frames_take_up_little_room() -> None:
    t = tracker()
    ranks = 1024
    tracemalloc.start()
    for iteration in range(20):
        t.take((notice(iteration, rank, world=ranks) for rank in range(ranks - 1)), 0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / (20 * ranks) < 32
    assert 0.6 < t.num_bytes / used < 1.2
    t.take(notices(range(20), [ranks - 1], world=ranks), 0)
    (job, *_) = t.due(0, 20)
    assert len(pickle.dumps(job)) < 30 * ranks


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_every_order_of_frames_and_restarts_ends_with_the_same_store(data: st.DataObject) -> None:
    """Two sessions of two ranks; frames come in any order, some twice, jobs are done at any time, restarts lose all
    but journal and store."""
    sent = notices(range(1, 5), range(2), world=2) + notices(range(3, 6), range(2), session=S2, world=2)
    order = data.draw(st.permutations(sent + sent[::3]))
    store: dict[tuple[int, int], int] = {}
    journal: list[Notice] = []
    t = tracker(store)
    now = 0.0
    out: list[Job] = []
    for one in order:
        journal.append(one)
        t.take([one], now)
        now += data.draw(st.sampled_from([0.0, 30.0, 200.0]))
        action = data.draw(st.sampled_from(["wait", "due", "done", "restart"]))
        if action == "restart":
            t, out = tracker(dict(store)), []
            t.take(journal, now)
        elif action == "due":
            out += t.due(now, 2)
        else:
            out = put(t, store, out) if action == "done" else out
    put(t, store, out)
    for _ in range(3):
        now += 2 * AFTER
        put(t, store, t.due(now, 100))
    held = {key: ranks for key, ranks in store.items() if key[0] == S2 or key[1] < 3}
    assert held == {(S1, 1): 2, (S1, 2): 2, (S2, 3): 2, (S2, 4): 2, (S2, 5): 2}
    assert all(t.is_done(one.run, one.session_ns, one.iteration) for one in sent)
    assert t.num_bytes == 0


def put(t: Tracker, store: dict[tuple[int, int], int], jobs: list[Job]) -> list[Job]:
    for job in jobs:
        if t.wants(*job.key):
            key = (job.session_ns, job.iteration)
            assert len(job.frames) > store.get(key, 0)
            store[key] = len(job.frames)
            t.done(*job.key, len(job.frames))
    return []


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2))))
def test_spans_are_a_dictionary_in_little_room(puts: list[tuple[int, int]]) -> None:
    spans, expected = Spans(), {}
    for key, number in puts:
        spans.put(key, number)
        expected[key] = number
    assert [spans.get(key) for key in range(-1, 14)] == [expected.get(key) for key in range(-1, 14)]
    assert spans.first() == min(expected, default=None)
    changes = sum(key - 1 not in expected or expected[key - 1] != number for key, number in expected.items())
    assert len(spans) == changes


def test_a_long_run_is_one_span() -> None:
    spans = Spans()
    for iteration in np.random.default_rng(0).permutation(3000).tolist():
        spans.put(iteration, 4096)
    assert len(spans) == 1


def test_the_first_ranks_that_are_waited_for_are_named() -> None:
    t = tracker()
    t.take([notice(1, rank, world=100) for rank in range(100) if rank not in (3, 99)], 0.0)
    t.take([notice(2, rank, world=100) for rank in range(5, 100)], 1.0)
    t.take([notice(3, 0, world=100)], 2.0)
    assert [one.missing for one in t.pending(9)[1]] == [(3, 99), (0, 1, 2, 3, 4), tuple(range(1, 11))]
