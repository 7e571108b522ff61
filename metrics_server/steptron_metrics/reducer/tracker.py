"""Which iterations can be reduced.

The tracker hears of every frame in the journal, in any order, and after a restart of all of them again. It does no
input or output but through what it is given, and has no clock.

- A frame counts once for (run, session, iteration, rank): the first one.
- An iteration is due when all ranks have sent, or ``partial_after_seconds`` after the first frame of it that is in no
  result yet. When more ranks come after a partial result it is due again, with all frames, when it is whole or as long
  after the first of them; never with fewer ranks than the store already has it from.
- Iterations of a session from the first one of a later session on are void: a run that resumed makes them again.
- A session's number of ranks is what its first frame says; frames that say otherwise, or of ranks beyond, are refused,
  which is complained of once a session. What the others have sent becomes due as usual.

Jobs of a run are given out the oldest first. Runs share the server by how much work their jobs are, about: one with
little does not wait for the turns of one with much, of which only so much is out at a time that others do not queue up
behind it.

Of an iteration that is done a number remains, the ranks that it was made from (``Spans``). One that waits for ranks
takes up 24 bytes a frame and a bit a rank; those with a partial result are kept so that late ranks can still complete
it. When those of a run take up more than its share of ``max_bytes``, its oldest partial results are closed, then its
longest waiting iterations are made due early.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from steptron_metrics.reducer.job import FRAME, Job
from steptron_metrics.reducer.spans import Spans
from steptron_metrics.results import Event

if TYPE_CHECKING:
    from steptron_metrics.journal.tail import Notice

MAX_EVENTS = 1000
"""Events of an iteration that are kept."""
MAX_DROPPED = 1 << 40
"""Frames given up that an iteration counts at most: what clients say of themselves is not to be believed beyond."""
MAX_MISSING = 10
"""Ranks that are named of an iteration that waits."""
_PACK = struct.Struct("<IIIIQ").pack
_OVERHEAD = 700
"""Bytes that a waiting iteration takes up beside frames and ranks, measured."""

_SERIES_COST = 64
"""Bytes of values that take as long as a byte of the largest description: a series of one value takes 85 us until it is
stored, as do 2 kB of a large series."""
_MAX_COST = 64 << 20
"""Of a run's jobs that are out, unless they are few: some seconds' work."""

_MAX_RESULTS = 64 << 20
"""Of a run's jobs that are out, bytes of their results, unless it is one job: they are written one after another."""

_Key = tuple[str, int, int]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Table(Generic[K, V]):
    """Small numbers for things that frames refer to; a thing is forgotten with the last frame that does."""

    def __init__(self) -> None:
        self.values: dict[int, V] = {}
        self._numbers: dict[K, int] = {}
        self._keys: dict[int, K] = {}
        self._uses: dict[int, int] = {}
        self._free: list[int] = []

    def use(self, key: K, make: Callable[[], V]) -> int:
        """The number of a thing, which ``make`` makes where it has none, for one more frame."""
        number = self._numbers.get(key)
        if number is None:
            value = make()
            number = self._free.pop() if self._free else len(self.values)
            self.values[number], self._numbers[key], self._keys[number], self._uses[number] = value, number, key, 0
        self._uses[number] += 1
        return number

    def release(self, numbers: np.ndarray) -> list[V]:
        """Takes back one use for each of the numbers; what is forgotten."""
        gone = []
        for number, uses in zip(*(part.tolist() for part in np.unique(numbers, return_counts=True)), strict=True):
            self._uses[number] -= uses
            if not self._uses[number]:
                del self._numbers[self._keys.pop(number)], self._uses[number]
                self._free.append(number)
                gone.append(self.values.pop(number))
        return gone


class Pending(NamedTuple):
    """An iteration of which frames have come that no result in the store is made from.

    Attributes:
        run, iteration: which.
        ranks, world_size: how many have sent, and are to send.
        since: when its first frame was heard of.
        missing: the first ranks that have not sent.
    """

    run: str
    iteration: int
    ranks: int
    world_size: int
    since: float
    missing: tuple[int, ...] = ()


