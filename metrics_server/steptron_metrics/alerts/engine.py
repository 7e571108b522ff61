"""Judges every iteration by every rule."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from steptron_metrics.alerts import text
from steptron_metrics.alerts.book import Book, Change, Sighting
from steptron_metrics.alerts.loading import FIELDS
from steptron_metrics.alerts.rule import Rule, SilenceWatch
from steptron_metrics.alerts.series import IterationSource
from steptron_metrics.alerts.watchers import FigureWatcher, SeriesWatcher, watcher
from steptron_metrics.results import FINISHED, Alert, Iteration
from steptron_metrics.storage.base import Store

_MAX_RUNS = 16


class Alerts:
    """What the rules make of the runs.

    It reads the store, where it finds everything of earlier iterations and alerts, and writes nothing: whoever calls
    stores the changes, before the iteration itself, so that after a crash the same iteration brings the same alert.

    Args:
        store: to read from.
        rules: see ``loading``.
        stale_after_seconds: threshold of silence, for rules that name none.
        clock_ns: nanoseconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        rules: Sequence[Rule],
        *,
        stale_after_seconds: float = 600.0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._rules = tuple(rule for rule in rules if not isinstance(rule.watch, SilenceWatch))
        self._silences = tuple(
            rule if rule.threshold is not None else replace(rule, threshold=stale_after_seconds)
            for rule in rules
            if isinstance(rule.watch, SilenceWatch)
        )
        self._clock_ns = clock_ns
        self._states: OrderedDict[str, _RunState] = OrderedDict()
        self._books: dict[str, Book] = {}
        self._heard: dict[str, _Heard] | None = None

    def begin(self) -> list[Change]:
        """Ends alerts of rules that are no more; called once."""
        names = {rule.name for rule in (*self._rules, *self._silences)}
        gone = [alert for alert in self._store.alerts(open_only=True) if alert.rule not in names]
        return [
            self._book(alert.run).close(alert, alert.last_iteration, "The rule was taken away or switched off.")
            for alert in gone
        ]

    def evaluate(self, iteration: Iteration) -> list[Change]:
        """Judges an iteration; iterations of a run come in ascending order, those that do not are passed over.

        An iteration that was judged before changes nothing. The first one of a later session that goes back ends the
        alerts of the iterations that it takes the place of.
        """
        self._all_heard()
        try:
            state, changes = self._state(iteration)
        except Exception:
            # The store does not answer: what was begun is begun anew.
            self._states.pop(iteration.run, None)
            self._books.pop(iteration.run, None)
            raise
        if state is None:
            return []
        changes += self._speaks(iteration, state.book)
        source = IterationSource(iteration)
        for one in state.watchers:
            changes += one.judge(iteration, source, state.book)
        state.last = iteration.iteration
        return changes

    def tick(self, waiting: Mapping[str, str] | None = None) -> list[Change]:
        """Looks for runs that nothing comes from any more.

        Args:
            waiting: of runs of which an iteration is not complete yet, in a sentence which one, and who has not sent.
        """
        changes = []
        now = self._clock_ns()
        for run, heard in self._all_heard().items():
            if heard.finished:
                continue
            seconds = (now - heard.last_ns) / 1e9
            for rule in self._silences:
                assert isinstance(rule.watch, SilenceWatch) and rule.threshold is not None
                stale = rule.threshold < seconds <= rule.watch.over_after
                if stale and rule.name not in heard.stale:
                    heard.stale.add(rule.name)
                    if not self._book(run).is_open(rule.name, "run"):
                        seen = _silence(rule, seconds, heard, (waiting or {}).get(run, ""))
                        changes += self._book(run).record(rule, heard.last_iteration, now, [seen], [], [])
                elif seconds > rule.watch.over_after and rule.name in heard.stale:
                    heard.stale.discard(rule.name)
                    for alert in self._book(run).open_alerts(rule.name):
                        changes.append(self._book(run).close(alert, alert.last_iteration, "The run counts as over."))
        return changes

    def forget(self, run: str) -> None:
        """The run was deleted."""
        self._states.pop(run, None)
        self._books.pop(run, None)
        self._all_heard().pop(run, None)

    # ------------------------------------------------------------------------------------ states

    def _state(self, iteration: Iteration) -> tuple[_RunState | None, list[Change]]:
        """The run's state as of the iteration before; None where the iteration is not to be judged."""
        run = iteration.run
        state = self._states.get(run)
        changes: list[Change] = []
        if state is None:
            stored = self._store.stored(run)
            session = max((session for session, _ in stored), default=iteration.session_ns)
            last = max((number for _, number in stored), default=0)
            if iteration.session_ns < session or (iteration.session_ns == session and iteration.iteration <= last):
                return None, []
            before = min(last, iteration.iteration - 1)
            book = self._book(run)
            changes = _go_back(book, iteration) if iteration.iteration <= last else []
            state = self._restore(run, iteration.session_ns, before, book)
        elif iteration.session_ns > state.session_ns:
            if iteration.iteration <= state.last:
                changes = _go_back(state.book, iteration)
                state = self._restore(run, iteration.session_ns, iteration.iteration - 1, state.book)
            state.session_ns = iteration.session_ns
        elif iteration.session_ns < state.session_ns or iteration.iteration <= state.last:
            return None, []
        self._keep(run, state)
        return state, changes

    def _keep(self, run: str, state: _RunState) -> None:
        self._states[run] = state
        self._states.move_to_end(run)
        while len(self._states) > _MAX_RUNS:
            self._states.popitem(last=False)

    def _restore(self, run: str, session_ns: int, last: int, book: Book) -> _RunState:
        watchers = [watcher(rule) for rule in self._rules]
        if last > 0:
            alerts = self._alerts_of(run)
            for one in watchers:
                one.restore(self._store, run, last, alerts, book)
        return _RunState(book, session_ns, last, watchers)

    def _book(self, run: str) -> Book:
        book = self._books.get(run)
        if book is None:
            book = self._books[run] = Book(run, self._alerts_of(run))
        return book

    def _alerts_of(self, run: str) -> list[Alert]:
        try:
            return self._store.alerts(run)
        except KeyError:
            # No iteration is stored yet; alerts of its first one may be.
            return [alert for alert in self._store.alerts() if alert.run == run]

    # ----------------------------------------------------------------------------------- silence

    def _all_heard(self) -> dict[str, _Heard]:
        if self._heard is None:
            open_alerts = {(alert.run, alert.rule) for alert in self._store.alerts(open_only=True)}
            heard = {}
            for run in self._store.runs():
                events = self._store.events(run.name, run.last_iteration, run.last_iteration)
                heard[run.name] = _Heard(
                    run.last_ended_ns,
                    run.last_iteration,
                    FINISHED in events.column("kind").to_pylist(),
                    {rule.name for rule in self._silences if (run.name, rule.name) in open_alerts},
                )
            self._heard = heard
        return self._heard

    def _speaks(self, iteration: Iteration, book: Book) -> list[Change]:
        heard = self._all_heard().get(iteration.run)
        finished = any(event.kind == FINISHED for event in iteration.events)
        missing = iteration.missing
        self._all_heard()[iteration.run] = _Heard(self._clock_ns(), iteration.iteration, finished, missing=missing)
        if heard is None or not heard.stale:
            return []
        return [
            book.close(alert, iteration.iteration, "It goes on.")
            for rule in self._silences
            for alert in book.open_alerts(rule.name)
        ]


