from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from steptron_metrics import catalogue
from steptron_metrics.reducer.derived import derive
from steptron_metrics.reducer.peers import over_others
from steptron_metrics.results import STATISTICS, Aggregate, Derived


def aggregate(metric: str, layer: int, **rows: Sequence[float]) -> Aggregate:
    """Rows that are not given are 99, so that taking another one shows; items that are NaN in a row have count 0."""
    items = len(next(iter(rows.values())))
    values = np.full((len(STATISTICS), items), 99, np.float32)
    for name, row in rows.items():
        values[STATISTICS.index(name)] = row
    absent = np.isnan(values).any(axis=0)
    values[:, absent] = math.nan
    values[0, absent] = 0
    return Aggregate(metric, layer, values)


def derived(*aggregates: Aggregate) -> dict[str, Derived]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = derive(aggregates)
    assert [one.name for one in result] == sorted({one.name for one in result})
    for one in result:
        assert (one.layers.dtype, one.values.dtype, one.items.dtype) == (np.int32, np.float32, np.int32)
        assert one.layers.tolist() == sorted(set(one.layers.tolist()))
        assert len(one.layers) == len(one.values) == len(one.items)
    return {one.name: one for one in result}


def figures(one: Derived) -> dict[int, tuple[float, int]]:
    return {
        layer: (value, item)
        for layer, value, item in zip(one.layers.tolist(), one.values.tolist(), one.items.tolist(), strict=True)
    }


def test_a_blown_up_and_a_collapsed_expert() -> None:
    got = derived(
        aggregate("moe.output_norm_max", 44, max=[5, 12000, 6, 7, 8]),
        aggregate("moe.output_norm_max", 3, max=[5, 6, 0.001, 7, 8]),
    )
    figures_of = ("max_over_median", "min_over_median", "median", "over_layers")
    assert set(got) == {f"moe.output_norm_max.{figure}" for figure in figures_of}
    assert figures(got["moe.output_norm_max.median"]) == {44: (7, -1), 3: (6, -1)}
    levels = figures(got["moe.output_norm_max.over_layers"])
    assert levels == {44: (pytest.approx(7 / 6), -1), 3: (pytest.approx(6 / 7), -1)}
    high, low = figures(got["moe.output_norm_max.max_over_median"]), figures(got["moe.output_norm_max.min_over_median"])
    assert high[44] == (pytest.approx(12000 / 7), 1)
    assert high[3] == (pytest.approx(8 / 6), 4)
    assert low[44] == (pytest.approx(5 / 7), 0)
    assert low[3] == (pytest.approx(0.001 / 6), 2)


@pytest.mark.parametrize("metric", [one for one in catalogue.METRICS if one.relative], ids=lambda one: one.name)
def test_relative_metrics_are_of_their_headline(metric: catalogue.Metric) -> None:
    name = f"{metric.name}.expert_up" if metric.by_role else metric.name
    got = derived(aggregate(name, 0, **{metric.headline: [2, 4, 8]}))
    assert figures(got[f"{name}.max_over_median"]) == {0: (2, 2)}
    assert figures(got[f"{name}.min_over_median"]) == {0: (0.5, 0)}


def test_headlines_are_as_the_signatures_need_them() -> None:
    headlines = {one.name: one.headline for one in catalogue.METRICS if one.relative}
    assert headlines["moe.output_norm_max"] == headlines["moe.intermediate_norm_max"] == "max"
    assert headlines["moe.output_norm_rms"] == headlines["moe.intermediate_norm_rms"] == "rms"
    assert headlines["moe.tokens"] == headlines["weight.norm"] == "mean"


def test_metrics_that_are_not_relative_have_no_spread() -> None:
    assert derived(aggregate("moe.probability", 0, mean=[1, 2, 3]), aggregate("my.own", 0, mean=[1, 2, 3])) == {}


def test_items_that_are_not_measured_are_left_out() -> None:
    got = derived(aggregate("moe.tokens", 0, mean=[math.nan, 10, 20, math.nan, 60]))
    assert figures(got["moe.tokens.max_over_median"]) == {0: (3, 4)}
    assert figures(got["moe.tokens.min_over_median"]) == {0: (0.5, 1)}
    assert derived(aggregate("moe.tokens", 0, mean=[math.nan, 10, math.nan])) == {}
    assert derived(aggregate("weight.norm.router", 0, mean=[10])) == {}


@pytest.mark.parametrize(
    ("row", "high", "low"),
    [
        ([0, 0, 0, 9], (math.inf, 3), (0, 0)),  # most have collapsed: no NaN may hide it
        ([0, 0, 0, 0], (math.nan, 0), (math.nan, 0)),
        ([1, 2, 3, math.inf], (math.inf, 3), (0.4, 0)),
        ([1, math.inf, math.inf], (math.nan, 1), (math.nan, 0)),  # no collapse
    ],
)
def test_spreads_at_the_edge(row: list[float], high: tuple[float, int], low: tuple[float, int]) -> None:
    got = derived(aggregate("moe.tokens", 0, mean=row))
    for name, (value, item) in (("max", high), ("min", low)):
        actual, of = figures(got[f"moe.tokens.{name}_over_median"])[0]
        assert of == item
        assert actual == pytest.approx(value, nan_ok=True)


