from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from steptron_metrics.errors import MetricsError
from steptron_metrics.results import STATISTICS, Aggregate, Derived, Event, Iteration
from steptron_metrics.storage.sql_store import SqlStore
from tests.metrics_server.storage.conftest import Place
from tests.metrics_server.storage.made import ITEMS, LAYERS, Reference, aggregate, iteration, rolled

EVERYTHING = (0, 2**62)


def check(store: SqlStore, reference: Reference, run: str = "run") -> None:
    """The store holds what the reference does, to the bit where nothing is rolled up."""
    stored = reference.stored
    assert store.stored(run) == {(one.session_ns, number): one.num_ranks for number, one in stored.items()}
    (listed,) = [one for one in store.runs() if one.name == run]
    latest = stored[max(stored)]
    assert (listed.first_iteration, listed.last_iteration) == (min(stored), max(stored))
    assert listed.iterations == len(stored)
    assert listed.partial == sum(1 for one in stored.values() if one.num_ranks < one.world_size)
    assert listed.world_size == latest.world_size
    assert (listed.consumed_tokens, listed.last_ended_ns) == (latest.consumed_tokens, latest.ended_ns)
    assert listed.started_ns == min(reference.begins)
    for metric, layer, items in (("moe.tokens", 3, ITEMS), ("train.loss", -1, 1), ("moe.alignment", 3, ITEMS)):
        values = reference.series(metric, layer, items)
        if not values:
            continue
        for row, statistic in enumerate(STATISTICS):
            if layer != 3 and statistic not in ("count", "mean"):
                continue
            points = store.points(run, metric, layer, statistic, *EVERYTHING, 10**6)
            np.testing.assert_array_equal(points.first, list(values))
            np.testing.assert_array_equal(points.last, list(values))
            expected = np.stack([table[row] for table in values.values()]).astype(np.float32)
            for plane in (points.values, points.low, points.high):
                assert plane.dtype == np.float32
                np.testing.assert_array_equal(plane, expected)


def check_rolled(store: SqlStore, reference: Reference, first: int, last: int, max_points: int) -> None:
    lowest, highest = max(first, min(reference.stored)), min(last, max(reference.stored))
    for metric, layer, items in (("moe.tokens", 44, ITEMS), ("moe.alignment", 3, ITEMS), ("train.loss", -1, 1)):
        values = reference.series(metric, layer, items)
        for statistic in STATISTICS if layer == 44 else ("mean", "min"):
            points = store.points("run", metric, layer, statistic, first, last, max_points)
            assert len(points.first) <= max_points
            expected = np.array([number for number in values if lowest <= number <= highest])
            inside = (points.first <= expected[:, None]) & (expected[:, None] <= points.last)
            assert (inside.sum(axis=1) == 1).all(), "each iteration belongs to exactly one point"
            for place, (a, b) in enumerate(zip(points.first, points.last, strict=True)):
                assert lowest <= a <= b <= highest
                found = rolled(values, statistic, a, b)
                assert found is not None, "a point stands for iterations that are there"
                if statistic != "median":
                    np.testing.assert_allclose(points.values[place], found[0], rtol=3e-7)
                np.testing.assert_array_equal(points.low[place], found[1].astype(np.float32))
                np.testing.assert_array_equal(points.high[place], found[2].astype(np.float32))
                inside = (points.values[place] >= found[1] * (1 - 1e-6)) & (
                    points.values[place] <= found[2] * (1 + 1e-6)
                )
                assert (inside | np.isnan(found[1])).all()


def test_what_is_stored_comes_back_to_the_bit(store: SqlStore) -> None:
    reference = Reference()
    for number in range(1, 8):
        reference.put(iteration(number))
        store.put([iteration(number)])
    check(store, reference)


def test_awkward_values_come_back_to_the_bit(store: SqlStore) -> None:
    """Equal statistics, one sample, negative means, infinities, nothing measured, and counts that differ."""
    one = np.array([[1, 1, 1], *[[-2.5, 3.0, np.inf]] * 6], np.float32)
    one[2] = np.abs(one[2])
    nothing = np.array([[0, 0], *[[np.nan, np.nan]] * 6], np.float32)
    nothing.view(np.uint32)[1, 0] = 0xFFC00001  # a NaN of other bits
    signed = np.array([[2, 5], [0.0, -0.0], [0.0, 0.0], [-1.0, -0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]], np.float32)
    tables = {"a": one, "b": nothing, "c": signed}
    given = Iteration("run", 5, 1, 1, (), 1, 1.0, 1, aggregates=tuple(Aggregate(n, 0, t) for n, t in tables.items()))
    store.put([given])
    for name, table in tables.items():
        for row, statistic in enumerate(STATISTICS):
            found = store.points("run", name, 0, statistic, 1, 1, 1).values
            np.testing.assert_array_equal(found, table[row][None])
            np.testing.assert_array_equal(
                np.signbit(found[~np.isnan(found)]), np.signbit(table[row][~np.isnan(table[row])])
            )


