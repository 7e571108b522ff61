"""Restarts, resumed runs, partial iterations, and what is of no metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules, rules_from
from steptron_metrics.alerts.rule import Rule
from steptron_metrics.results import Event, Iteration
from tests.metrics_server.alerts.runs import HealthyRun, MemoryStore, aggregate, iteration, packed

LAYER, EXPERT = 4, 17
BLOW = range(150, 210)
LENGTH = 250
BEGAN, ENDED = 178, 229


def blown_up(seed: int = 1) -> list[Iteration]:
    """Grows from 150 on, and is sound again from 210 on."""
    run, made = HealthyRun(seed, (LAYER,)), []
    for number in range(1, LENGTH + 1):
        values = run.step(number)
        if number in BLOW:
            values["moe.output_norm_max", LAYER][EXPERT] *= 1.12 ** (number - BLOW.start)
        made.append(packed(number, values))
    return made


def write(store: MemoryStore, alerts: Alerts, iterations: Iterable[Iteration]) -> list[Change]:
    """As the server does: alerts before the iteration."""
    seen = []
    for one in iterations:
        changes = alerts.evaluate(one)
        store.put_alerts([change.alert for change in changes])
        store.put([one])
        seen += [change for change in changes if change.what != "changed"]
    return seen


def told(seen: Sequence[Change]) -> list[tuple[str, int, int, str, int | None]]:
    return [
        (one.what, one.alert.number, one.alert.since_iteration, one.alert.subject, one.alert.ended_iteration)
        for one in seen
    ]


@pytest.fixture(scope="module")
def run_with_blow_up() -> list[Iteration]:
    return blown_up()


@pytest.fixture(scope="module")
def passes(run_with_blow_up: list[Iteration]) -> list[dict]:
    """The alerts in the store after each iteration of a server that never restarts, from none on."""
    store = MemoryStore()
    alerts, kept = Alerts(store, load_rules()), [{}]
    for one in run_with_blow_up:
        write(store, alerts, [one])
        kept.append(dict(store.alerts_kept))
    return kept


def test_the_run_that_restarts_are_tried_on(passes: list[dict]) -> None:
    (alert,) = passes[-1].values()
    assert (alert.since_iteration, alert.ended_iteration) == (BEGAN - 4, ENDED)


@pytest.mark.parametrize("stop", [60, BEGAN - 4, BEGAN - 1, BEGAN, BEGAN + 1, 209, ENDED - 1, ENDED, ENDED + 1])
@pytest.mark.parametrize("lost", [False, True])
def test_a_restart_changes_nothing(
    stop: int, lost: bool, run_with_blow_up: list[Iteration], passes: list[dict]
) -> None:
    """``lost``: killed between storing the alerts of an iteration and the iteration."""
    store = MemoryStore()
    store.put(run_with_blow_up[: stop - lost])
    store.put_alerts(passes[stop].values())
    again = Alerts(store, load_rules())
    assert again.begin() == []
    write(store, again, run_with_blow_up[stop - lost :])
    mine, theirs = list(store.alerts_kept.values()), list(passes[-1].values())
    assert len(mine) == len(theirs) == 1
    for field in vars(theirs[0]):
        value = getattr(theirs[0], field)
        assert getattr(mine[0], field) == (pytest.approx(value, rel=0.02) if isinstance(value, float) else value), field


def test_the_same_iteration_twice_or_late(run_with_blow_up: list[Iteration]) -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    write(store, alerts, run_with_blow_up[:195])
    assert len(store.alerts_kept) == 1
    for one in run_with_blow_up[180:195]:
        assert alerts.evaluate(one) == []
    fresh = Alerts(store, load_rules())
    for one in run_with_blow_up[180:195]:
        assert fresh.evaluate(one) == []


def test_a_run_that_goes_back_ends_what_it_makes_again(run_with_blow_up: list[Iteration]) -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    write(store, alerts, run_with_blow_up[:200])
    (first,) = store.alerts_kept.values()
    again = HealthyRun(7, (LAYER,))
    later = [again.iteration(number, session_ns=2) for number in range(120, 150)]
    seen = write(store, alerts, later)
    assert told(seen) == [("ended", first.number, first.since_iteration, first.subject, 200)]
    assert "went back and makes iteration 120 once more" in seen[0].alert.saw
    # Frames of the session before are of no interest any more.
    assert alerts.evaluate(run_with_blow_up[200]) == []


def test_a_run_that_goes_on_keeps_its_alert(run_with_blow_up: list[Iteration]) -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    write(store, alerts, run_with_blow_up[:200])
    resumed = [Iteration(**(vars(one) | {"session_ns": 2})) for one in run_with_blow_up[200:]]
    for engine in (Alerts(store, load_rules()), alerts):
        assert [change.what for change in engine.evaluate(resumed[0])] == ["changed"]


def test_an_alert_older_than_what_is_looked_back_on_ends_too() -> None:
    rules = rules_from({"high": RULE | {"above": 10, "for": 2, "clear_for": 3, "clear_at": 0.5}}, "here")
    store = MemoryStore()
    write(store, Alerts(store, rules), [of_loss(number, 100.0) for number in range(1, 60)])
    alerts = Alerts(store, rules)
    seen = write(store, alerts, [of_loss(number, 1.0) for number in range(60, 70)])
    assert told(seen) == [("ended", 1, 1, "run", 62)]


def test_rules_that_are_gone_end_their_alerts() -> None:
    store = MemoryStore()
    rules = rules_from({"high": RULE | {"above": 10}}, "here")
    write(store, Alerts(store, rules), [of_loss(1, 100.0)])
    (change,) = Alerts(store, load_rules()).begin()
    assert change.what == "ended" and "taken away or switched off" in change.alert.saw


RULE = {
    "watch": {"metric": "train.loss", "statistic": "mean"},
    "saw": "{value}",
    "cause": "c",
    "remedy": "r",
}


def of_loss(number: int, loss: float, **fields: object) -> Iteration:
    return iteration(number, [aggregate("train.loss", -1, loss)], **fields)


def test_partial_iterations_neither_add_nor_break(run_with_blow_up: list[Iteration]) -> None:
    """Half of the experts are missing from every third iteration."""
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    seen = []
    for one in run_with_blow_up:
        if one.iteration % 3 == 0:
            cut = []
            for table in one.aggregates:
                if table.metric == "train.loss":
                    continue  # its rank is missing
                values = table.values.copy()
                values[0, : max(values.shape[1] // 2, 1)] = 0
                cut.append(type(table)(table.metric, table.layer, values))
            one = Iteration(**(vars(one) | {"aggregates": tuple(cut), "missing": (0, 1)}))
        seen += write(store, alerts, [one])
    kinds = {change.alert.rule for change in seen}
    assert kinds == {"blow_up_output", "missing_ranks"}
    assert [change.what for change in seen if change.alert.rule == "missing_ranks"] == ["began"]


def test_missing_ranks_and_dropped_frames_name_them() -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    seen = write(store, alerts, [of_loss(1, 1.0, missing=(3, 5), dropped=7)])
    assert {change.alert.rule: change.alert.saw.split(":")[0] for change in seen} == {
        "missing_ranks": "2 ranks have not sent iteration 1 in time",
        "dropped_frames": "Clients had to give up 7 frames up to iteration 1.",
    }
    assert "ranks 3, 5." in next(c.alert.saw for c in seen if c.alert.rule == "missing_ranks")
    seen = write(store, alerts, [of_loss(number, 1.0) for number in range(2, 13)])
    assert [(change.what, change.alert.rule, change.alert.ended_iteration) for change in seen] == [
        ("ended", "missing_ranks", 4),
        ("ended", "dropped_frames", 11),
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number(value: float) -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    bad = aggregate("train.loss", -1, value, 0 if np.isnan(value) else 1)
    norms = aggregate("moe.output_norm_max", 3, [1, np.inf, 2])
    (change,) = write(store, alerts, [iteration(1, [bad, norms])])
    assert change.alert.rule == "non_finite" and change.alert.value == 2
    assert "train.loss, moe.output_norm_max of expert 1 of layer 3" in change.alert.saw


def test_what_was_not_measured_is_no_bad_number() -> None:
    norms = aggregate("moe.output_norm_max", 3, [1, 2, 3], [1, 0, 1])
    ep_loss = aggregate("train.ep_loss", -1, 1.0, 0)
    assert Alerts(MemoryStore(), load_rules()).evaluate(iteration(1, [norms, ep_loss])) == []


class Clock:
    ns = 10**18

    def __call__(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@pytest.fixture
def silence() -> tuple[MemoryStore, Clock, tuple[Rule, ...]]:
    return MemoryStore(), Clock(), load_rules()


def tick(store: MemoryStore, alerts: Alerts) -> list[Change]:
    changes = alerts.tick()
    store.put_alerts([change.alert for change in changes])
    return changes


def test_stale_run(silence: tuple[MemoryStore, Clock, tuple[Rule, ...]]) -> None:
    store, clock, rules = silence
    alerts = Alerts(store, rules, stale_after_seconds=60, clock_ns=clock)
    write(store, alerts, [of_loss(1, 1.0)])
    clock.sleep(59)
    assert tick(store, alerts) == []
    clock.sleep(2)
    (change,) = tick(store, alerts)
    assert (change.what, change.alert.rule, change.alert.subject) == ("began", "stale_run", "run")
    assert "61 seconds (threshold 60)" in change.alert.saw
    clock.sleep(10)
    assert tick(store, alerts) == []
    # Nor after a restart.
    alerts = Alerts(store, rules, stale_after_seconds=60, clock_ns=clock)
    assert tick(store, alerts) == []
    seen = write(store, alerts, [of_loss(2, 1.0)])
    assert told(seen) == [("ended", 1, 1, "run", 2)]
    clock.sleep(61)
    assert [change.alert.number for change in tick(store, alerts)] == [2]
    clock.sleep(86_400)
    assert [(change.what, change.alert.number) for change in tick(store, alerts)] == [("ended", 2)]
    assert tick(store, alerts) == []


def test_a_run_that_said_it_has_finished_is_not_stale(silence: tuple[MemoryStore, Clock, tuple[Rule, ...]]) -> None:
    store, clock, rules = silence
    alerts = Alerts(store, rules, stale_after_seconds=60, clock_ns=clock)
    write(store, alerts, [of_loss(1, 1.0, events=(Event("finished", ""),), ended_ns=clock.ns)])
    clock.sleep(100)
    assert alerts.tick() == []
    assert Alerts(store, rules, stale_after_seconds=60, clock_ns=clock).tick() == []


def test_old_runs_are_over_and_young_ones_are_missed(silence: tuple[MemoryStore, Clock, tuple[Rule, ...]]) -> None:
    store, clock, rules = silence
    store.put([of_loss(1, 1.0, run="old", ended_ns=clock.ns - int(90_000e9))])
    store.put([of_loss(1, 1.0, run="young", ended_ns=clock.ns - int(3600e9))])
    changes = Alerts(store, rules, stale_after_seconds=60, clock_ns=clock).tick()
    assert [change.alert.run for change in changes] == ["young"]


def test_a_deleted_run_begins_anew() -> None:
    store = MemoryStore()
    alerts = Alerts(store, load_rules())
    write(store, alerts, [of_loss(1, 1.0, missing=(1,))])
    store.kept.clear()
    store.alerts_kept.clear()
    alerts.forget("r")
    assert [change.alert.number for change in write(store, alerts, [of_loss(1, 1.0, missing=(1,))])] == [1]
