"""What the default rules once did not see, in frames as ranks send them, and what they must not take for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.protocol.description import Series
from steptron_metrics.reducer.aggregate import reduce
from steptron_metrics.reducer.derived import derive
from steptron_metrics.results import Alert, Event, Iteration
from tests.metrics_server.alerts.runs import MemoryStore, iteration

Values = dict[tuple[str, int], np.ndarray]
"""By metric and layer, [items] or [micro-batches, items]."""


def frame(values: Values, first: int = 0) -> tuple[tuple[Series, ...], np.ndarray]:
    series, parts = [], []
    for (metric, layer), rows in values.items():
        rows = np.asarray(rows, np.float32)
        batches = rows.shape[0] if rows.ndim == 2 else 0
        series.append(Series(metric, layer, first if rows.shape[-1] == 1 else 0, rows.shape[-1], batches))
        parts.append(rows.ravel())
    return tuple(series), np.concatenate(parts)


def made(number: int, ranks: Sequence[Values], **fields: object) -> Iteration:
    frames = [frame(values, rank if len(ranks) > 1 else 0) for rank, values in enumerate(ranks)]
    aggregates = reduce(frames, range(len(ranks)))
    return iteration(number, aggregates, derived=tuple(derive(aggregates)), **fields)


def seen(iterations: Iterable[Iteration], store: MemoryStore | None = None) -> dict[tuple[str, str], Alert]:
    """The alerts that begin, by rule and subject, as they ended up; all is kept in the store, as the server does."""
    alerts = Alerts(store or MemoryStore(), load_rules())
    found: dict[tuple[str, str], Alert] = {}
    for one in iterations:
        changes = alerts.evaluate(one)
        if store is not None:
            store.put_alerts([change.alert for change in changes])
            store.put([one])
        for change in changes:
            found[change.alert.rule, change.alert.subject] = change.alert
    return found


def experts(seed: int = 0, number: int = 8) -> np.ndarray:
    return 5 * (1 + 0.03 * np.random.default_rng(seed).standard_normal(number))


# ----------------------------------------------------------------------------------------------- ranks


def ranks_of(slow: dict[int, float], world: int = 32, steps: int = 60, stage: Callable[[int], int] = lambda rank: 0):
    random = np.random.default_rng(0)
    for number in range(1, steps + 1):
        seconds = [slow.get(rank, 1.0) * (1 + 0.02 * random.standard_normal()) for rank in range(world)]
        yield made(
            number,
            [
                {("rank.stage", -1): np.array([stage(rank)]), ("rank.compute_seconds", -1): np.array([seconds[rank]])}
                for rank in range(world)
            ],
        )


def test_a_slow_node_is_one_alert_that_names_its_ranks() -> None:
    found = seen(ranks_of(dict.fromkeys(range(8, 16), 2.5)))
    assert set(found) == {("straggling_rank", "many")}
    saw = found["straggling_rank", "many"].saw
    assert saw.startswith(
        "8 at once (rank 8, rank 9, rank 10, rank 11, rank 12, rank 13, rank 14, rank 15). The worst: "
    )


def test_one_slow_rank_of_many_and_of_two() -> None:
    assert set(seen(ranks_of({8: 2.5}))) == {("straggling_rank", "rank 8")}
    # Of two: held against the other, not against the mean of both.
    assert set(seen(ranks_of({1: 1.7}, world=2))) == {("straggling_rank", "rank 1")}
    assert seen(ranks_of({1: 1.4}, world=2)) == {}


def test_a_rank_alone_in_its_stage_has_nothing_to_be_compared_with() -> None:
    assert seen(ranks_of({1: 5.0}, world=4, stage=lambda rank: rank)) == {}
    # Nor is a stage with more work slow.
    assert seen(ranks_of({2: 5.0, 3: 5.0}, world=4, stage=lambda rank: rank // 2)) == {}


def test_slow_ranks_after_a_restart() -> None:
    store = MemoryStore()
    made_ones = list(ranks_of({3: 2.0}, world=6, steps=70))
    seen(made_ones[:40], store)
    assert store.alerts_kept == {}
    found = seen(made_ones[40:], store)
    assert found["straggling_rank", "rank 3"].since_iteration == 21


# ------------------------------------------------------------------------------------------------ EP


@pytest.mark.parametrize("replicas", [1, 3])
def test_loads_that_alternate_from_micro_batch_to_micro_batch(replicas: int) -> None:
    """Every rank gets its share in the mean, and yet all wait half of the time."""
    even, odd = np.array([[2.0], [0.0]] * 4), np.array([[0.0], [2.0]] * 4)

    def step(number: int) -> Iteration:
        frames = []
        for rank in range(2 * replicas):
            load = even if rank % 2 == 0 else odd
            frames.append(frame({("moe.group_load", 3): load}, first=rank % 2))
        aggregates = reduce(frames, range(len(frames)))
        return iteration(number, aggregates, derived=tuple(derive(aggregates)))

    found = seen(step(number) for number in range(1, 311))
    alert = found["ep_straggling", "layer 3"]
    assert alert.value == 2 and alert.since_iteration == 201 and "expert-parallel rank" in alert.saw


def test_groups_without_ranks_are_called_groups() -> None:
    share = np.array([[3.0, 1, 0, 0]] * 4)
    found = seen(made(number, [{("moe.group_share", 3): share}]) for number in range(1, 311))
    assert set(found) == {("group_imbalance", "layer 3")}
    alert = found["group_imbalance", "layer 3"]
    assert "group of experts of layer 3" in alert.saw and "rank" not in alert.saw and alert.severity == "info"


# -------------------------------------------------------------------------------------------- collapse


def collapsing(tau: float, share: float = 1.0, steps: int = 1400, level: float = 1.0) -> Iterable[Iteration]:
    for number in range(1, steps + 1):
        norms, tokens = experts(number), np.full(8, 100.0)
        norms[5] *= level * np.exp(-max(number - 150, 0) / tau)
        tokens[5] *= share
        yield made(number, [{("moe.tokens", 7): tokens, ("moe.output_norm_rms", 7): norms}])


@pytest.mark.parametrize(
    ("tau", "share", "steps"), [(60, 1.0, 400), (300, 1.0, 1000), (3000, 1.0, 7500), (60, 0.05, 400)]
)
def test_a_collapse_however_slow_and_of_an_unpopular_expert(tau: float, share: float, steps: int) -> None:
    made_ones = collapsing(tau, share, steps)
    if tau == 3000:  # a tenth of the iterations are enough
        made_ones = (one for one in made_ones if one.iteration < 400 or one.iteration > 6900)
    found = seen(made_ones)
    alert = found["expert_collapse", "layer 7 expert 5"]
    # At a tenth of the median.
    assert alert.since_iteration == pytest.approx(150 + tau * np.log(10), rel=0.1)


def test_a_collapse_from_before_the_server_and_a_weak_expert() -> None:
    found = seen(replace(one, iteration=one.iteration + 100_000) for one in collapsing(1e9, steps=60, level=0.03))
    assert set(found) == {("expert_collapse", "layer 7 expert 5")}
    assert seen(collapsing(1e9, steps=300, level=0.2)) == {}


# ------------------------------------------------------------------------------------------ confidence


def confident(steps: Iterable[int], tau: float = 3500) -> Iterable[Iteration]:
    random = np.random.default_rng(0)
    for number in steps:
        value = 0.6 * np.exp(-number / tau) * (1 + 0.005 * random.standard_normal())
        yield made(number, [{("moe.confidence", 7): np.array([value])}])


def test_confidence_that_falls_slowly() -> None:
    found = seen(confident(range(1, 3001)))
    alert = found["falling_confidence", "layer 7"]
    # Half of 0.56, where it stood after the warm-up.
    assert 2550 < alert.since_iteration < 2750 and "its level before: 0.5" in alert.saw


def test_confidence_that_falls_slowly_across_a_restart() -> None:
    store = MemoryStore()
    store.put(confident(range(1, 2500)))
    found = seen(confident(range(2500, 3001)), store)
    assert 2550 < found["falling_confidence", "layer 7"].since_iteration < 2750


# --------------------------------------------------------------------------------------------- blow-up


def largest(change: Callable[[np.ndarray, int], None], steps: Iterable[int], layers: Sequence[int] = (7,)):
    for number in steps:
        values = {("moe.output_norm_max", layer): experts(number * 100 + layer) for layer in layers}
        change(values["moe.output_norm_max", layers[-1]], number)
        yield made(number, [values])


def test_a_blow_up_from_before_the_server() -> None:
    def blown_up(norms: np.ndarray, number: int) -> None:
        norms[2] *= 60

    found = seen(largest(blown_up, range(100_000, 100_060)))
    assert set(found) == {("blow_up_output", "layer 7 expert 2")}
    assert found["blow_up_output", "layer 7 expert 2"].since_iteration == 100_000


def test_the_blow_up_of_the_study() -> None:
    """From 2 to 16 in 1,000 steps, as docs/blowup.md found it; with activation clipping it stays below 6."""

    def grow(to: float) -> Callable[[np.ndarray, int], None]:
        def change(norms: np.ndarray, number: int) -> None:
            norms[2] *= 2 * (to / 2) ** (number / 1000)

        return change

    found = seen(largest(grow(16), range(1, 1001)))
    assert 700 < found["blow_up_output", "layer 7 expert 2"].since_iteration < 850
    assert seen(largest(grow(6), range(1, 1001))) == {}


@pytest.mark.parametrize("layers", [(7,), (5, 6, 7)])
def test_half_of_the_experts(layers: Sequence[int]) -> None:
    def half(norms: np.ndarray, number: int) -> None:
        norms[:4] *= np.exp(max(min(number, 400) - 300, 0) / 20)

    found = seen(largest(half, range(1, 460), layers))
    expected = {("layer_growth", "layer 7")} | ({("layer_apart", "layer 7")} if len(layers) > 1 else set())
    assert set(found) == expected
    assert 350 < found["layer_growth", "layer 7"].since_iteration < 400


def test_all_layers_growing_soundly_is_none() -> None:
    def steps() -> Iterable[Iteration]:
        for number in range(1, 1200):
            growth = 1 + number / 20  # to 60 times what it was, and 6 times from the warm-up on
            yield made(number, [{("moe.output_norm_max", layer): growth * experts(number) for layer in (5, 6, 7)}])

    assert seen(steps()) == {}


def test_the_level_before_stays_what_it_was() -> None:
    """In an alert that outlasts its baseline, and after a restart."""

    def blown_up(norms: np.ndarray, number: int) -> None:
        norms[2] *= 2 if number < 150 else 50

    store = MemoryStore()
    first = list(largest(blown_up, range(1, 700)))
    found = seen(first, store)["blow_up_output", "layer 7 expert 2"]
    assert "its level before: 1.97" in found.saw and found.last_iteration == 699
    again = seen(largest(blown_up, range(700, 720)), store)["blow_up_output", "layer 7 expert 2"]
    assert again.number == found.number and again.last_iteration == 719
    assert "its level before: 1.97" in again.saw


# ------------------------------------------------------------------------------------------ not finite


def test_an_expert_that_gives_no_numbers() -> None:
    def steps(bad: float) -> Iterable[Iteration]:
        for number in range(1, 20):
            norms, largest_of_muon = np.full(8, 5.0), np.full(8, 3.0)
            if number > 10:
                norms[2] = bad
            values = {("moe.tokens", 7): np.full(8, 9.0), ("moe.output_norm_max", 7): norms}
            yield made(number, [values | {("muon.largest.expert_up", 7): largest_of_muon}])

    for bad in (np.nan, np.inf):
        found = seen(steps(bad))
        alert = found["non_finite", "run"]
        assert alert.since_iteration == 11 and "moe.output_norm_max of expert 2 of layer 7" in alert.saw


def test_a_value_that_is_infinite_in_one_micro_batch_only() -> None:
    norms = np.full((4, 8), 5.0)
    norms[1, 3] = -np.inf
    found = seen([made(1, [{("my.own", 7): norms}])])
    assert "my.own of item 3 of layer 7" in found["non_finite", "run"].saw


def test_muon_that_gives_no_numbers() -> None:
    found = seen([made(1, [{("muon.largest.query", 2): np.array([1.0, np.inf])}])])
    assert set(found) == {("non_finite", "run"), ("muon_outlier", "layer 2 matrix 1 query")}


def test_a_loss_that_is_no_number_in_a_partial_iteration() -> None:
    found = seen(
        made(n, [{("train.loss", -1): np.array([np.nan if n > 20 else 2])}], missing=(3,)) for n in range(1, 31)
    )
    assert found["non_finite", "run"].since_iteration == 21
    # The rank that sends it is missing.
    other = {("rank.stage", -1): np.array([0.0])}
    assert set(seen(made(n, [other], missing=(0,)) for n in range(1, 9))) == {("missing_ranks", "run")}


def test_skipped_steps_keep_it_open_and_are_told() -> None:
    def steps() -> Iterable[Iteration]:
        for number in range(1, 40):
            loss = np.array([np.nan if number == 10 else 2.0])
            events = (Event("skipped", "the loss is nan"),) if 10 <= number < 20 else ()
            yield made(number, [{("train.loss", -1): loss}], events=events)

    found = seen(steps())
    assert found["non_finite", "run"].ended_iteration == 22
    skipped = found["skipped_steps", "run"]
    assert (skipped.since_iteration, skipped.ended_iteration) == (10, 29) and "the loss is nan" in skipped.saw


# ---------------------------------------------------------------------------------------------- names


def test_unlike_matrices_are_no_experts() -> None:
    norms = {
        ("weight.norm.norm", 2): np.array([1.0, 30.0, 2.0]),
        ("weight.norm.expert_up", 2): np.array([1.0, 2.0, 4.0]),
    }
    one = made(1, [norms])
    names = {derived.name for derived in one.derived}
    assert names == {"weight.norm.expert_up.max_over_median", "weight.norm.expert_up.min_over_median"}
    found = seen([made(1, [{("weight.norm.norm", 2): np.array([1.0, np.inf])}])])
    assert "weight.norm.norm of matrix 1 of layer 2" in found["non_finite", "run"].saw


def test_who_a_silent_run_waits_for() -> None:
    store, now = MemoryStore(), [10**18]
    alerts = Alerts(store, load_rules(), stale_after_seconds=60, clock_ns=lambda: now[0])
    for run, missing in (("whole", ()), ("partial", (2, 5)), ("waiting", ())):
        alerts.evaluate(iteration(1, run=run, missing=missing))
        store.put([iteration(1, run=run, missing=missing)])
    now[0] += 61 * 10**9
    changes = alerts.tick({"waiting": "Iteration 2 waits for rank 3 of 4."})
    saw = {change.alert.run: change.alert.saw for change in changes if change.alert.rule == "stale_run"}
    assert saw["whole"].endswith("its last iteration was 1. All of its ranks had sent it.")
    assert saw["partial"].endswith("It is without ranks 2, 5.")
    assert saw["waiting"].endswith("Iteration 2 waits for rank 3 of 4.")
