"""Packings against the definition of best fit, exhaustive search and plain first fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.packing import PackedStream, Packing, best_fit, pack

INSTANCES = st.integers(1, 70).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(0, capacity), max_size=60))
)


def rows_of(packing: Packing) -> list[list[int]]:
    return [packing.row(number).tolist() for number in range(packing.rows)]


def fewest_rows(sizes: list[int], capacity: int) -> int:
    """By trying every row for every size."""

    def search(left: list[int], free: list[int], best: int) -> int:
        if not left or len(free) >= best:
            return min(best, len(free))
        size, rest = left[0], left[1:]
        for row in range(len(free)):
            if free[row] >= size:
                best = search(rest, [*free[:row], free[row] - size, *free[row + 1 :]], best)
        return search(rest, [*free, capacity - size], best)

    return search(sorted(sizes, reverse=True), [], len(sizes))


def first_fit(sizes: list[int], capacity: int) -> int:
    """Rows that it takes when every size goes into the first row with space."""
    free = np.full(len(sizes), capacity)
    for size in sizes:
        free[np.argmax(free >= size)] -= size
    return int((free < capacity).sum())


@given(INSTANCES, st.integers(0, 3), st.integers(0, 2))
def test_every_document_is_in_one_row_and_no_row_overflows(
    instance: tuple[int, list[int]], seed: int, epoch: int
) -> None:
    capacity, sizes = instance
    rows = rows_of(pack(np.array(sizes, np.int32), capacity, seed, epoch))
    assert sorted(itertools.chain(*rows)) == [number for number, size in enumerate(sizes) if size]
    assert all(0 < sum(sizes[number] for number in row) <= capacity for row in rows)


@given(INSTANCES)
def test_each_choice_is_a_best_fit(instance: tuple[int, list[int]]) -> None:
    """The least free space that is enough, whatever the row; capacities up to 70 cross the borders of words."""
    capacity, sizes = instance[0], [size for size in instance[1] if size]
    free: list[int] = []
    for size, row in zip(sizes, best_fit(sizes, capacity), strict=True):
        fitting = [space for space in free if space >= size]
        if fitting:
            assert free[row] == min(fitting)
        else:
            assert row == len(free)
            free.append(capacity)
        free[row] -= size


@settings(deadline=None)
@given(st.integers(1, 12).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=8))))
def test_rows_are_at_most_17_tenths_of_the_fewest(instance: tuple[int, list[int]]) -> None:
    capacity, sizes = instance
    rows = pack(np.array(sizes, np.int32), capacity, 0).rows
    assert 10 * rows <= 17 * fewest_rows(sizes, capacity)


def lengths(name: str, capacity: int, count: int = 4000) -> np.ndarray:
    generator = np.random.default_rng(5)
    values_D = {
        "short": lambda: generator.lognormal(np.log(capacity / 14), 1.0, count),
        "medium": lambda: generator.lognormal(np.log(capacity / 3), 1.2, count),
        "uniform": lambda: generator.uniform(1, capacity, count),
        "two kinds": lambda: np.where(generator.random(count) < 0.5, capacity * 0.6, capacity * 0.1),
    }[name]()
    return np.clip(values_D, 1, capacity).astype(np.int32)


@pytest.mark.parametrize("name, fill", [("short", 0.99), ("medium", 0.99), ("uniform", 0.99), ("two kinds", 0.98)])
def test_rows_are_filled_and_better_than_by_first_fit(name: str, fill: float) -> None:
    """Against the fewest rows that documents longer than half a row, and all tokens together, allow."""
    sizes_D = lengths(name, 1000)
    least = max(-(-int(sizes_D.sum()) // 1000), int((2 * sizes_D > 1000).sum()))
    for seed in range(3):
        rows = pack(sizes_D, 1000, seed).rows
        assert rows <= first_fit(np.random.default_rng(seed).permutation(sizes_D).tolist(), 1000)
        assert least / rows >= fill


def test_rows_are_as_random_as_space_allows() -> None:
    """Best fit decreasing puts documents of one length together: most of the variance lies between rows."""
    sizes_D = lengths("short", 1000)
    logarithms_D = np.log(sizes_D)

    def between_rows(rows: list[list[int]]) -> float:
        means = np.concatenate([np.full(len(row), logarithms_D[row].mean()) for row in rows])
        return float(means.var() / logarithms_D.var())

    decreasing_D = np.argsort(-sizes_D)
    in_row_D = np.array(best_fit(sizes_D[decreasing_D].tolist(), 1000))
    by_length = [decreasing_D[in_row_D == row].tolist() for row in range(in_row_D.max() + 1)]
    assert between_rows(rows_of(pack(sizes_D, 1000, 0))) < 0.25 < 0.75 < between_rows(by_length)


def test_epochs_and_seeds_pack_other_documents_together() -> None:
    sizes_D = lengths("short", 1000)

    def pairs(seed: int, epoch: int) -> set[tuple[int, int]]:
        rows = rows_of(pack(sizes_D, 1000, seed, epoch))
        return {pair for row in rows for pair in itertools.combinations(sorted(row), 2)}

    one = pairs(0, 0)
    assert one == pairs(0, 0)
    for other in (pairs(0, 1), pairs(1, 0)):
        assert len(one & other) < 0.02 * len(one)


def test_full_and_half_empty_rows_are_mixed() -> None:
    sizes_D = lengths("medium", 1000)
    packing = pack(sizes_D, 1000, 0)
    longest = np.array([sizes_D[row].max() for row in rows_of(packing)])
    halves = np.array_split(longest, 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.05 * longest.mean()


def test_a_document_larger_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="size 11 does not fit a row of 10"):
        pack(np.array([3, 11]), 10, 0)


def test_the_packing_of_nothing_has_no_rows() -> None:
    for sizes in ([], [0, 0]):
        assert pack(np.array(sizes, np.int32), 10, 0).rows == 0


def test_any_row_of_any_epoch_is_found() -> None:
    sizes_D = lengths("two kinds", 100, count=37)
    in_turn = list(itertools.chain(*(rows_of(pack(sizes_D, 100, 9, epoch)) for epoch in range(6))))
    stream = PackedStream(sizes_D, 100, 9)
    assert [stream.row(number).tolist() for number in range(len(in_turn))] == in_turn
    for number in (len(in_turn) - 1, 0, len(in_turn) // 2):
        assert PackedStream(sizes_D, 100, 9).row(number).tolist() == in_turn[number]
        assert stream.row(number).tolist() == in_turn[number]
