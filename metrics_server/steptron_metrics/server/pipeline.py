"""From the journal by the reducers to the writer."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping

from steptron_metrics.errors import MetricsError
from steptron_metrics.http.state import Waiting
from steptron_metrics.journal.retention import delete_run, prune
from steptron_metrics.journal.tail import Notice, Tail
from steptron_metrics.reducer.tracker import Pending, Tracker
from steptron_metrics.reducer.workers import Reducers, Vanished
from steptron_metrics.server.order import Order
from steptron_metrics.server.space import Space
from steptron_metrics.server.writer import Deletion, Writer, size_of
from steptron_metrics.settings import Settings
from steptron_metrics.storage.base import Store

log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.05
_PRUNE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_MAX_SHOWN = 100
_RETRY_SECONDS = 2.0
_DELETE_SECONDS = 20.0
_MAX_UNWRITTEN = 64
_MAX_UNWRITTEN_BYTES = 256 << 20


class Pipeline:
    """Moves what is there one step on with each turn. What it holds is bounded: frames wait in the journal.

    Args:
        settings: of the server.
        store: is asked for what it has of a run.
        reducers, writer: do the work.
        space: on the folder's disk.

    Attributes:
        trouble: why it does not go on; empty when it does.
        unstored: iterations that the reducers or the writer have.
        num_pending: iterations of which frames have arrived and that are not stored yet, a second ago.
        pending: the oldest of those.
        ignored: frames that changed nothing, by reason, likewise.
    """

    def __init__(self, settings: Settings, store: Store, reducers: Reducers, writer: Writer, space: Space) -> None:
        self._settings, self._store, self._reducers, self._writer = settings, store, reducers, writer
        self._space = space
        self._tail = Tail(settings.journal)
        self._known: dict[str, Mapping[tuple[int, int], int]] = {}
        self._tracker = Tracker(
            settings.partial_after_seconds,
            self._tail.description,
            lambda run: self._known[run],
            max_large=settings.reducers + 3,
        )
        self._order = Order()
        self._notices: list[Notice] = []
        self._retry_at = 0.0
        self._pruned_at = time.monotonic()
        self._in_flight = 0
        self._deletions: queue.SimpleQueue[Deletion] = queue.SimpleQueue()
        self._looked_at = -float("inf")
        self.trouble = ""
        self.num_pending = 0
        self.pending: tuple[Waiting, ...] = ()
        self.ignored: dict[str, int] = {}

    @property
    def unstored(self) -> int:
        return self._in_flight + len(self._order.held()) + self._writer.unwritten

    def delete(self, run: str) -> None:
        """Deletes everything of a run; for other threads than that of the turns.

        Raises:
            MetricsError: it is refused, or not done within 20 seconds; it is then tried again until it is.
        """
        deletion = Deletion(run)
        self._deletions.put(deletion)
        if not deletion.done.wait(_DELETE_SECONDS):
            why = deletion.error or self._writer.trouble or "the writer is busy"
            raise MetricsError(
                f"run {run} is not deleted after {_DELETE_SECONDS:g} s, which is tried again until it is: {why}"
            )
        if deletion.error:
            raise MetricsError(f"run {run} is not deleted: {deletion.error}")

    def turn(self) -> None:
        """One round; waits a moment when there is nothing to do."""
        self._delete()
        taken = self._take_notices()
        self._submit()
        for result in self._reducers.results(0.0 if taken else _WAIT_SECONDS):
            self._in_flight -= 1
            key = (result.run, result.session_ns, result.iteration)
            if isinstance(result, Vanished):
                if self._order.finished(key, None):
                    self._tracker.drop(*key)
            else:
                self._tracker.reduced(result.run, size_of(result))
                self._order.finished(key, result if self._tracker.wants(*key) else None)
        ready = [one for one in self._order.ready() if self._tracker.wants(one.run, one.session_ns, one.iteration)]
        if ready:
            self._writer.put(ready)
        for written in self._writer.written():
            self._tracker.done(*written)
        if time.monotonic() - self._pruned_at >= _PRUNE_SECONDS:
            self._prune()
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._look()

    def _look(self) -> None:
        """For other threads, which must not touch the tracker."""
        now, now_ns = time.monotonic(), time.time_ns()
        self.num_pending, oldest = self._tracker.pending(_MAX_SHOWN)
        self.pending = tuple(
            Waiting(
                *(one.run, one.iteration, one.ranks, one.world_size, now_ns - int((now - one.since) * 1e9), one.missing)
            )
            for one in oldest
        )
        self._writer.waiting = {one.run: _sentence(one) for one in reversed(oldest) if one.missing}
        self.ignored = dict(self._tracker.ignored)
        for complaint in self._tracker.complaints():
            log.error("%s", complaint)
        self._looked_at = now

    def _take_notices(self) -> bool:
        """Whether there was anything new."""
        now = time.monotonic()
        if now < self._retry_at:
            return False
        if not self._notices:
            self._notices = self._tail.poll(without=self._tracker.full())
        if not self._notices:
            return False
        try:
            for run in {notice.run for notice in self._notices} - self._known.keys():
                self._known[run] = self._store.stored(run)
        except Exception as error:
            self._retry_at = now + _RETRY_SECONDS
            self.trouble = f"asking the database for what it has: {error}".strip()
            log.error("%s; again in %g s", self.trouble, _RETRY_SECONDS)
            return False
        self.trouble = ""
        self._tracker.take(self._notices, now)
        for run in {notice.run for notice in self._notices}:
            self._known[run] = {}  # the tracker has taken note
        self._notices = []
        return True

    def _submit(self) -> None:
        room = min(self._reducers.room, _MAX_UNWRITTEN - self.unstored)
        held = self._writer.unwritten_bytes + sum(map(size_of, self._order.held()))
        if room <= 0 or held >= _MAX_UNWRITTEN_BYTES:
            return
        for job in self._tracker.due(time.monotonic(), room):
            self._order.submitted(job.key)
            self._reducers.submit(job)
            self._in_flight += 1

    def _prune(self) -> None:
        settings = self._settings
        try:
            # Where the disk runs short raw values of what is stored go first, so that more can be stored.
            kept = 0 if self._space.is_short else settings.raw_iterations
            prune(settings.journal, self._tracker.is_done, kept, settings.journal_bytes)
        except OSError as error:
            log.error("old raw values cannot be deleted: %s", error)
        self._pruned_at = time.monotonic()

    def _delete(self) -> None:
        while not self._deletions.empty():
            deletion = self._deletions.get()
            run = deletion.run
            try:
                delete_run(self._settings.journal, run)
            except (OSError, ValueError) as error:
                log.error("the raw values of run %s cannot be deleted: %s", run, error)
            self._notices = [notice for notice in self._notices if notice.run != run]
            self._tracker.forget(run)
            self._order.forget(run)
            self._known.pop(run, None)
            self._writer.delete(deletion)
            log.info("run %s is to be deleted", run)


def _sentence(one: Pending) -> str:
    """For people: which iteration waits, and for whom."""
    missing = one.world_size - one.ranks
    more = f" and {missing - len(one.missing)} more" if missing > len(one.missing) else ""
    ranks = ", ".join(map(str, one.missing))
    return f"Of iteration {one.iteration} {one.ranks} of {one.world_size} ranks have sent, not {ranks}{more}."
