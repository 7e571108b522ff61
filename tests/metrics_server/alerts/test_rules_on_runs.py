"""The default rules on made-up runs: pathologies are seen on the right layer and expert, sound runs are not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import numpy as np
import pytest

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.results import Alert
from tests.metrics_server.alerts.runs import EXPERTS, HealthyRun, MemoryStore, packed

Values = dict[tuple[str, int], np.ndarray]
START, LAYER, EXPERT = 200, 4, 17


@cache
def until_start(seed: int) -> tuple[HealthyRun, Alerts]:
    run, alerts = HealthyRun(seed), Alerts(MemoryStore(), load_rules())
    for number in range(1, START):
        assert alerts.evaluate(run.iteration(number)) == []
    return run, alerts


def judge(plant: Callable[[Values, int], None], steps: int, seed: int = 0) -> list[tuple[int, Change]]:
    """What is seen from ``START`` on of a run that is sound before."""
    run, alerts = deepcopy(until_start(seed))
    seen = []
    for number in range(START, steps + 1):
        values = run.step(number)
        plant(values, number - START)
        for change in alerts.evaluate(packed(number, values)):
            if change.what != "changed":
                seen.append((number, change))
    return seen


def only_alert(plant: Callable[[Values, int], None], steps: int, seed: int = 0) -> tuple[int, Alert]:
    """The single alert that a planted pathology leads to, and the iterations after the planting."""
    seen = judge(plant, steps, seed)
    assert [change.what for _, change in seen] == ["began"], [(n, c.what, c.alert.subject) for n, c in seen]
    return seen[0][0] - START, seen[0][1].alert


@pytest.mark.parametrize("seed", range(10))
def test_sound_runs_are_left_alone(seed: int) -> None:
    assert judge(lambda values, since: None, START + 40, seed) == []


def test_the_sound_runs_scatter_as_they_should() -> None:
    values = [HealthyRun(seed).step(number)["moe.output_norm_max", 2] for seed in range(5) for number in (1, 10, 30)]
    ratios = np.array([row.max() / np.median(row) for row in values])
    assert ratios.min() > 2 and ratios.max() > 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("metric", ["intermediate", "output"])
def test_blow_up_of_five_per_cent_a_step(metric: str, seed: int) -> None:
    def grow(values: Values, since: int) -> None:
        values[f"moe.{metric}_norm_max", LAYER][EXPERT] *= 1.05**since

    after, alert = only_alert(grow, START + 90, seed)
    # A factor of 10 over what was normal is reached after 47 steps.
    assert 25 < after <= 70
    assert (alert.rule, alert.layer, alert.item, alert.severity) == (f"blow_up_{metric}", LAYER, EXPERT, "critical")
    assert alert.subject == "layer 4 expert 17" and alert.wants_checkpoint
    assert alert.since_iteration == START + after - 4
    assert 10 < alert.value < 40 and "expert 17 of layer 4" in alert.saw and "32 experts" in alert.saw
    assert "Activation clipping" in alert.remedy and f"before iteration {alert.since_iteration}" in alert.remedy
    assert "{" not in alert.saw + alert.cause + alert.remedy


def test_sudden_blow_up_within_five_iterations() -> None:
    def jump(values: Values, since: int) -> None:
        values["moe.output_norm_max", LAYER][EXPERT] = 10_000

    after, alert = only_alert(jump, START + 10)
    assert after == 4 and alert.value > 1000


def test_blow_up_in_the_first_steps_too() -> None:
    run, alerts = HealthyRun(0), Alerts(MemoryStore(), load_rules())
    for number in range(1, 20):
        values = run.step(number)
        values["moe.output_norm_max", 3][5] = 5000
        began = [change.alert for change in alerts.evaluate(packed(number, values)) if change.what == "began"]
        assert [alert.subject for alert in began] == (["layer 3 expert 5"] if number == 5 else [])


def test_collapse_while_tokens_arrive() -> None:
    def shrink(values: Values, since: int) -> None:
        for name in ("rms", "max"):
            values[f"moe.output_norm_{name}", LAYER][EXPERT] *= 0.95**since

    after, alert = only_alert(shrink, START + 90)
    assert 35 < after <= 65
    assert (alert.rule, alert.layer, alert.item) == ("expert_collapse", LAYER, EXPERT)
    assert "of an even share of the tokens still reaches it" in alert.saw and alert.value < 0.1


def test_small_norms_of_an_expert_without_tokens_are_no_collapse_of_healthy_routing() -> None:
    def starve(values: Values, since: int) -> None:
        values["moe.output_norm_rms", LAYER][EXPERT] *= 0.001
        values["moe.tokens", LAYER][EXPERT] = 0

    after, alert = only_alert(starve, START + 80)
    assert (alert.rule, alert.layer, alert.item, after) == (
        "routing_collapse",
        LAYER,
        EXPERT,
        50,
    )  # 200 is still warming up


def test_straggling_group() -> None:
    def crowd(values: Values, since: int) -> None:
        values["moe.group_load", LAYER] = np.array([0.7, 0.7, 1.9, 0.7])
        values["moe.group_load_max", LAYER] = np.array([1.9])

    after, alert = only_alert(crowd, START + 120)
    assert (alert.rule, alert.layer, after) == ("ep_straggling", LAYER, 100)  # 200 is still warming up
    assert alert.subject == "layer 4" and "1.9 times" in alert.saw and "100 iterations" in alert.saw
    assert alert.item == 2 and "expert-parallel rank" in alert.saw and "rank 2 of the group" in alert.saw


def test_muon_outlier_at_once() -> None:
    def explode(values: Values, since: int) -> None:
        if since == 3:
            values["muon.largest.expert_up", LAYER][EXPERT] = 2e11

    seen = judge(explode, START + 30)
    assert [(number - START, change.what) for number, change in seen] == [(3, "began"), (13, "ended")]
    alert = seen[0][1].alert
    assert (alert.rule, alert.subject) == ("muon_outlier", "layer 4 expert 17 expert_up")
    assert "float16" in alert.remedy and "muon.largest.expert_up" in alert.saw


def test_falling_confidence() -> None:
    def fall(values: Values, since: int) -> None:
        values["moe.confidence", LAYER] *= 0.99 ** max(since - 50, 0)

    after, alert = only_alert(fall, START + 140)
    assert (alert.rule, alert.layer, alert.item) == ("falling_confidence", LAYER, None)
    assert 100 < after < 125


def test_slow_rank() -> None:
    def slow(values: Values, since: int) -> None:
        values["rank.compute_seconds", -1] *= np.array([1, 1, 1, 6.0])

    after, alert = only_alert(slow, START + 40)
    assert (alert.rule, alert.subject, alert.item, alert.layer) == ("straggling_rank", "rank 3", 3, None)
    assert after == 29 and alert.saw.startswith("Rank 3 is slow")


def test_slowness_that_moves_from_rank_to_rank_is_noise() -> None:
    def slow(values: Values, since: int) -> None:
        values["rank.compute_seconds", -1][since // 10 % 4] *= 6

    assert judge(slow, START + 90) == []


def test_many_at_once_are_one_alert() -> None:
    def all_at_once(values: Values, since: int) -> None:
        if since < 40:
            for layer in (2, 3):
                values["moe.output_norm_max", layer][: EXPERTS // 4] *= 500

    seen = judge(all_at_once, START + 90)
    assert [(change.what, change.alert.subject) for _, change in seen] == [("began", "many"), ("ended", "many")]
    alert = seen[0][1].alert
    assert alert.saw.startswith("16 at once in layers 2, 3. The worst: ") and alert.layer is None


def test_one_after_the_other_up_to_eight_then_the_rest_together() -> None:
    def spread(values: Values, since: int) -> None:
        values["moe.output_norm_max", 2][: 1 + since // 10] *= 500

    seen = judge(spread, START + 100)
    subjects = [change.alert.subject for _, change in seen]
    assert subjects == [f"layer 2 expert {expert}" for expert in range(8)] + ["many"]
    assert {change.what for _, change in seen} == {"began"}


def test_hysteresis() -> None:
    """A value around its threshold makes one alert; it ends 20 iterations after it has come back by 40 per cent."""

    def swing(values: Values, since: int) -> None:
        row = values["moe.output_norm_max", LAYER]
        factor = 60 if since < 10 or (since < 60 and since % 2) else 25 if since < 60 else 5
        row[EXPERT] = factor * np.median(row)

    seen = judge(swing, START + 120)
    assert [(number - START, change.what) for number, change in seen] == [(4, "began"), (79, "ended")]


def test_a_single_spike_is_none() -> None:
    def spike(values: Values, since: int) -> None:
        if since % 5 != 4:
            values["moe.output_norm_max", LAYER][EXPERT] *= 500

    assert judge(spike, START + 60) == []


def test_a_lasting_level_below_the_regardless_one_is_its_own_baseline() -> None:
    """An expert that has always been at 25 times the median is no growth."""
    run, alerts, seen = HealthyRun(0), Alerts(MemoryStore(), load_rules()), []
    for number in range(1, 300):
        values = run.step(number)
        row = values["moe.output_norm_max", LAYER]
        row[EXPERT] = np.median(row) * 25
        seen += alerts.evaluate(packed(number, values))
    assert seen == []