def test_counts_that_a_hostile_client_made_up_do_not_break_it(store: SqlStore) -> None:
    table = np.ones((7, 5), np.float32)
    table[0] = [-1.0, np.nan, np.inf, 1e30, 2.6]
    store.put(
        [
            Iteration("run", 5, number, 1, (), 1, 1.0, 1, aggregates=(Aggregate("a", 0, table),))
            for number in range(1, 20)
        ]
    )
    found = store.points("run", "a", 0, "count", 1, 1, 1).values
    np.testing.assert_array_equal(found, np.array([[0, 0, 2**31, 2**31, 3]], np.float32))
    assert store.points("run", "a", 0, "mean", 1, 19, 2).values.shape == (1 + 1, 5)


def test_putting_again_changes_nothing(store: SqlStore) -> None:
    reference = Reference()
    given = [iteration(number, events=(Event("stage", "of it"),)) for number in range(1, 40)]
    for one in given:
        reference.put(one)
    store.put(given)
    store.put(given)
    store.put([iteration(number, seed=1) for number in (1, 17, 39)])  # as many ranks, other values
    store.put([iteration(number, ranks=3) for number in (2, 16, 39)])
    check(store, reference)
    check_rolled(store, reference, 1, 39, 3)
    assert len(store.events("run", *EVERYTHING)) == 39


def test_an_iteration_of_more_ranks_replaces_one_of_fewer(store: SqlStore) -> None:
    reference = Reference()
    for number in range(1, 60):
        one = iteration(number, ranks=2 if number in (5, 16, 17, 40) else 4, events=(Event("k", "before"),))
        reference.put(one)
        store.put([one])
    check(store, reference)
    better = [iteration(number, ranks=3, seed=1, events=(Event("k", "after"),)) for number in (5, 16, 17, 40)]
    for one in better:
        reference.put(one)
    store.put(better)
    check(store, reference)
    for points in (1, 3, 30):
        check_rolled(store, reference, 1, 59, points)
    events = {row["iteration"]: row["detail"] for row in store.events("run", *EVERYTHING).to_pylist()}
    assert [number for number, detail in events.items() if detail == "after"] == [5, 16, 17, 40]
    assert store.iterations("run", 4, 6).column("missing").to_pylist() == [[], [0], []]


def test_within_one_put_the_same_rules_hold(store: SqlStore) -> None:
    reference = Reference()
    batch = [
        iteration(1, ranks=1),
        iteration(2),
        iteration(1, ranks=4),
        iteration(1, ranks=2),
        iteration(3),
        iteration(2, session=2000),
        iteration(4),
        iteration(2, session=2000, ranks=1),
    ]
    for one in batch:
        reference.put(one)
    store.put(batch)
    assert sorted(store.stored("run")) == [(1000, 1), (2000, 2)]
    check(store, reference)


def test_a_later_session_replaces_from_its_first_iteration_on(store: SqlStore) -> None:
    reference = Reference()
    for number in range(1, 301):
        reference.put(iteration(number))
    store.put([iteration(number) for number in range(1, 301)])
    check_rolled(store, reference, 1, 300, 2)
    back = [iteration(number, session=2000) for number in range(40, 45)]
    for one in back:
        reference.put(one)
        store.put([one])
    check_rolled(store, reference, 1, 300, 4)
    check(store, reference)
    assert store.runs()[0].last_iteration == 44
    late = [iteration(number, seed=5) for number in (39, 40, 44, 45, 300)]  # of the first session, afterwards
    store.put(late)
    more = [iteration(number, session=2000) for number in range(45, 290)]
    for one in more:
        reference.put(one)
    store.put(more)
    check(store, reference)
    for points in (1, 20):
        check_rolled(store, reference, 1, 300, points)


def test_a_session_whose_first_iteration_comes_late_replaces_from_there(store: SqlStore) -> None:
    reference = Reference()
    steps = [iteration(number) for number in range(1, 21)] + [
        iteration(12, session=2000),
        iteration(11, session=2000),
        iteration(15, session=3000),
        iteration(10, session=2000),
        iteration(16, session=2000),
        iteration(14, session=3000),
    ]
    for one in steps:
        reference.put(one)
        store.put([one])
    assert sorted(reference.stored) == [*range(1, 13), 14, 15]
    check(store, reference)


