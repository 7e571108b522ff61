from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptron_metrics.protocol.description import Combination, Folding, Series
from steptron_metrics.reducer import aggregate, layout, statistics
from steptron_metrics.results import STATISTICS
from tests.metrics_server.reducer import reference

Frame = tuple[tuple[Series, ...], np.ndarray]
KINDS = [
    (Folding.NONE, Combination.SAMPLES),
    (Folding.NONE, Combination.SAMPLES),
    (Folding.MOMENTS, Combination.SAMPLES),
    (Folding.NONE, Combination.SUM),
    (Folding.NONE, Combination.ROOT_SUM_SQUARES),
]
SAMPLES = st.one_of(
    st.floats(-100, 100, width=32),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 7.0]),
)

PARTS = st.one_of(st.integers(-100, 100).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
"""Whose sum is exact, whatever their order."""


@st.composite
def descriptions(draw: st.DrawFn) -> tuple[Series, ...]:
    made: dict[tuple[str, int, int], Series] = {}
    for _ in range(draw(st.integers(1, 6))):
        folding, combination = draw(st.sampled_from(KINDS))
        plain = (folding, combination) == KINDS[0]
        series = Series(
            draw(st.sampled_from(["a.x", "muon.largest.up"])),  # the latter's series are a rank's own
            draw(st.integers(-1, 0)),
            draw(st.integers(0, 4)),
            draw(st.integers(1, 5)),
            draw(st.integers(0, 3)) if plain else 0,
            folding,
            combination,
        )
        made.setdefault((series.metric, series.layer, series.first), series)
    return tuple(made.values())


def moved(description: tuple[Series, ...], by: int) -> tuple[Series, ...]:
    """Single values are of other items."""
    return tuple(replace(one, first=one.first + by) if one.count == 1 else one for one in description)


def is_possible(description: tuple[Series, ...]) -> bool:
    return len({(one.metric, one.layer, one.first) for one in description}) == len(description)


@st.composite
def frames(draw: st.DrawFn) -> list[Frame]:
    among = draw(st.lists(descriptions(), min_size=1, max_size=3))
    sent = []
    for _ in range(draw(st.integers(1, 6))):
        description = draw(st.sampled_from(among))
        other = moved(description, draw(st.integers(0, 2)))
        description = other if is_possible(other) else description
        values: list[float] = []
        for series in description:
            if series.folding is Folding.MOMENTS:
                columns = [draw(folded()) for _ in range(series.count)]
                values.extend(np.array(columns, np.float32).T.ravel().tolist())
            elif series.combination is Combination.SUM:
                values.extend(draw(st.lists(PARTS, min_size=series.size, max_size=series.size)))
            else:
                values.extend(draw(st.lists(SAMPLES, min_size=series.size, max_size=series.size)))
        sent.append((description, np.array(values, np.float32)))
    return sent


@st.composite
def folded(draw: st.DrawFn) -> list[float]:
    samples = draw(st.lists(st.floats(-100, 100, width=32), max_size=3))
    moments = fold(samples)
    if draw(st.integers(0, 5)) == 0:
        moments[draw(st.integers(0, 4))] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    return moments


def fold(samples: Sequence[float]) -> list[float]:
    return [
        float(len(samples)),
        sum(samples),
        sum(one * one for one in samples),
        min(samples, default=math.inf),
        max(samples, default=-math.inf),
    ]


def reduced(sent: Sequence[Frame]) -> dict[tuple[str, int], np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = aggregate.reduce(sent)
    keys = [(one.metric, one.layer) for one in result]
    assert keys == sorted(set(keys))
    assert all(one.values.dtype == np.float32 for one in result)
    return {(one.metric, one.layer): one.values for one in result}


def assert_same(actual: dict[tuple[str, int], np.ndarray], expected: dict[tuple[str, int], np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert actual[key].shape == values.shape, key
        for row, name in enumerate(STATISTICS):
            if name in ("count", "min", "max"):
                np.testing.assert_array_equal(actual[key][row], values[row], f"{key} {name}")
            else:
                # A mean of large values of both signs is as exact as they are.
                scale = np.nan_to_num(np.maximum(np.abs(values[3]), np.abs(values[5])), nan=0.0, posinf=0.0)
                wrong = ~np.isclose(actual[key][row], values[row], rtol=3e-7, atol=0, equal_nan=True)
                with np.errstate(invalid="ignore"):
                    wrong &= ~(np.abs(actual[key][row] - values[row].astype(np.float64)) <= 1e-9 * scale)
                assert not wrong.any(), (key, name, actual[key][row], values[row])


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(frames(), st.sampled_from([1, 7, 40, 1 << 18]), st.sampled_from([0, 2, 64]), st.sampled_from([3, 2048]))
def test_equals_the_slow_reference_however_it_is_cut(sent: list[Frame], block: int, size: int, samples: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "BLOCK", block)
        patch.setattr(layout, "_OWN_SIZE", size)
        patch.setattr(layout, "_OWN_SAMPLES", samples)
        actual = reduced(sent)
    assert_same(actual, reference.aggregates(sent))


@pytest.mark.py312
def test_expert_parallel_ranks_lie_side_by_side_and_replicas_and_micro_batches_are_samples() -> None:
    rng = np.random.default_rng(0)
    replicas, groups, experts, micro_batches = 5, 4, 3, 7
    values = np.exp(rng.normal(size=(replicas, groups, micro_batches, experts))).astype(np.float32)
    sent = [
        ((Series("moe.output_norm_rms", 3, experts * g, experts, micro_batches),), values[r, g].ravel())
        for r in range(replicas)
        for g in range(groups)
    ]
    got = reduced(sent)["moe.output_norm_rms", 3]
    assert got.shape == (7, groups * experts)
    samples = values.astype(np.float64).transpose(1, 3, 0, 2).reshape(groups * experts, replicas * micro_batches)
    assert (got[0] == replicas * micro_batches).all()
    expected = [samples.mean(1), np.sqrt((samples**2).mean(1)), samples.min(1), np.median(samples, 1), samples.max(1)]
    np.testing.assert_allclose(got[1:6], expected, rtol=1e-7)
    np.testing.assert_allclose(got[6], np.quantile(samples, 0.99, axis=1), rtol=1e-7)


def test_ranks_that_send_an_item_each_are_reduced_together_with_the_rest() -> None:
    sent = [
        (
            (Series("moe.tokens", 0, 0, 2), Series("rank.compute_seconds", -1, rank), Series("train.loss")),
            np.array([rank, 2 * rank, 10 + rank, 3], np.float32),
        )
        for rank in (3, 0, 1)
    ]
    got = reduced(sent)
    assert_same(got, reference.aggregates(sent))
    assert got["rank.compute_seconds", -1][:2].T.tolist()[:2] == [[1, 10], [1, 11]]
    assert got["rank.compute_seconds", -1][0].tolist() == [1, 1, 0, 1]
    assert got["train.loss", -1][0].tolist() == [3]


@pytest.mark.parametrize("says_item", [True, False])
def test_the_item_of_a_rank_metric_is_the_rank_that_sends_it(says_item: bool) -> None:
    """Else no two ranks could have the same description."""
    sent = [
        ((Series("rank.stage", -1, rank * says_item), Series("my.own", -1, 1)), np.array([rank / 10, 1], np.float32))
        for rank in (2, 0, 3)
    ]
    got = {one.metric: one.values for one in aggregate.reduce(sent, [2, 0, 3])}
    assert got["rank.stage"][0].tolist() == [1, 0, 1, 1]
    np.testing.assert_allclose(got["rank.stage"][1], [0, np.nan, 0.2, 0.3])
    assert got["my.own"][0].tolist() == [0, 3]


def test_ranks_that_own_other_matrices_each_are_reduced_together() -> None:
    """As under ZeRO-1: what replicas measure is common, and between lie a few values for items of their own."""
    rng = np.random.default_rng(5)
    shared = Series("moe.output_norm_max", 1, 0, 90, 2)
    sent = []
    for rank in range(24):
        first, count = int(rng.integers(0, 80)), int(rng.integers(1, 10))
        description = (
            Series("weight.norm.expert_up", 1, first, count, combination=Combination.ROOT_SUM_SQUARES),
            shared,
            Series("muon.largest.expert_up", 1, first, count),
            Series("rank.stage", -1, rank),
            # One matrix that all have a part of.
            Series("weight.norm.embedding", combination=Combination.ROOT_SUM_SQUARES),
        )
        sent.append((description, rng.normal(size=2 * count + 182).astype(np.float32)))
    assert_same(reduced(sent), reference.aggregates(sent))
    layouts = layout.Layouts(lambda content: ())
    bodies = {id(run.body) for description, _ in sent for run in layouts.make(description).runs}
    assert len(bodies) == 2, "the common series are one body, and what says the stage another"


def test_what_one_rank_sends_of_all_keeps_its_items() -> None:
    (got,) = aggregate.reduce([((Series("rank.stage", -1, 1, 3),), np.array([7, 8, 9], np.float32))], [5])
    assert got.values[1].tolist()[1:] == [7, 8, 9]


def test_nan_is_not_measured_and_infinity_is_a_value() -> None:
    series = (Series("a.b", 0, 0, 4, 2),)
    sent = [
        (series, np.array([[1, math.inf, math.nan, math.nan], [3, 2, 5, math.nan]], np.float32).ravel()),
        (series, np.array([[5, math.inf, 7, math.nan], [7, 4, math.nan, math.nan]], np.float32).ravel()),
    ]
    got = reduced(sent)["a.b", 0]
    assert got[0].tolist() == [4, 4, 2, 0]
    assert got[1].tolist()[:3] == [4, math.inf, 6]
    assert got[3].tolist()[:3] == [1, 2, 5]
    assert got[4].tolist()[:3] == [4, math.inf, 6]
    assert got[5].tolist()[:3] == [7, math.inf, 7]
    assert np.isnan(got[1:, 3]).all()


def test_folded_and_unfolded_ranks_of_an_item() -> None:
    folded_series = (Series("a.b", 0, 0, 1, 0, Folding.MOMENTS),)
    plain_series = (Series("a.b", 0, 0, 1, 3),)
    sent = [
        (folded_series, np.array(fold([1.0, 2.0, 9.0]), np.float32)),
        (folded_series, np.array(fold([]), np.float32)),
        (plain_series, np.array([10.0, 20.0, math.nan], np.float32)),
    ]
    count, mean, rms, low, median, high, p99 = reduced(sent)["a.b", 0][:, 0].tolist()
    assert (count, low, high) == (5, 1, 20)
    assert mean == pytest.approx(42 / 5)
    assert rms == pytest.approx(math.sqrt((1 + 4 + 81 + 100 + 400) / 5))
    assert median == 10  # of 4 (the mean of the folded rank), 10, 20
    assert p99 == pytest.approx(10 + 0.98 * 10)


def test_means_of_folded_ranks_weigh_the_same_in_the_median() -> None:
    series = (Series("a.b", 0, 0, 1, 0, Folding.MOMENTS),)
    sent = [(series, np.array(fold(samples), np.float32)) for samples in ([1.0] * 50, [2.0], [6.0])]
    got = reduced(sent)["a.b", 0][:, 0]
    assert got[4] == 2
    assert got[1] == pytest.approx(58 / 52)


def test_a_folded_overflow_keeps_its_maximum() -> None:
    series = (Series("a.b", 0, 0, 1, 0, Folding.MOMENTS),)
    sent = [(series, np.array([2, math.nan, math.inf, -math.inf, math.inf], np.float32))]
    got = reduced(sent)["a.b", 0][:, 0]
    assert (got[0], got[3], got[5]) == (2, -math.inf, math.inf)
    assert math.isnan(got[1])


def test_parts_make_one_sample() -> None:
    total, norm = Combination.SUM, Combination.ROOT_SUM_SQUARES
    first = (Series("s.t", 0, 0, 2, combination=total), Series("n.t", 0, 0, 2, combination=norm))
    second = (Series("s.t", 0, 1, 2, combination=total), Series("n.t", 0, 1, 2, combination=norm))
    sent = [
        (first, np.array([1, 2, 3, 3e30], np.float32)),
        (first, np.array([10, 20, 4, 0], np.float32)),
        (second, np.array([200, 5, 4e30, 8], np.float32)),
    ]
    got = reduced(sent)
    assert got["s.t", 0][0].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(got["s.t", 0][1], [11, 222, 5])
    np.testing.assert_allclose(got["n.t", 0][1], [5, 5e30, 8], rtol=1e-7)  # the squares are beyond float32
    np.testing.assert_array_equal(got["s.t", 0][1], got["s.t", 0][6])


def test_a_sum_without_one_of_its_parts_is_not_measured() -> None:
    series = (Series("s.t", combination=Combination.SUM),)
    sent = [(series, np.array([value], np.float32)) for value in (1.0, math.nan)]
    assert reduced(sent)["s.t", -1][0].tolist() == [0]


def test_sums_are_made_in_float64() -> None:
    series = (Series("a.b"),)
    sent = [(series, np.array([value], np.float32)) for value in [1.0] + [6e-8] * 2000]
    assert reduced(sent)["a.b", -1][1, 0] == pytest.approx((1 + 2000 * float(np.float32(6e-8))) / 2001, rel=1e-7)
    sums = (Series("a.b", combination=Combination.SUM),)
    sent = [(sums, values) for _, values in sent]
    assert reduced(sent)["a.b", -1][1, 0] == pytest.approx(1 + 2000 * float(np.float32(6e-8)), rel=1e-7)


@pytest.mark.parametrize("n", [1, 2, 64, 511, 512, 513, 700, 1025, 2048, 4099, 20_000])
@pytest.mark.parametrize("order", ["random", "ascending", "steps", "drifting", "late peak", "with NaN"])
def test_quantiles_of_many_samples(n: int, order: str) -> None:
    rng = np.random.default_rng(n)
    samples = np.exp(rng.normal(size=(6, n))).astype(np.float32)
    if order == "ascending":
        samples.sort(axis=1)
    elif order == "steps":
        samples = np.round(samples)
    elif order == "drifting":
        samples[:, n // 2 :] *= 100
        samples[0, : n // 3] = np.inf
    elif order == "late peak":
        samples[:, n - n // 50 :] *= 1e4
    elif order == "with NaN":
        samples[:3][rng.random((3, n)) < 0.3] = np.nan
        samples[1] = np.nan
    ordered = [sorted(row[~np.isnan(row)].tolist()) for row in samples]
    expected = [[reference.quantile(row, share) for row in ordered] for share in (0.5, 0.99)]
    np.testing.assert_allclose(statistics.quantiles(samples.copy()), expected, rtol=1e-12)


def test_the_order_of_ranks_does_not_matter() -> None:
    rng = np.random.default_rng(3)
    series = (Series("a.b", 0, 0, 3, 4), Series("c.d", -1, 0, 2))
    sent = [(series, rng.normal(size=14).astype(np.float32)) for _ in range(20)]
    forth, back = reduced(sent), reduced(sent[::-1])
    for key, values in forth.items():
        np.testing.assert_allclose(back[key], values, rtol=1e-6)


def test_frames_without_values() -> None:
    assert aggregate.reduce([]) == []
    assert aggregate.reduce([((), np.empty(0, np.float32))] * 3) == []


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values for a description of 2"):
        aggregate.reduce([((Series("a.b", 0, 0, 2),), np.zeros(3, np.float32))])


def test_far_items_cannot_fill_the_memory() -> None:
    far = tuple(Series(f"a.b{number}", 0, (1 << 20) - 1) for number in range(5))
    with pytest.raises(ValueError, match="5242880 items"):
        aggregate.reduce([(far, np.zeros(5, np.float32))])


def by_key(frames: Sequence[Frame], ranks: Sequence[int] | None = None) -> dict[tuple[str, int], np.ndarray]:
    return {(one.metric, one.layer): one.values for one in aggregate.reduce(frames, ranks)}


def loads(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of which the last axis is one group's, over their mean."""
    values = rng.gamma(2.0, size=shape)
    return (values / values.mean(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("ep_first", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_the_largest_load_in_a_micro_batch_of_every_group_of_ranks(ep_first: bool, shuffled: bool) -> None:
    """4 expert-parallel ranks in 3 groups, 5 micro-batches, 2 layers; ranks in either order, frames in any."""
    rng = np.random.default_rng(0)
    load = loads(rng, 3, 2, 5, 4)  # group of ranks, layer, micro-batch, rank in it
    share = loads(rng, 12, 5, 6)
    frames, ranks = [], []
    for rank in range(12):
        ep, group = (rank % 4, rank // 4) if ep_first else (rank // 3, rank % 3)
        series = (
            *(Series("moe.group_load", layer, ep, 1, 5) for layer in (3, 4)),
            Series("moe.group_share", 3, 0, 6, 5),
        )
        frames.append((series, np.concatenate([load[group, :, :, ep].ravel(), share[rank].ravel()])))
        ranks.append(rank)
    if shuffled:
        order = rng.permutation(12).tolist()
        frames, ranks = [frames[index] for index in order], [ranks[index] for index in order]
    got = by_key(frames, ranks)
    for layer in (3, 4):
        expected = load[:, layer - 3].max(axis=-1).ravel()
        row = got["moe.group_load_max", layer][:, 0]
        assert row[0] == 15 and row[1] == pytest.approx(expected.mean()) and row[5] == expected.max()
        assert row[4] == pytest.approx(np.median(expected))
    row = got["moe.group_share_max", 3][:, 0]
    assert row[0] == 60 and row[1] == pytest.approx(share.max(axis=-1).mean())


def test_loads_that_are_not_known_side_by_side_have_no_largest() -> None:
    rng = np.random.default_rng(1)
    load = loads(rng, 2, 5, 2)

    def frame(group: int, ep: int, folding: Folding = Folding.NONE) -> Frame:
        if folding is Folding.MOMENTS:
            one = load[group, :, ep]
            moments = np.array([5, one.sum(), np.square(one).sum(), one.min(), one.max()], np.float32)
            return (Series("moe.group_load", 3, ep, 1, 0, folding),), moments
        return (Series("moe.group_load", 3, ep, 1, 5),), load[group, :, ep].copy()

    key = ("moe.group_load_max", 3)
    whole = [frame(0, 0), frame(0, 1), frame(1, 0), frame(1, 1)]
    assert key in by_key(whole)
    assert key not in by_key(whole[:3])  # a rank is missing
    assert key not in by_key([frame(0, 0), frame(1, 1)])  # those that are left are of two groups: not 1 in the mean
    assert key not in by_key([frame(group, ep, Folding.MOMENTS) for group in (0, 1) for ep in (0, 1)])


def test_micro_batches_without_tokens_and_with_ranks_that_do_not_say_are_left_out() -> None:
    series = (Series("moe.group_share", 3, 0, 2, 3),)
    values = np.array([[1.5, 0.5], [0, 0], [math.nan, 1]], np.float32)
    row = by_key([(series, values.ravel())])["moe.group_share_max", 3][:, 0]
    assert row[0] == 1 and row[1] == 1.5