def test_straggler_factors() -> None:
    got = derived(
        aggregate("moe.group_load", 2, mean=[0.9, 1.2, 0.9], max=[2.5, 1.5, 1.1]),
        aggregate("moe.group_load_max", 2, mean=[1.4], max=[2.5]),
        aggregate("moe.group_load", 5, mean=[1, 1, math.nan], max=[1, 1, math.nan]),  # not known side by side
        aggregate("moe.group_share", 2, mean=[1.1, 0.9], max=[1.7, 1.6]),
        aggregate("moe.group_share_max", 2, mean=[1.3], max=[1.7]),
    )
    assert figures(got["moe.straggler_factor"]) == {2: (pytest.approx(1.4), 1)}
    assert figures(got["moe.straggler_worst"]) == {2: (2.5, 0), 5: (1, 0)}
    assert figures(got["moe.group_imbalance"]) == {2: (pytest.approx(1.3), 0)}


def test_cosine_between_gradient_and_weight() -> None:
    got = derived(
        aggregate("gradient.dot_weight.expert_down", 7, mean=[0.1, -1.8, 0.5, 5]),
        aggregate("gradient.norm.expert_down", 7, mean=[1, 0.5, 1, 0]),
        aggregate("weight.norm.expert_down", 7, mean=[4, 4, 4, 4]),
        aggregate("gradient.dot_weight.expert_up", 7, mean=[3]),
        aggregate("gradient.norm.expert_up", 7, mean=[2]),
        aggregate("weight.norm.expert_up", 7, mean=[2]),
        aggregate("gradient.dot_weight.expert_up", 8, mean=[3]),  # its norms are missing
    )
    # Signed: the one grows its weight, the other shrinks it.
    assert figures(got["gradient.cosine_min.expert_down"]) == {7: (pytest.approx(-0.9), 1)}
    assert figures(got["gradient.cosine_max.expert_down"]) == {7: (pytest.approx(0.125), 2)}
    assert figures(got["gradient.cosine_max.expert_up"]) == figures(got["gradient.cosine_min.expert_up"])
    assert figures(got["gradient.cosine_max.expert_up"]) == {7: (0.75, 0)}
    assert not any(name.startswith("gradient.cosine.") for name in got)


def test_relations_between_items_are_of_experts_only() -> None:
    got = derived(aggregate("weight.norm.norm", 7, mean=[1, 30, 2]), aggregate("weight.norm.query", 7, mean=[1, 2]))
    assert got == {}
    items = {role: metric.items for role in ("norm", "expert_up") if (metric := catalogue.find(f"weight.norm.{role}"))}
    assert items == {"norm": "matrix", "expert_up": "expert"} and catalogue.find("weight.norm") is None


def test_cosine_is_left_out_where_it_was_not_sampled() -> None:
    got = derived(
        aggregate("gradient.dot_weight.expert_up", 7, mean=[math.nan, math.nan]),
        aggregate("gradient.norm.expert_up", 7, mean=[2, 2]),
        aggregate("weight.norm.expert_up", 7, mean=[2, 4]),
    )
    assert set(got) == {"weight.norm.expert_up.max_over_median", "weight.norm.expert_up.min_over_median"}


def test_muons_largest_is_over_all_roles() -> None:
    got = derived(
        aggregate("muon.largest.expert_up", 1, max=[1, 5, 2]),
        aggregate("muon.largest.expert_down", 1, max=[1, 2, 40]),
        aggregate("muon.largest.attention_q", 1, max=[7]),
        aggregate("muon.largest.attention_q", 0, max=[math.inf]),
        aggregate("muon.largest.expert_up", 0, max=[math.nan, 3, 2]),
    )
    assert figures(got["muon.largest"]) == {0: (math.inf, 0), 1: (40, 2)}


def test_the_slowest_rank_is_held_against_its_stage() -> None:
    # Stage 1 works twice as long as stage 0 on all of its ranks: none of them is slow.
    seconds = [1, 1.5, 1, 1, 2, 2.2, 2, 2]
    got = derived(
        aggregate("rank.compute_seconds", -1, mean=seconds),
        aggregate("rank.stage", -1, mean=[0, 0, 0, 0, 1, 1, 1, 1]),
    )
    assert figures(got["rank.slowdown"]) == {-1: (1.5, 1)}
    assert figures(derived(aggregate("rank.compute_seconds", -1, mean=seconds))["rank.slowdown"]) == {
        -1: (pytest.approx(2.2 / 1.5), 5)
    }


def test_two_ranks_are_held_against_each_other_and_one_against_none() -> None:
    stages = aggregate("rank.stage", -1, mean=[0, 0, 1])
    got = derived(aggregate("rank.compute_seconds", -1, mean=[1, 2.8, 50]), stages)
    assert figures(got["rank.slowdown"]) == {-1: (pytest.approx(2.8), 1)}
    alone = derived(aggregate("rank.compute_seconds", -1, mean=[1, 5]), aggregate("rank.stage", -1, mean=[0, 1]))
    assert "rank.slowdown" not in alone


@pytest.mark.parametrize("seed", range(20))
def test_over_others_is_what_it_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    seconds = random.choice([1.0, 1.5, 2.0, 7.0, math.nan, math.inf], 12)
    stages = random.choice([0.0, 1.0, 2.0, math.nan], 12)
    got = over_others(seconds, stages)
    for rank in range(12):
        same = [one for one in range(12) if one != rank and stages[one] == stages[rank]]
        others = seconds[same][~np.isnan(seconds[same])]
        with np.errstate(invalid="ignore"):
            expected = seconds[rank] / np.median(others) if len(others) else math.nan
        assert got[rank] == pytest.approx(expected, nan_ok=True)


def test_ranks_that_are_missing_do_not_count() -> None:
    got = derived(
        aggregate("rank.compute_seconds", -1, mean=[1, math.nan, 3, 9, 1]),
        aggregate("rank.stage", -1, mean=[0, 0, 0, math.nan, 0]),
    )
    assert figures(got["rank.slowdown"]) == {-1: (3, 2)}
