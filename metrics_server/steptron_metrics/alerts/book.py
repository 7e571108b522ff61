"""The alerts of a run: when they begin, what becomes of them, and when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from steptron_metrics.alerts import text
from steptron_metrics.alerts.rule import Rule
from steptron_metrics.results import Alert

MANY = "many"
"""Subject of the alert that speaks for all that would be too many."""


@dataclass(frozen=True)
class Sighting:
    """A series whose condition holds, or just held, in an iteration.

    Attributes:
        subject, layer, item: which.
        since: iteration in which it began.
        value, threshold: of this iteration; None where nothing was measured.
        shows: the value has not come back yet.
        fields: for the texts; computed only where they are needed.
    """

    subject: str
    layer: int | None
    item: int | None
    since: int
    value: float | None
    threshold: float
    shows: bool
    fields: Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class Change:
    """What happened to an alert."""

    alert: Alert
    what: Literal["began", "changed", "ended"]


class Book:
    """Open alerts of one run.

    Args:
        run: its name.
        known: the run's alerts in the store.
    """

    def __init__(self, run: str, known: Iterable[Alert]) -> None:
        self._run = run
        self._last_number = 0
        self._open: dict[tuple[str, str], Alert] = {}
        for alert in known:
            self._last_number = max(self._last_number, alert.number)
            if alert.ended_iteration is None:
                self._open[alert.rule, alert.subject] = alert

    def open_alerts(self, rule: str | None = None) -> list[Alert]:
        return [alert for (name, _), alert in self._open.items() if rule in (None, name)]

    def is_open(self, rule: str, subject: str) -> bool:
        return (rule, subject) in self._open

    def close(self, alert: Alert, iteration: int, reason: str) -> Change:
        """Ends an alert for another reason than that its condition cleared."""
        ended = replace(self._open.pop((alert.rule, alert.subject)), ended_iteration=iteration)
        return Change(replace(ended, saw=f"{ended.saw} {reason}"), "ended")

    def record(
        self,
        rule: Rule,
        iteration: int,
        time_ns: int,
        began: list[Sighting],
        ongoing: list[Sighting],
        ended: list[Sighting],
    ) -> list[Change]:
        """What one rule saw in an iteration.

        Args:
            time_ns: when the iteration ended.
            began, ongoing, ended: series whose condition holds from now on, holds still, and held until now; those of
                alerts that were opened together are told apart by having no alert of their own.
        """
        changes = [self._end(rule, seen, iteration) for seen in ended if self.is_open(rule.name, seen.subject)]
        own = [seen for seen in ongoing if self.is_open(rule.name, seen.subject)]
        changes += [self._update(rule, seen, iteration) for seen in own if seen.shows and seen.value is not None]
        summarised = [seen for seen in ongoing if not self.is_open(rule.name, seen.subject)]
        singles = sum(alert.subject != MANY for alert in self.open_alerts(rule.name))
        if self.is_open(rule.name, MANY) or singles + len(began) > rule.max_open:
            summarised += began
        else:
            changes += [self._begin(rule, seen, iteration, time_ns) for seen in began]
        changes += self._summary(rule, summarised, iteration, time_ns)
        return changes

    # ----------------------------------------------------------------------------------- single

    def _begin(self, rule: Rule, seen: Sighting, iteration: int, time_ns: int) -> Change:
        self._last_number += 1
        fields = seen.fields()
        value = float("nan") if seen.value is None else seen.value
        alert = Alert(
            number=self._last_number,
            run=self._run,
            rule=rule.name,
            severity=rule.severity,
            subject=seen.subject,
            layer=seen.layer,
            item=seen.item,
            since_iteration=seen.since,
            since_ns=time_ns,
            last_iteration=iteration,
            ended_iteration=None,
            value=value,
            worst=value,
            threshold=seen.threshold,
            saw=text.sentence(rule.saw, fields),
            cause=text.sentence(rule.cause, fields),
            remedy=text.sentence(rule.remedy, fields),
            wants_checkpoint=rule.checkpoint,
        )
        self._open[rule.name, seen.subject] = alert
        return Change(alert, "began")

    def _update(self, rule: Rule, seen: Sighting, iteration: int) -> Change:
        alert = self._open[rule.name, seen.subject]
        value = alert.value if seen.value is None else seen.value
        worst = min(alert.worst, value) if rule.is_below else max(alert.worst, value)
        saw = text.sentence(rule.saw, seen.fields())
        alert = replace(alert, last_iteration=iteration, value=value, worst=worst, saw=saw)
        self._open[rule.name, seen.subject] = alert
        return Change(alert, "changed")

    def _end(self, rule: Rule, seen: Sighting, iteration: int) -> Change:
        alert = self._open.pop((rule.name, seen.subject))
        value = alert.value if seen.value is None else seen.value
        return Change(replace(alert, ended_iteration=iteration, value=value), "ended")

    # ------------------------------------------------------------------------------------- many

    def _summary(self, rule: Rule, summarised: list[Sighting], iteration: int, time_ns: int) -> list[Change]:
        if not summarised:
            alert = self._open.pop((rule.name, MANY), None)
            return [] if alert is None else [Change(replace(alert, ended_iteration=iteration), "ended")]

        def severity(seen: Sighting) -> float:
            value = seen.threshold if seen.value is None else seen.value
            return -value if rule.is_below else value

        worst = max(summarised, key=severity)
        layers = sorted({seen.layer for seen in summarised if seen.layer is not None})
        if layers:
            places = f" in {'layer' if len(layers) == 1 else 'layers'} {text.listed(layers)}"
        else:
            # Ranks: a node is known by them.
            ordered = sorted(summarised, key=lambda seen: -1 if seen.item is None else seen.item)
            places = f" ({text.listed([seen.subject for seen in ordered], most=32)})"
        count = f"{len(summarised)} at once{places}. The worst: "
        since = min(seen.since for seen in summarised)
        one = replace(worst, subject=MANY, layer=None, item=None, since=since)
        if self.is_open(rule.name, MANY):
            change = self._update(rule, one, iteration) if worst.shows and worst.value is not None else None
        else:
            change = self._begin(rule, one, iteration, time_ns)
        if change is None:
            return []
        alert = replace(change.alert, saw=count + change.alert.saw)
        self._open[rule.name, MANY] = alert
        return [replace(change, alert=alert)]
