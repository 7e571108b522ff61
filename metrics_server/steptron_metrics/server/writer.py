"""The thread that judges iterations and stores them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.results import Iteration
from steptron_metrics.server.aside import set_aside
from steptron_metrics.server.space import Space
from steptron_metrics.storage.base import Invalidated, Store

log = logging.getLogger(__name__)

_MAX_BATCH = 64
_MAX_BATCH_BYTES = 16 << 20
"""What a killed process has not yet committed is to be done again: not so much that it never comes to an end."""
_OVERHEAD = 400
"""Bytes of an aggregate beside its values."""
_REFUSALS = 4
"""After so many in a row, over two seconds, it is believed."""
_TICK_SECONDS = 5.0
_DELETE_PAUSE_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0


class Written(NamedTuple):
    """An iteration that is in the store, or that the store has no use for."""

    run: str
    session_ns: int
    iteration: int
    num_ranks: int


class _Refused(Exception):
    """The store does not take this, whenever it is tried."""


class Deletion:
    """A run that is to be deleted.

    Attributes:
        run: its name.
        done: set when it is deleted, or given up.
        error: why it is not, as of the last attempt; empty when it is.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.done = threading.Event()
        self.error = ""


class Writer:
    """Takes iterations, in the order of each run, and makes alerts and rows of them.

    Alerts are stored before their iteration: killed in between, the server judges the iteration once more and comes to
    the same alerts. While the store does not answer, or its disk has no room, everything is kept and tried again, after
    pauses of up to 10 s. What it refuses though it answers is set aside after a few attempts, so that other runs go on.
    Deletions come first: they may be what makes room.

    Args:
        store: written to by this thread only.
        alerts, delivery, requests: see there; used by this thread only.
        folder: of the server, for what is set aside.
        space: on the disk of that folder.

    Attributes:
        trouble: why the store does not take anything at the moment; empty when it does. Names no run.
        unwritten, unwritten_bytes: of iterations that it has been given.
        stored: iterations since it began.
        set_aside: iterations since it began.
        dropped_frames: that clients had to give up, since it began.
        waiting: of runs with an iteration that is not whole, in a sentence which one, and who has not sent; set by
            whoever knows.
    """

    def __init__(
        self, store: Store, alerts: Alerts, delivery: Delivery, requests: Requests, folder: Path, space: Space
    ) -> None:
        self._store, self._alerts, self._delivery, self._requests = store, alerts, delivery, requests
        self._folder, self._space = folder, space
        self._changed = threading.Condition()  # of what follows
        self._waiting: deque[Iteration] = deque()
        self._deletions: deque[Deletion] = deque()
        self._closing = False
        self._batch: list[Iteration] = []  # what is being stored
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self._ticked = 0.0
        self._delete_at = 0.0  # not before, after one that failed
        self._trouble = self._trouble_of_deletion = ""
        self.waiting: Mapping[str, str] = {}
        self.unwritten = self.unwritten_bytes = 0
        self.stored = self.set_aside = self.dropped_frames = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, iterations: Sequence[Iteration]) -> None:
        """Takes iterations; at once. Whoever calls sees to it that they do not become too many."""
        with self._changed:
            self._waiting.extend(iterations)
            self._count(iterations, 1)
            self._changed.notify_all()

    def written(self) -> list[Written]:
        """What has been stored since the last call."""
        written = []
        while not self._written.empty():
            written.append(self._written.get())
        return written

    def delete(self, deletion: Deletion) -> None:
        """Deletes a run, before anything else; what was put of it before is dropped."""
        with self._changed:
            self._count([one for one in (*self._batch, *self._waiting) if one.run == deletion.run], -1)
            self._batch = [one for one in self._batch if one.run != deletion.run]
            self._waiting = deque(one for one in self._waiting if one.run != deletion.run)
            self._deletions.append(deletion)
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> bool:
        """Stores what waits, if the store takes it; whether it has ended within ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def trouble(self) -> str:
        return self._trouble or self._trouble_of_deletion

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    # ------------------------------------------------------------------------------------ thread

    def _count(self, iterations: Sequence[Iteration], sign: int) -> None:
        """Under the lock."""
        self.unwritten += sign * len(iterations)
        self.unwritten_bytes += sign * sum(map(size_of, iterations))

    def _run(self) -> None:
        self._settle("ending alerts of rules that are gone", self._alerts.begin)
        while True:
            self._delete_runs()
            if time.monotonic() - self._ticked >= _TICK_SECONDS:
                self._settle("looking for silent runs", lambda: self._alerts.tick(self.waiting))
                self._space.keep_reserve()
                self._ticked = time.monotonic()
            with self._changed:
                if not self._waiting and not self._may_delete():
                    if self._closing:
                        return
                    self._changed.wait(1.0)
                if self._may_delete():
                    continue
                self._batch = self._next_batch()
            if self._batch and not self._write():
                return

    def _may_delete(self) -> bool:
        """Under the lock."""
        return bool(self._deletions) and time.monotonic() >= self._delete_at

    def _next_batch(self) -> list[Iteration]:
        """Under the lock."""
        batch: list[Iteration] = []
        size = 0
        # A later session is judged by what is stored of those before.
        while self._waiting and not _begins_session(self._waiting[0], batch):
            if batch and (len(batch) >= _MAX_BATCH or size >= _MAX_BATCH_BYTES):
                break
            batch.append(self._waiting.popleft())
            size += size_of(batch[-1])
        return batch

    def _write(self) -> bool:
        """Judges and stores the batch; False when it is told to end before the store has taken it."""
        changes: list[Change] = []
        for iteration in list(self._batch):
            if _has(self._batch, iteration):  # not dropped meanwhile
                changes += self._judge(iteration)
        delivered = False

        def put_alerts() -> None:
            nonlocal delivered
            try:
                kept = {one.run for one in self._batch}
                if changes:
                    self._space.check()
                self._store.put_alerts([change.alert for change in changes if change.alert.run in kept])
            finally:
                # Also when the store does not answer: alerts are for people who may be able to do something.
                if not delivered:
                    delivered = True
                    self._delivery.deliver(changes)

        try:
            if not self._persist("storing alerts", put_alerts, may_refuse=True):
                return False
        except _Refused as refused:
            log.error("%d alerts are in the log and in alerts.jsonl only: %s", len(changes), refused)
        try:
            if not self._persist("storing iterations", lambda: self._put(self._batch), may_refuse=True):
                return False
            self._finish(self._batch, stored=True)
        except _Refused:
            # Each by itself: what the store refuses goes to a file.
            return all(self._put_alone(one) for one in list(self._batch))
        return True

    def _put(self, batch: Sequence[Iteration]) -> None:
        self._space.check()
        self._store.put(batch)

    def _put_alone(self, one: Iteration) -> bool:
        try:
            if not self._persist(
                "storing an iteration", lambda: self._put([one] if _has(self._batch, one) else []), may_refuse=True
            ):
                return False
            stored = True
        except _Refused as refused:
            if not self._persist("setting an iteration aside", partial(self._set_aside, one, str(refused))):
                return False
            stored = False
        if _has(self._batch, one):
            self._finish([one], stored)
        return True

    def _finish(self, batch: Sequence[Iteration], stored: bool) -> None:
        """The store has them, or has no use for them."""
        for one in batch:
            self.dropped_frames += one.dropped
            self._written.put(Written(one.run, one.session_ns, one.iteration, one.num_ranks))
        self.stored += len(batch) * stored
        with self._changed:
            self._count(batch, -1)
            self._batch = [one for one in self._batch if not _has(batch, one)]

    def _set_aside(self, iteration: Iteration, reason: str) -> None:
        path = set_aside(self._folder, iteration, reason)
        self.set_aside += 1
        log.error(
            "iteration %d of run %s is not in the database, which refuses it (%s): it is set aside in %s",
            iteration.iteration,
            iteration.run,
            reason,
            path,
        )

    def _judge(self, iteration: Iteration) -> list[Change]:
        found: list[Change] = []

        def judge() -> None:
            found[:] = self._alerts.evaluate(iteration)
            self._requests.update(iteration.run, found, [event.kind for event in iteration.events])

        # An iteration that no rule can judge is stored all the same; what is out of reach is waited for.
        try:
            judge()
        except Exception:
            if self._answers():
                log.exception("iteration %d of run %s could not be judged", iteration.iteration, iteration.run)
            else:
                self._persist("judging an iteration", judge)
        return found

    def _answers(self) -> bool:
        try:
            self._store.runs()
        except Exception:
            return False
        return True

    def _settle(self, what: str, look: Callable[[], list[Change]]) -> None:
        """Alerts that come of no iteration."""
        changes: list[Change] = []
        if not self._persist(what, lambda: changes.extend(look())) or not changes:
            return
        self._delivery.deliver(changes)
        self._persist(what, lambda: self._store.put_alerts([change.alert for change in changes]))
        for run in {change.alert.run for change in changes}:
            of_run = [change for change in changes if change.alert.run == run]
            self._persist(what, partial(self._requests.update, run, of_run))

    def _delete_runs(self) -> None:
        """Deletes the runs that are to be deleted, as far as the store lets it; the others are tried again."""
        if time.monotonic() < self._delete_at:
            return
        while self._deletions:
            deletion = self._deletions[0]
            run = deletion.run
            try:
                self._space.use_reserve()
                self._store.delete(run)
                self._alerts.forget(run)
                self._requests.forget(run)
            except Invalidated:
                raise
            except Exception as error:
                log.error("run %s is not deleted: %s", run, error)
                deletion.error = f"{type(error).__name__}: {error}".strip()
                if not self._store.refuses(error):
                    self._trouble_of_deletion = f"deleting a run: {error}".strip()
                    self._delete_at = time.monotonic() + _DELETE_PAUSE_SECONDS
                    return
            else:
                deletion.error = ""
            with self._changed:
                self._deletions.popleft()
            deletion.done.set()
        self._trouble_of_deletion = ""

    def _persist(self, what: str, work: Callable[[], None], may_refuse: bool = False) -> bool:
        """Does something until it succeeds, and deletes runs meanwhile; False when the end comes first.

        Raises:
            _Refused: the store refuses it again and again, with ``may_refuse``.
        """
        pause = _FIRST_PAUSE_SECONDS
        refusals = 0
        while True:
            try:
                work()
            except Invalidated:
                raise  # ends the process: the next one opens the database anew
            except Exception as error:
                if may_refuse and self._store.refuses(error):
                    refusals += 1
                    if refusals == _REFUSALS:
                        self._trouble = ""
                        raise _Refused(f"{type(error).__name__}: {error}".strip()) from error
                self._trouble = f"{what}: {error}".strip()
                log.error("%s; again in %g s", self._trouble, pause, exc_info=pause == _FIRST_PAUSE_SECONDS)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing or self._may_delete(), pause):
                        if self._closing:
                            return False
                        pause = _FIRST_PAUSE_SECONDS
                self._delete_runs()
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if self._trouble:
                log.info("%s: done at last", what)
                self._trouble = ""
            return True


def _has(batch: Sequence[Iteration], one: Iteration) -> bool:
    return any(one is other for other in batch)


def _begins_session(iteration: Iteration, batch: Sequence[Iteration]) -> bool:
    return any(one.run == iteration.run and one.session_ns != iteration.session_ns for one in batch)


def size_of(iteration: Iteration) -> int:
    """Bytes that an iteration takes up, about."""
    return sum(aggregate.values.nbytes + _OVERHEAD for aggregate in iteration.aggregates)