def test_any_order_of_events_against_the_plain_way(store: SqlStore, small_groups: Callable[[], None]) -> None:
    small_groups()
    generator = np.random.default_rng(0)
    reference = Reference()
    position, session = 1, 1000
    for step in range(30):
        kind = generator.random()
        if kind < 0.15:
            session += 1
            position = max(1, position - int(generator.integers(0, 60)))
        if kind < 0.3:
            batch = [
                iteration(
                    int(generator.integers(1, position + 3)),
                    session=int(generator.integers(1000, session + 1)),
                    ranks=int(generator.integers(1, 5)),
                    seed=int(generator.integers(9)),
                )
                for _ in range(4)
            ]
        else:
            ahead = int(generator.integers(1, 25))
            batch = [
                iteration(number, session=session, ranks=int(generator.integers(3, 5)))
                for number in range(position, position + ahead)
                if generator.random() > 0.1
            ]
            position += ahead
        for one in batch:
            reference.put(one)
        store.put(batch)
        first, last = sorted(int(n) for n in generator.integers(1, position + 2, 2))
        if step % 4 == 0 and any(first <= number <= last for number in reference.stored):
            check_rolled(store, reference, first, last, int(generator.integers(1, 12)))
    check(store, reference)


def test_roll_ups_of_a_long_run(store: SqlStore, small_groups: Callable[[], None]) -> None:
    small_groups()
    reference = Reference()
    given = [iteration(number) for number in range(1, 581)]
    for one in given:
        reference.put(one)
    for begin in range(0, 600, 100):
        store.put(given[begin : begin + 100])
    for first, last, points in ((1, 580, 1), (1, 580, 3), (200, 570, 2), (255, 258, 1), (30, 560, 50)):
        check_rolled(store, reference, first, last, points)
    whole = store.points("run", "moe.tokens", 3, "max", 1, 580, 4)
    assert whole.first.tolist() == [1, 257, 513] and whole.last.tolist() == [256, 512, 580]


def test_the_median_of_a_bucket_is_the_median_of_its_medians(store: SqlStore) -> None:
    store.put([iteration(number) for number in range(1, 33)])
    one = store.points("run", "moe.tokens", 3, "median", 1, 32, 32)
    rolled_up = store.points("run", "moe.tokens", 3, "median", 1, 32, 2)
    expected = np.stack([np.nanmedian(one.values[:16, 1:], axis=0), np.nanmedian(one.values[16:, 1:], axis=0)])
    np.testing.assert_allclose(rolled_up.values[:, 1:], expected, rtol=1e-6)
    assert np.isnan(rolled_up.values[:, 0]).all()


def test_an_iteration_without_some_items_or_with_more(store: SqlStore) -> None:
    reference = Reference()
    for number in range(1, 40):
        one = iteration(number, items=3 if number % 4 else 5)
        reference.put(one)
        store.put([one])
    check(store, reference)
    check_rolled(store, reference, 1, 39, 3)
    assert store.metrics("run")[1].items == 5


def test_derived_figures_by_layer(store: SqlStore) -> None:
    given = [iteration(number) for number in range(1, 41)]
    store.put(given)
    assert store.derived_names("run") == ["moe.tokens.max_over_median"]
    points = store.derived("run", "moe.tokens.max_over_median", 1, 40, 40)
    np.testing.assert_array_equal(points.layers, np.array(LAYERS, np.int32))
    assert points.layers.dtype == np.int32
    expected = np.full((40, 2), np.nan, np.float32)
    for row, one in enumerate(given):
        expected[row, : len(one.derived[0].layers)] = one.derived[0].values
    np.testing.assert_array_equal(points.values, expected)
    fewer = store.derived("run", "moe.tokens.max_over_median", 1, 40, 3)
    assert fewer.last.tolist() == [16, 32, 40]
    for row, part in enumerate((expected[:16], expected[16:32], expected[32:])):
        np.testing.assert_allclose(fewer.values[row], np.nanmean(part, axis=0), rtol=1e-6)
        np.testing.assert_array_equal(fewer.low[row], np.nanmin(part, axis=0))
        np.testing.assert_array_equal(fewer.high[row], np.nanmax(part, axis=0))
    # Iteration 5 has the first layer only, iteration 35 that one undefined: it is there, and NaN.
    assert store.derived("run", "moe.tokens.max_over_median", 5, 5, 1).layers.tolist() == [3]
    undefined = store.derived("run", "moe.tokens.max_over_median", 35, 35, 1)
    assert undefined.layers.tolist() == [3] and np.isnan(undefined.values).all()


