from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptron_metrics.protocol.description import Folding, Limits, Series, parse, serialize
from steptron_metrics.reducer import aggregate
from steptron_metrics.reducer.derived import derive
from steptron_metrics.reducer.job import FRAME, Job
from steptron_metrics.reducer.layout import Layouts
from steptron_metrics.reducer.worker import Gone, perform
from steptron_metrics.reducer.workers import FAILED, Reducers, Vanished
from steptron_metrics.results import Event, Iteration

PATIENCE = 20.0


def descriptions(ranks: int) -> list[tuple[Series, ...]]:
    return [
        (
            Series("moe.output_norm_max", 3, 4 * (rank % 2), 4, 3),
            Series("moe.tokens", 3, 4 * (rank % 2), 4, 0, Folding.MOMENTS),
            Series("rank.compute_seconds"),
        )
        for rank in range(ranks)
    ]


def make_job(
    folder: Path, iteration: int = 1, ranks: int = 6
) -> tuple[Job, list[tuple[tuple[Series, ...], np.ndarray]]]:
    """A job whose values lie in two segments, and its frames."""
    rng = np.random.default_rng(iteration)
    of = descriptions(ranks)
    frames = [(one, np.exp(rng.normal(size=sum(s.size for s in one))).astype(np.float32)) for one in of]
    table = np.zeros(ranks, FRAME)
    segments = [folder / f"{iteration}-{number}.segment" for number in range(2)]
    contents = [bytearray(b"header.."), bytearray(b"another header..")]
    for rank, (_, values) in enumerate(frames):
        content = contents[rank % 2]
        table[rank] = (rank, rank % 2, rank, values.nbytes, len(content))
        content += values.tobytes()
    for path, content in zip(segments, contents, strict=True):
        path.write_bytes(content)
    job = Job(
        run="r",
        session_ns=5,
        iteration=iteration,
        world_size=ranks + 1,
        missing=(ranks,),
        ended_ns=7,
        seconds=1.5,
        consumed_tokens=9,
        dropped=2,
        events=(Event("stage", "2"),),
        frames=table,
        segments=tuple(map(str, segments)),
        descriptions=tuple(serialize(one) for one in of),
    )
    return job, frames


@pytest.fixture
def reducers() -> Iterator[Callable[..., Reducers]]:
    made = []

    def make(number: int = 1, **other: float) -> Reducers:
        made.append(Reducers(number, nice=0, **other))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(of: Reducers, number: int) -> list[Iteration | Vanished]:
    results: list[Iteration | Vanished] = []
    deadline = time.monotonic() + PATIENCE
    while len(results) < number:
        assert time.monotonic() < deadline, f"{len(results)} of {number} results within {PATIENCE} s"
        results += of.results(0.2)
    return results


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} not within {PATIENCE} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether all of its threads have ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_equal(actual: Iteration | Vanished, expected: Iteration) -> None:
    assert isinstance(actual, Iteration)
    assert replace(actual, aggregates=(), derived=()) == replace(expected, aggregates=(), derived=())
    for of in ("aggregates", "derived"):
        pairs = list(zip(getattr(actual, of), getattr(expected, of), strict=True))
        assert pairs
        for one, other in pairs:
            assert one.__dict__.keys() == other.__dict__.keys()
            for name, value in one.__dict__.items():
                np.testing.assert_array_equal(value, getattr(other, name))


def test_a_job_is_what_its_frames_reduce_to(tmp_path: Path) -> None:
    job, frames = make_job(tmp_path)
    done = perform(job, Layouts(lambda content: parse(content, Limits())))
    aggregates = aggregate.reduce(frames, range(6))
    expected = Iteration(
        "r", 5, 1, 7, (6,), 7, 1.5, 9, 2, (Event("stage", "2"),), tuple(aggregates), tuple(derive(aggregates))
    )
    assert_equal(done, expected)
    assert done.num_ranks == 6
    assert {one.name for one in done.derived} >= {"moe.output_norm_max.max_over_median", "rank.slowdown"}


def test_processes_do_what_is_done_here(tmp_path: Path, reducers: Callable[..., Reducers]) -> None:
    jobs = [make_job(tmp_path, iteration)[0] for iteration in range(1, 9)]
    of = reducers(2, queued=6)
    for job in jobs:
        of.submit(job)
    results = {one.iteration: one for one in collect(of, len(jobs))}
    assert len(set(of.pids())) == 2
    layouts = Layouts(lambda content: parse(content, Limits()))
    for job in jobs:
        assert_equal(results[job.iteration], perform(job, layouts))


def test_the_number_of_jobs_is_bounded(tmp_path: Path, reducers: Callable[..., Reducers]) -> None:
    of = reducers(1, queued=1)
    job, _ = make_job(tmp_path)
    assert of.room == 2
    of.submit(job)
    of.submit(job)
    assert of.room == 0
    with pytest.raises(RuntimeError, match="2 jobs"):
        of.submit(job)
    collect(of, 2)
    assert of.room == 2
    assert of.results() == []