@dataclass
class _RunState:
    """``last``: the latest iteration that was judged."""

    book: Book
    session_ns: int
    last: int
    watchers: list[SeriesWatcher | FigureWatcher]


@dataclass
class _Heard:
    """When a run was heard last, by which rules it is called stale, and which ranks its last iteration is without."""

    last_ns: int
    last_iteration: int
    finished: bool
    stale: set[str] = field(default_factory=set)
    missing: tuple[int, ...] = ()


def _go_back(book: Book, iteration: Iteration) -> list[Change]:
    """Ends the alerts of iterations that are made once more."""
    first = iteration.iteration
    reason = f"The run went back and makes iteration {first} once more."
    return [
        book.close(alert, alert.last_iteration, reason)
        for alert in book.open_alerts()
        if alert.since_iteration >= first
    ]


def _silence(rule: Rule, seconds: float, heard: _Heard, waits: str) -> Sighting:
    last_iteration = heard.last_iteration
    if not waits and heard.missing:
        waits = f"It is without {'rank' if len(heard.missing) == 1 else 'ranks'} {text.listed(heard.missing)}."
    elif not waits:
        waits = "All of its ranks had sent it."
    fields = dict.fromkeys(FIELDS, "") | {
        "value": text.figure(round(seconds)),
        "threshold": text.figure(rule.threshold or 0.0),
        "iteration": str(last_iteration),
        "since": str(last_iteration),
        "where": "the run",
        "detail": waits,
    }
    return Sighting("run", None, None, last_iteration, seconds, rule.threshold or 0.0, True, lambda: fields)