def test_a_derived_figure_that_is_of_no_layer(store: SqlStore) -> None:
    figure = Derived("x.y", np.array([-1], np.int32), np.array([2.5], np.float32), np.array([7], np.int32))
    store.put([Iteration("run", 5, 1, 1, (), 1, 1.0, 1, derived=(figure,))])
    points = store.derived("run", "x.y", 1, 1, 1)
    assert points.layers.tolist() == [-1] and points.values.tolist() == [[2.5]]


def test_iterations_and_events_as_tables(store: SqlStore) -> None:
    missing = tuple(range(150))
    big = Iteration("run", 1000, 3, 200, missing, 7, 0.5, 9, dropped=4, events=(Event("b", "2"), Event("a", "1")))
    store.put([iteration(1), big, iteration(2, events=(Event("skipped", "nul \0 and \ud800"),))])
    table = store.iterations("run", 2, 99)
    assert table.column_names == [
        *("iteration", "session_ns", "world_size", "num_ranks", "missing", "ended_ns", "seconds"),
        *("consumed_tokens", "dropped"),
    ]
    assert table.column("iteration").to_pylist() == [2, 3]
    assert table.column("missing").to_pylist() == [[], list(range(100))]
    assert table.slice(1).to_pylist()[0] | {"missing": None} == {
        **{"iteration": 3, "session_ns": 1000, "world_size": 200, "num_ranks": 50, "missing": None},
        **{"ended_ns": 7, "seconds": 0.5, "consumed_tokens": 9, "dropped": 4},
    }
    assert store.iterations("run", 50, 99).schema == table.schema
    assert store.events("run", 1, 3).to_pylist() == [
        {"iteration": 2, "kind": "skipped", "detail": "nul � and ?"},
        {"iteration": 3, "kind": "b", "detail": "2"},
        {"iteration": 3, "kind": "a", "detail": "1"},
    ]


def test_what_a_run_has(store: SqlStore) -> None:
    store.put([iteration(3)])
    found = [(one.metric, one.layers, one.items) for one in store.metrics("run")]
    assert found == [("moe.alignment", (3,), ITEMS), ("moe.tokens", LAYERS, ITEMS), ("train.loss", (-1,), 1)]