def test_a_killed_process_is_replaced_and_its_job_done_again(
    tmp_path: Path, reducers: Callable[..., Reducers], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = make_job(tmp_path)
    of = reducers(1)
    of.submit(job)
    collect(of, 1)
    (first,) = of.pids()
    os.kill(first, signal.SIGSTOP)  # so that it is killed in the middle of the job
    of.submit(job)
    time.sleep(0.1)
    assert of.results() == []
    os.kill(first, signal.SIGKILL)
    (again,) = collect(of, 1)
    assert_equal(again, perform(job, Layouts(lambda content: parse(content, Limits()))))
    assert of.pids() != [first]
    assert f"process {first} has ended with status -9" in caplog.text
    assert "iteration 1 of run r (6 of 7 ranks), attempt 1 of 3" in caplog.text


def test_a_process_killed_while_idle_costs_no_attempt(
    tmp_path: Path, reducers: Callable[..., Reducers], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = make_job(tmp_path)
    of = reducers(1)
    of.submit(job)
    collect(of, 1)
    (first,) = of.pids()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: is_gone(first), "end of the process")
    of.submit(job)
    collect(of, 1)
    assert "attempt" not in caplog.text


def test_a_job_that_kills_processes_is_given_up(
    tmp_path: Path, reducers: Callable[..., Reducers], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = make_job(tmp_path)
    poison = replace(job, iteration=2, segments=())
    of = reducers(1, queued=3)
    of.submit(poison)  # the process dies of an exception that no values make
    of.submit(job)
    failed, done = collect(of, 2)
    assert isinstance(failed, Iteration)
    assert (failed.iteration, failed.aggregates, failed.derived, failed.num_ranks) == (2, (), (), 6)
    assert [event.kind for event in failed.events] == ["stage", FAILED]
    assert "has ended with status 1" in failed.events[1].detail
    assert "attempt 3 of 3" in caplog.text
    assert isinstance(done, Iteration)
    assert done.iteration == 1
    assert done.aggregates


def test_bad_values_cost_no_process(tmp_path: Path, reducers: Callable[..., Reducers]) -> None:
    job, _ = make_job(tmp_path)
    of = reducers(1, queued=3)
    short = job.frames.copy()
    short["length"] -= 4
    of.submit(replace(job, frames=short))
    of.submit(replace(job, descriptions=(b"\xff",) * len(job.descriptions)))
    of.submit(job)
    sizes, malformed, done = collect(of, 3)
    assert isinstance(sizes, Iteration)
    assert isinstance(malformed, Iteration)
    assert sizes.events[-1] == Event(FAILED, "32 values for a description of 33")
    assert "no protobuf message" in malformed.events[-1].detail
    assert isinstance(done, Iteration)
    assert done.aggregates


def test_a_job_of_a_deleted_run_ends_quietly(
    tmp_path: Path, reducers: Callable[..., Reducers], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = make_job(tmp_path)
    Path(job.segments[1]).unlink()
    with pytest.raises(Gone):
        perform(job, Layouts(lambda content: parse(content, Limits())))
    of = reducers(1)
    of.submit(job)
    assert collect(of, 1) == [Vanished("r", 5, 1)]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_process_that_hangs_is_named_and_replaced(
    tmp_path: Path, reducers: Callable[..., Reducers], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = make_job(tmp_path)
    of = reducers(1, timeout_seconds=3.0)
    of.submit(job)
    collect(of, 1)
    (first,) = of.pids()
    os.kill(first, signal.SIGSTOP)
    of.submit(job)
    (again,) = collect(of, 1)
    assert isinstance(again, Iteration)
    assert again.aggregates
    assert (
        f"reducer 0, doing iteration 1 of run r (6 of 7 ranks), attempt 1 of 3: process {first} has not answered"
        in caplog.text
    )
    assert is_gone(first)
    (work,) = of.work()
    assert (work.pid, work.restarts, work.iterations) == (of.pids()[0], 1, 2)
    assert work.busy_seconds > 3.0  # in vain, for most of it


def test_closing_ends_the_processes_also_in_the_middle_of_a_job(tmp_path: Path) -> None:
    job, _ = make_job(tmp_path)
    of = Reducers(2, nice=0)
    of.submit(job)
    collect(of, 1)
    wait_for(lambda: len(of.pids()) == 2, "start")
    pids = of.pids()
    os.kill(pids[0], signal.SIGSTOP)
    of.submit(job)
    of.submit(job)
    begun = time.monotonic()
    of.close()
    assert time.monotonic() - begun < 5
    assert all(is_gone(pid) for pid in pids)


PARENT = """
import sys, time
from steptron_metrics.reducer.workers import Reducers
of = Reducers(2)
while len(of.pids()) < 2:
    time.sleep(0.01)
print(*of.pids(), flush=True)
time.sleep(60)
"""


def test_processes_end_with_their_parent_even_when_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    try:
        wait_for(lambda: all(is_gone(pid) for pid in pids), "end of the processes")
    finally:
        for pid in pids:
            if not is_gone(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
