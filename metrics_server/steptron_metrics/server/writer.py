"""The thread that judges iterations and stores them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.results import Iteration
from steptron_metrics.server.aside import set_aside
from steptron_metrics.storage.base import Invalidated, Store

log = logging.getLogger(__name__)

_MAX_BATCH = 64
_MAX_BATCH_BYTES = 16 << 20
"""What a killed process has not yet committed is to be done again: not so much that it never comes to an end."""
_REFUSALS = 4
"""After so many in a row, over two seconds, it is believed."""
_TICK_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 30.0


class Written(NamedTuple):
    """An iteration that is in the store, or that the store has no use for."""

    run: str
    session_ns: int
    iteration: int
    num_ranks: int


class _Refused(Exception):
    """The store does not take this, whenever it is tried."""


class _Deletion(NamedTuple):
    run: str
    done: threading.Event


class Writer:
    """Takes iterations, in the order of each run, and makes alerts and rows of them.

    Alerts are stored before their iteration: killed in between, the server judges the iteration once more and comes to
    the same alerts. While the store does not answer everything is kept and tried again, after pauses of up to 30 s.
    What it refuses though it answers is set aside after a few attempts, so that other runs go on.

    Args:
        store: written to by this thread only.
        alerts, delivery, requests: see there; used by this thread only.
        folder: of the server, for what is set aside.

    Attributes:
        trouble: why the store does not take anything at the moment; empty when it does. Names no run.
        unwritten, unwritten_bytes: of iterations that it has been given.
        stored: iterations since it began.
        set_aside: iterations since it began.
        dropped_frames: that clients had to give up, since it began.
    """

    def __init__(self, store: Store, alerts: Alerts, delivery: Delivery, requests: Requests, folder: Path) -> None:
        self._store, self._alerts, self._delivery, self._requests = store, alerts, delivery, requests
        self._folder = folder
        self._queue: queue.SimpleQueue[Iteration | _Deletion | None] = queue.SimpleQueue()
        self._held: deque[Iteration | _Deletion | None] = deque()
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._ticked = 0.0
        self.trouble = ""
        self.unwritten = self.unwritten_bytes = 0
        self.stored = self.set_aside = self.dropped_frames = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, iterations: Sequence[Iteration]) -> None:
        """Takes iterations; at once. Whoever calls sees to it that they do not become too many."""
        with self._lock:
            self.unwritten += len(iterations)
            self.unwritten_bytes += sum(map(size_of, iterations))
        for iteration in iterations:
            self._queue.put(iteration)

    def written(self) -> list[Written]:
        """What has been stored since the last call."""
        written = []
        while not self._written.empty():
            written.append(self._written.get())
        return written

    def delete(self, run: str, done: threading.Event) -> None:
        """Deletes a run, after what was put before; sets the event when it is done."""
        self._queue.put(_Deletion(run, done))

    def close(self, timeout: float = 10.0) -> bool:
        """Stores what waits, if the store takes it; whether it has ended within ``timeout`` seconds."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    # ------------------------------------------------------------------------------------ thread

    def _run(self) -> None:
        self._settle("ending alerts of rules that are gone", self._alerts.begin)
        while True:
            item = self._next()
            if item is None:
                break
            if isinstance(item, _Deletion):
                self._persist("deleting a run", partial(self._delete, item.run))
                item.done.set()
                continue
            batch, size = [item], size_of(item)
            while len(batch) < _MAX_BATCH and size < _MAX_BATCH_BYTES and not self._queue.empty():
                following = self._queue.get()
                # A later session is judged by what is stored of those before.
                if not isinstance(following, Iteration) or _begins_session(following, batch):
                    self._held.append(following)
                    break
                batch.append(following)
                size += size_of(following)
            if not self._write(batch):
                break

    def _next(self) -> Iteration | _Deletion | None:
        """The next item, None at the end; looks for silent runs meanwhile."""
        if self._held:
            return self._held.popleft()
        while True:
            if time.monotonic() - self._ticked >= _TICK_SECONDS:
                self._settle("looking for silent runs", self._alerts.tick)
                self._ticked = time.monotonic()
            try:
                return self._queue.get(timeout=1.0)
            except queue.Empty:
                continue

    def _write(self, batch: list[Iteration]) -> bool:
        """Judges and stores; False when it is told to end before the store has taken it."""
        changes: list[Change] = []
        for iteration in batch:
            changes += self._judge(iteration)
        delivered = False

        def put_alerts() -> None:
            nonlocal delivered
            try:
                self._store.put_alerts([change.alert for change in changes])
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
        if not self._put(batch):
            return False
        for one in batch:
            self.dropped_frames += one.dropped
            self._written.put(Written(one.run, one.session_ns, one.iteration, one.num_ranks))
        return True

    def _put(self, batch: list[Iteration]) -> bool:
        """Stores; what the store refuses goes to files, each by itself."""
        try:
            if not self._persist(f"storing {len(batch)} iterations", partial(self._store.put, batch), may_refuse=True):
                return False
            self.stored += len(batch)
        except _Refused as refused:
            if len(batch) > 1:
                return all(self._put([one]) for one in batch)
            if not self._persist("setting an iteration aside", partial(self._set_aside, batch[0], str(refused))):
                return False
        with self._lock:
            self.unwritten -= len(batch)
            self.unwritten_bytes -= sum(map(size_of, batch))
        return True

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

    def _delete(self, run: str) -> None:
        self._store.delete(run)
        self._alerts.forget(run)
        self._requests.forget(run)

    def _persist(self, what: str, work: Callable[[], None], may_refuse: bool = False) -> bool:
        """Does something until it succeeds; False when the end comes first.

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
                        self.trouble = ""
                        raise _Refused(f"{type(error).__name__}: {error}".strip()) from error
                self.trouble = f"{what}: {error}".strip()
                log.error("%s; again in %g s", self.trouble, pause, exc_info=pause == _FIRST_PAUSE_SECONDS)
                if self._closing.wait(pause):
                    return False
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if self.trouble:
                log.info("%s: done at last", what)
                self.trouble = ""
            return True


def _begins_session(iteration: Iteration, batch: Sequence[Iteration]) -> bool:
    return any(one.run == iteration.run and one.session_ns != iteration.session_ns for one in batch)


def size_of(iteration: Iteration) -> int:
    """Bytes that an iteration takes up, about."""
    return sum(aggregate.values.nbytes for aggregate in iteration.aggregates)