def test_the_table_for_exports_has_a_row_for_each_item_that_was_measured(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steptron_metrics.storage.export_rows.BYTES_AT_ONCE", 3000)
    given = [iteration(number) for number in range(1, 31)]
    store.put(given)
    store.put([iteration(number, run="other") for number in range(1, 5)])
    batches = list(store.table("run", None, 4, 28))
    assert len(batches) > 3
    rows = pa.Table.from_batches(batches).to_pylist()
    expected = []
    for one in given[3:28]:
        for part in sorted(one.aggregates, key=lambda part: (part.metric, part.layer)):
            for item in range(part.values.shape[1]):
                if part.values[0, item]:
                    statistics = dict(zip(STATISTICS, part.values[:, item].tolist(), strict=True))
                    expected.append(
                        {"iteration": one.iteration, "metric": part.metric, "layer": part.layer, "item": item}
                        | statistics
                    )
    assert rows == expected
    chosen = pa.Table.from_batches(store.table("run", ["train.loss", "no.such"], 1, 30))
    assert chosen.column("metric").unique().to_pylist() == ["train.loss"] and len(chosen) > 20
    assert list(store.table("run", ["no.such"], 1, 30)) == []
    assert list(store.table("run", None, 31, 99)) == []


def test_a_run_that_does_not_exist(store: SqlStore) -> None:
    store.put([iteration(1)])
    assert store.stored("nowhere") == {}
    for read in (
        lambda: store.metrics("nowhere"),
        lambda: store.derived_names("nowhere"),
        lambda: store.iterations("nowhere", 1, 2),
        lambda: store.events("nowhere", 1, 2),
        lambda: store.points("nowhere", "moe.tokens", 3, "max", 1, 2, 3),
        lambda: store.derived("nowhere", "x", 1, 2, 3),
        lambda: store.table("nowhere", None, 1, 2),
        lambda: store.alerts("nowhere"),
    ):
        with pytest.raises(KeyError, match="nowhere"):
            read()
    store.delete("nowhere")
    assert store.points("run", "no.such", 3, "max", 1, 2, 3).values.shape == (0, 0)
    assert store.points("run", "moe.tokens", 3, "max", 5, 9, 3).values.shape == (0, ITEMS)
    assert store.points("run", "moe.tokens", 3, "max", 9, 5, 3).values.shape == (0, ITEMS)
    assert store.points("run", "moe.tokens", 3, "max", -(10**30), 10**30, 3).values.shape == (1, ITEMS)


def test_bad_arguments(store: SqlStore) -> None:
    store.put([iteration(1)])
    with pytest.raises(ValueError, match="max_points 0"):
        store.points("run", "moe.tokens", 3, "max", 1, 2, 0)
    with pytest.raises(ValueError, match="variance"):
        store.points("run", "moe.tokens", 3, "variance", 1, 2, 1)  # type: ignore[arg-type]
    with pytest.raises(MetricsError, match="session_ns"):
        store.put([iteration(2, session=2**63)])
    with pytest.raises(MetricsError, match="iteration 9223372036854775807 is"):
        store.put([iteration(2**63 - 1)])
    store.put([Iteration("big", 2**63 - 1, 2**63 - 2, 1, (), 2**63 - 1, 1.0, 2**63 - 1, dropped=2**63 - 1)])
    with pytest.raises(MetricsError, match=r"\(3, 4\), expected \[7"):
        store.put(
            [
                iteration(3),
                Iteration("run", 1000, 4, 1, (), 1, 1.0, 1, aggregates=(Aggregate("a", 0, np.ones((3, 4), "f4")),)),
            ]
        )
    assert store.stored("run") == {(1000, 1): 4}


NAMES = ("it's", 'a"b', "x'; DROP TABLE runs; --", "$1", "%s", "ünï", "a\\'b")


def test_names_are_never_part_of_a_statement(store: SqlStore) -> None:
    for name in NAMES:
        one = iteration(1, run=name)
        odd = aggregate(name, 2, np.random.default_rng(0))
        figure = Derived(name, np.array([1], np.int32), np.array([2], np.float32), np.array([3], np.int32))
        store.put([Iteration(**vars(one) | {"aggregates": (odd,), "derived": (figure,)})])
    assert sorted(one.name for one in store.runs()) == sorted(NAMES)
    for name in NAMES:
        assert store.points(name, name, 2, "count", 1, 1, 1).values.shape == (1, ITEMS)
        assert store.derived(name, name, 1, 1, 1).values.tolist() == [[2.0]]
        assert len(list(store.table(name, [name], 1, 1))) == 1
        store.delete(name)
    assert store.runs() == []


def test_delete_removes_everything_of_a_run_and_nothing_else(place: Place, small_groups: Callable[[], None]) -> None:
    small_groups()
    store = place.open()
    reference = Reference()
    for begin in range(1, 301, 100):
        for run in ("gone", "run"):
            given = [iteration(number, run=run, events=(Event("k", "d"),)) for number in range(begin, begin + 100)]
            store.put(given)
            if run == "run":
                for one in given:
                    reference.put(one)
    before = row_counts(store)
    store.delete("gone")
    assert row_counts(store) == {table: number // 2 for table, number in before.items()}
    check(store, reference)
    check_rolled(store, reference, 1, 300, 5)
    store.put([iteration(1, run="gone")])
    assert store.stored("gone") == {(1000, 1): 4}


def row_counts(store: SqlStore) -> dict[str, int]:
    tables = ["runs", "sessions", "iterations", "events", "series", "level_1", "level_16", "level_256"]
    with store._database.read() as transaction:
        return {table: transaction.execute(f"SELECT count(*) FROM {table}")[0][0] for table in tables}


def test_everything_is_there_after_opening_again(place: Place) -> None:
    reference = Reference()
    store = place.open()
    given = [iteration(number) for number in range(1, 50)]
    for one in given:
        reference.put(one)
    store.put(given[:20])
    store.close()
    store = place.open()
    store.put(given[20:])
    check(store, reference)
    check_rolled(store, reference, 1, 49, 4)
    assert store.size_bytes() > 0


def test_a_run_has_finished_when_its_latest_iteration_says_so(store: SqlStore) -> None:
    over = (Event("finished", ""),)
    store.put([iteration(1), iteration(2, events=over), iteration(1, run="other", events=over)])
    assert {run.name: run.finished for run in store.runs()} == {"run": True, "other": True}
    store.put([iteration(3)])
    assert {run.name: run.finished for run in store.runs()} == {"run": False, "other": True}
    store.put([iteration(1, run="other", session=2000)])
    assert not any(run.finished for run in store.runs())


def test_numbers_of_iterations(store: SqlStore) -> None:
    store.put([iteration(number) for number in (2, 3, 5, 9)])
    assert store.numbers("run", 0, 10**18, 10) == [2, 3, 5, 9]
    assert store.numbers("run", 3, 8, 10) == [3, 5] and store.numbers("run", 3, 9, 2) == [3, 5]
    with pytest.raises(KeyError):
        store.numbers("nowhere", 1, 2, 3)