class _Waiting:
    """An iteration with frames that may still have to be reduced.

    Attributes:
        frames: FRAME records, whose segment and description are numbers in the run's tables.
        seen: a bit for each rank.
        size: bytes that it takes up, about.
        since: when its first frame was heard of.
        in_flight: a job is out whose result is not stored yet.
        cost: of that job.
        deadline: when it is due even so; None where no frame has come since the last job, or the time is over.
        expired: the time is over.
    """

    __slots__ = (
        "consumed_tokens",
        "cost",
        "deadline",
        "dropped",
        "ended_ns",
        "events",
        "expired",
        "frames",
        "in_flight",
        "seconds",
        "seen",
        "since",
        "size",
    )

    def __init__(self, world_size: int, since: float) -> None:
        self.since = since
        self.frames = bytearray()
        self.seen = bytearray((world_size + 7) // 8)
        self.size = 0
        self.in_flight = False
        self.cost = 0
        self.deadline: float | None = None
        self.expired = False
        self.ended_ns = 0
        self.seconds = 0.0
        self.consumed_tokens = 0
        self.dropped = 0
        self.events: list[tuple[int, Event]] = []

    @property
    def count(self) -> int:
        return len(self.frames) // FRAME.itemsize


class _Session:
    """Attributes:
    world_size: None while no frame of it has come.
    first: its least iteration; None while it has none.
    end: from this iteration on it is void.
    done: ranks that the results in the store were made from; 0 where there never will be one.
    contradicted: a frame was refused.
    """

    __slots__ = ("contradicted", "done", "end", "first", "waiting", "world_size")

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.contradicted = False
        self.first: int | None = None
        self.end: float = float("inf")
        self.done = Spans()
        self.waiting: dict[int, _Waiting] = {}


class _Run:
    """Attributes:
    num_bytes: what is waiting of it takes up, about.
    deadlines: of iterations, ascending; some may no longer hold.
    closable: iterations with a result and nothing new.
    ready: heap of sessions and iterations; some may no longer be due.
    queued: among those that have turns.
    spent: cost of its jobs so far, and of what others got while it had none.
    result_bytes: of its latest result.
    out, cost_out: its jobs that are out, and what they cost.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, _Session] = {}
        self.segments: _Table[str, str] = _Table()
        self.descriptions: _Table[int, bytes] = _Table()
        self.num_bytes = 0
        self.deadlines: deque[tuple[float, _Key]] = deque()
        self.closable: OrderedDict[_Key, None] = OrderedDict()
        self.ready: list[tuple[int, int]] = []
        self.queued = False
        self.spent = 0
        self.out: set[tuple[int, int]] = set()
        self.result_bytes = self.cost_out = 0


class Tracker:
    """See the module's docstring. Not for several threads.

    Args:
        partial_after_seconds: how long ranks are waited for.
        describe: the serialized description of a frame; raises ``KeyError`` when its segment is gone.
        stored: for each iteration of a run that is in the store, (session_ns, iteration), how many ranks it was made
        from;
            called when the run is first heard of.
        max_bytes: for what waits, of all runs.
        max_large: jobs of a run that are out at a time, where they are so large that their cost counts.

    Attributes:
        ignored: frames that changed nothing, by reason: "duplicate", "void", "refused" and "gone".
    """

    def __init__(
        self,
        partial_after_seconds: float,
        describe: Callable[[Notice], bytes],
        stored: Callable[[str], Mapping[tuple[int, int], int]],
        max_bytes: int = 512 << 20,
        max_large: int = 4,
    ) -> None:
        self._max_large = max_large
        self._after = partial_after_seconds
        self._describe = describe
        self._stored = stored
        self._max_bytes = max_bytes
        self._runs: dict[str, _Run] = {}
        self._turns: dict[str, None] = {}  # runs with something ready, those first whose turn is longest ago
        self._served = 0  # what the run that had the last turn had spent
        self._complaints: list[str] = []
        self.ignored: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """What is waiting takes up, about."""
        return sum(run.num_bytes for run in self._runs.values())

    def full(self) -> frozenset[str]:
        """Runs of which jobs have to be taken and done before more frames are taken in."""
        share = self._share()
        return frozenset(name for name, run in self._runs.items() if run.num_bytes > share and run.ready)

    def take(self, notices: Iterable[Notice], now: float) -> None:
        """Hears of frames.

        Args:
            notices: of frames in the journal.
            now: seconds of a clock that never goes back.
        """
        heard = {}
        for notice in notices:
            run = heard[notice.run] = self._runs.get(notice.run) or self._learn(notice.run)
            session = run.sessions.get(notice.session_ns)
            if session is None:
                session = run.sessions[notice.session_ns] = _Session()
                self._order(notice.run, run)
            reason = self._take(run, session, notice, now)
            if reason is not None:
                self.ignored[reason] += 1
        for run in heard.values():
            self._shrink(run)

    def due(self, now: float, limit: int) -> list[Job]:
        """Takes out at most ``limit`` jobs that are due: of the runs in turn, the oldest of each first."""
        for run in self._runs.values():
            while run.deadlines and run.deadlines[0][0] <= now:
                self._expire(*run.deadlines.popleft())
        jobs: list[Job] = []
        while len(jobs) < limit:
            waiting = [name for name in self._turns if self._may_have_turn(name)]
            if not waiting:
                break
            name = min(waiting, key=lambda one: self._runs[one].spent)
            run = self._runs[name]
            del self._turns[name]
            job = self._next(name, run)
            if job is None:
                run.queued = False
                continue
            self._turns[name] = None
            jobs.append(job)
        return jobs

    def _may_have_turn(self, name: str) -> bool:
        run = self._runs[name]
        if run.out and (len(run.out) + 1) * run.result_bytes > _MAX_RESULTS:
            return False
        return len(run.out) < self._max_large or run.cost_out < _MAX_COST

    def pending(self, most: int) -> tuple[int, list[Pending]]:
        """How many iterations are pending, and ``most`` of them, those that wait longest, about; in ascending order of
        that. Takes no longer where there are many."""
        number, found = 0, []
        for name, run in self._runs.items():
            number += sum(len(session.waiting) for session in run.sessions.values()) - len(run.closable)
            waits = ((session_ns, iteration) for _, (_, session_ns, iteration) in islice(run.deadlines, most))
            for session_ns, iteration in dict.fromkeys((*run.out, *run.ready[:most], *waits)):
                waiting = self._at((name, session_ns, iteration))
                if waiting is not None:
                    world_size = run.sessions[session_ns].world_size or 0
                    found.append((Pending(name, iteration, waiting.count, world_size, waiting.since), waiting))
        oldest = heapq.nsmallest(most, found, key=lambda one: one[0].since)
        return number, [one._replace(missing=_first_missing(waiting, one.world_size)) for one, waiting in oldest]

    def complaints(self) -> list[str]:
        """What people should hear of, since the last call."""
        complaints, self._complaints = self._complaints, []
        return complaints

    def wants(self, run: str, session_ns: int, iteration: int) -> bool:
        """Whether a job's result is still to be stored: neither deleted nor void since."""
        waiting = self._at((run, session_ns, iteration))
        return waiting is not None and waiting.in_flight

    def reduced(self, run: str, num_bytes: int) -> None:
        """A job of the run has given a result of this size."""
        if run in self._runs:
            self._runs[run].result_bytes = num_bytes

    def done(self, run: str, session_ns: int, iteration: int, num_ranks: int) -> None:
        """The result of a job is in the store."""
        key = (run, session_ns, iteration)
        waiting = self._at(key)
        if waiting is None or not waiting.in_flight:
            return
        session = self._runs[run].sessions[session_ns]
        session.done.put(iteration, max(num_ranks, session.done.get(iteration) or 0))
        self._land(key, waiting)
        if num_ranks == session.world_size:
            self._forget(key)
        else:
            self._settle(key)

    def drop(self, run: str, session_ns: int, iteration: int) -> None:
        """An iteration cannot be reduced (again): its values are gone."""
        key = (run, session_ns, iteration)
        if self._at(key) is not None:
            self._close(key)

    def is_done(self, run: str, session_ns: int, iteration: int) -> bool:
        """Whether everything heard of an iteration is in the store, or never will be."""
        of_run = self._runs.get(run)
        session = of_run.sessions.get(session_ns) if of_run is not None else None
        if session is None:
            return False
        if iteration >= session.end:
            return True
        ranks = session.done.get(iteration)
        waiting = session.waiting.get(iteration)
        return ranks is not None and (waiting is None or waiting.count <= ranks)

    def forget(self, run: str) -> None:
        """The run has been deleted. Frames of it that still come are those of a new run."""
        of_run = self._runs.get(run)
        if of_run is not None:
            for session_ns, session in of_run.sessions.items():
                for iteration in list(session.waiting):
                    self._forget((run, session_ns, iteration))
            del self._runs[run]
            self._turns.pop(run, None)

    def _at(self, key: _Key) -> _Waiting | None:
        name, session_ns, iteration = key
        run = self._runs.get(name)
        session = run.sessions.get(session_ns) if run is not None else None
        return session.waiting.get(iteration) if session is not None else None

    def _learn(self, name: str) -> _Run:
        run = self._runs[name] = _Run()
        for (session_ns, iteration), ranks in sorted(self._stored(name).items()):
            session = run.sessions.setdefault(session_ns, _Session())
            session.done.put(iteration, ranks)
            session.first = session.done.first()
        self._order(name, run)
        return run

    def _order(self, name: str, run: _Run) -> None:
        """Works out where sessions end, and drops what is void."""
        end = float("inf")
        for session_ns in sorted(run.sessions, reverse=True):
            session = run.sessions[session_ns]
            if end < session.end:
                session.end = end
                for iteration in [one for one in session.waiting if one >= end]:
                    self._forget((name, session_ns, iteration))
            if session.first is not None:
                end = min(end, session.first)

    def _take(self, run: _Run, session: _Session, notice: Notice, now: float) -> str | None:
        """Takes one frame in; why not."""
        iteration, rank = notice.iteration, notice.rank
        if iteration >= session.end:
            return "void"
        if session.world_size is None:
            session.world_size = notice.world_size
        waiting = session.waiting.get(iteration)
        ranks = session.done.get(iteration)
        if notice.world_size != session.world_size or not 0 <= rank < session.world_size:
            if waiting is None and ranks is None:
                session.done.put(iteration, 0)
            if not session.contradicted:
                session.contradicted = True
                self._complaints.append(
                    f"run {notice.run}: rank {rank} says in iteration {iteration} that {notice.world_size} ranks send, "
                    f"others of its session (begun at {notice.session_ns} ns) said {session.world_size}: such frames "
                    "are left out; ranks that start anew have to give a later started_ns"
                )
            return "refused"
        if ranks == session.world_size:
            return "duplicate"
        byte, bit = rank >> 3, 1 << (rank & 7)
        if waiting is not None and waiting.seen[byte] & bit:
            return "duplicate"
        try:
            description = run.descriptions.use(notice.description_id, lambda: self._remember(run, notice))
        except KeyError:
            return "gone"
        segment = run.segments.use(notice.segment, lambda: notice.segment)
        key = (notice.run, notice.session_ns, iteration)
        if waiting is None:
            waiting = session.waiting[iteration] = _Waiting(session.world_size, now)
            _grow(run, waiting, _OVERHEAD + len(waiting.seen))
        waiting.seen[byte] |= bit
        waiting.frames += _PACK(rank, segment, description, notice.length, notice.offset)
        _grow(run, waiting, FRAME.itemsize)
        waiting.ended_ns = max(waiting.ended_ns, notice.ended_ns)
        waiting.seconds = max(waiting.seconds, notice.seconds)
        waiting.consumed_tokens = max(waiting.consumed_tokens, notice.consumed_tokens)
        waiting.dropped = min(waiting.dropped + notice.dropped, MAX_DROPPED)
        for event in notice.events[: MAX_EVENTS - len(waiting.events)]:
            waiting.events.append((rank, event))
            _grow(run, waiting, 200 + len(event.detail))
        if waiting.deadline is None and not waiting.expired:
            waiting.deadline = now + self._after
            run.deadlines.append((waiting.deadline, key))
            run.closable.pop(key, None)
        if waiting.count == session.world_size:
            self._settle(key)
        if session.first is None or iteration < session.first:
            session.first = iteration
            self._order(notice.run, run)
        return None

    def _remember(self, run: _Run, notice: Notice) -> bytes:
        content = self._describe(notice)
        run.num_bytes += len(content)
        return content

    def _expire(self, deadline: float, key: _Key) -> None:
        waiting = self._at(key)
        if waiting is not None and waiting.deadline == deadline:
            waiting.deadline = None
            waiting.expired = True
            self._settle(key)

    def _settle(self, key: _Key) -> None:
        """Queues an iteration that is due, or marks it as one that has nothing new."""
        name, session_ns, iteration = key
        run = self._runs[name]
        session = run.sessions[session_ns]
        waiting = session.waiting[iteration]
        if self._is_due(session, iteration, waiting):
            heapq.heappush(run.ready, (session_ns, iteration))
            if not run.queued:
                run.queued = True
                run.spent = max(run.spent, self._served)
                self._turns[name] = None
        elif not waiting.in_flight and waiting.deadline is None:
            waiting.expired = False
            run.closable[key] = None

    @staticmethod
    def _is_due(session: _Session, iteration: int, waiting: _Waiting) -> bool:
        return (
            not waiting.in_flight
            and waiting.count > (session.done.get(iteration) or 0)
            and (waiting.expired or waiting.count == session.world_size)
        )

    def _next(self, name: str, run: _Run) -> Job | None:
        while run.ready:
            session_ns, iteration = heapq.heappop(run.ready)
            session = run.sessions[session_ns]
            waiting = session.waiting.get(iteration)
            if waiting is not None and self._is_due(session, iteration, waiting):
                waiting.in_flight = True
                waiting.deadline = None
                waiting.expired = False
                job = self._job(name, run, session_ns, iteration)
                waiting.cost = _cost(job) + run.result_bytes
                self._served = run.spent
                run.spent += waiting.cost
                run.out.add((session_ns, iteration))
                run.cost_out += waiting.cost
                return job
        return None

    @staticmethod
    def _job(name: str, run: _Run, session_ns: int, iteration: int) -> Job:
        session = run.sessions[session_ns]
        waiting = session.waiting[iteration]
        world_size = session.world_size or 0
        frames = np.sort(np.frombuffer(bytes(waiting.frames), FRAME), order="rank")
        segments, frames["segment"] = np.unique(frames["segment"], return_inverse=True)
        descriptions, frames["description"] = np.unique(frames["description"], return_inverse=True)
        seen = np.unpackbits(np.frombuffer(bytes(waiting.seen), np.uint8), count=world_size, bitorder="little")
        return Job(
            name,
            session_ns,
            iteration,
            world_size,
            tuple(np.flatnonzero(seen == 0).tolist()),
            waiting.ended_ns,
            waiting.seconds,
            waiting.consumed_tokens,
            waiting.dropped,
            tuple(event for _, event in sorted(waiting.events, key=lambda one: one[0])),
            frames,
            tuple(run.segments.values[number] for number in segments.tolist()),
            tuple(run.descriptions.values[number] for number in descriptions.tolist()),
        )

    def _share(self) -> int:
        """What of a run may wait. One alone has half, so that another that comes finds room."""
        return self._max_bytes // (1 + max(1, sum(run.num_bytes > 0 for run in self._runs.values())))

    def _shrink(self, run: _Run) -> None:
        share = self._share()
        while run.num_bytes > share and run.closable:
            self._close(next(iter(run.closable)))
        if run.num_bytes <= share:
            return
        leaving = 0
        for session_ns, iteration in {*run.out, *run.ready}:
            due = run.sessions[session_ns].waiting.get(iteration)
            leaving += due.size if due is not None else 0
        while run.num_bytes - leaving > share and run.deadlines:
            deadline, key = run.deadlines.popleft()
            waiting = self._at(key)
            if waiting is not None and waiting.deadline == deadline:
                leaving += waiting.size
                self._expire(deadline, key)

    def _close(self, key: _Key) -> None:
        name, session_ns, iteration = key
        done = self._runs[name].sessions[session_ns].done
        if done.get(iteration) is None:
            done.put(iteration, 0)
        self._forget(key)

    def _land(self, key: _Key, waiting: _Waiting) -> None:
        """Its job is no longer out."""
        if waiting.in_flight:
            waiting.in_flight = False
            run = self._runs[key[0]]
            run.out.discard(key[1:])
            run.cost_out -= waiting.cost

    def _forget(self, key: _Key) -> None:
        name, session_ns, iteration = key
        run = self._runs[name]
        waiting = run.sessions[session_ns].waiting.pop(iteration)
        frames = np.frombuffer(bytes(waiting.frames), FRAME)
        run.segments.release(frames["segment"])
        gone = run.descriptions.release(frames["description"])
        run.num_bytes -= waiting.size + sum(map(len, gone))
        run.closable.pop(key, None)
        self._land(key, waiting)


def _grow(run: _Run, waiting: _Waiting, size: int) -> None:
    waiting.size += size
    run.num_bytes += size


def _first_missing(waiting: _Waiting, world_size: int) -> tuple[int, ...]:
    seen = np.unpackbits(np.frombuffer(bytes(waiting.seen), np.uint8), count=world_size, bitorder="little")
    return tuple(np.flatnonzero(seen == 0)[:MAX_MISSING].tolist())


def _cost(job: Job) -> int:
    """How much work a job is, in bytes of values, about."""
    return int(job.frames["length"].sum()) + _SERIES_COST * max(map(len, job.descriptions), default=0)
