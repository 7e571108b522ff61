"""Layouts of gradient buffers: nothing is lost, doubled or cut, and padding is what it is said to be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.config.loader import load
from steptron.config.schema import OptimizerConfig, ShardingConfig
from steptron.model.layer_spec import ParameterRole, model_spec
from steptron.model.parameter_shards import Place, shard
from steptron.optim import buckets, ownership
from steptron.optim.buffer_plan import newton_schulz_cost, plan_buffers
from steptron.optim.ownership import BufferLayout, MatrixRun, Reduction, Unit, balance, lay_out

FLASH = Path(__file__).resolve().parents[2] / "configs" / "pretrain" / "step3p5-flash.yaml"

RANKS = st.integers(1, 9)
PLAIN_UNITS = st.lists(st.integers(1, 60).map(Unit), max_size=12)
BUCKETS = st.sampled_from([1, 7, 40, 1 << 24])
REDUCTIONS = st.sampled_from(["auto", "reduce_scatter", "all_reduce"])


@pytest.fixture(autouse=True)
def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells to the element, so that small numbers show what is meant."""
    monkeypatch.setattr(ownership, "ALIGNMENT", 1)


def unit_of(*sizes: int) -> Unit:
    """A unit that consists of matrices of these sizes, each as costly as it is large."""
    ends = list(itertools.accumulate(sizes))
    return Unit(ends[-1], tuple(MatrixRun(end - size, end, float(size)) for end, size in zip(ends, sizes, strict=True)))


@st.composite
def equal_units(draw: st.DrawFn) -> list[Unit]:
    size = draw(st.integers(1, 9))
    return [unit_of(*[size] * count) for count in draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))]


UNEQUAL_UNITS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=2, max_size=12).map(
    lambda sizes: [unit_of(*own) for own in [[41, 2], *sizes]]
)


@pytest.fixture(autouse=True)
def _usual_buckets() -> Iterator[None]:
    assert buckets.BUCKET_ELEMENTS == 1 << 24
    yield


def check(units: list[Unit], layout: BufferLayout) -> None:
    """What holds for every layout."""
    starts = [span.start for span in layout.spans]
    assert starts == [0, *(span.stop for span in layout.spans)][: len(starts)]
    assert layout.length == (layout.spans[-1].stop if layout.spans else 0)
    lying = sorted((offset, offset + unit.size) for offset, unit in zip(layout.offsets, units, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(lying)), "units overlap"
    assert not lying or (lying[0][0] >= 0 and lying[-1][1] <= layout.length)
    assert layout.padding == layout.length - sum(unit.size for unit in units) >= 0
    # Every element of every unit is owned once, and by a rank that exists.
    for index, unit in enumerate(units):
        runs = [run for run in layout.runs if run.unit == index]
        assert [run.start for run in runs] == [0, *(run.stop for run in runs)][: len(runs)]
        assert runs[-1].stop == unit.size and all(0 <= run.owner < layout.ranks for run in runs)
        if unit.matrices:
            assert [(run.start, run.stop) for run in runs] == [(m.start, m.stop) for m in unit.matrices]
    assert [run.unit for run in layout.runs] == sorted(run.unit for run in layout.runs)
    if layout.has_cells:
        # Who owns a run is who gets its cell of the span.
        for span in layout.spans:
            assert span.size % layout.ranks == 0
        for run in layout.runs:
            start, stop = layout.offsets[run.unit] + run.start, layout.offsets[run.unit] + run.stop
            (span,) = (s for s in layout.spans if s.start <= start < s.stop)
            cell = span.size // layout.ranks
            assert (start - span.start) // cell == (stop - 1 - span.start) // cell == run.owner
    else:
        assert layout.reduction is Reduction.ALL_REDUCE and layout.padding == 0


@settings(max_examples=80, deadline=None)
@given(PLAIN_UNITS, RANKS, REDUCTIONS, BUCKETS)
def test_what_may_be_cut_is_shared_equally(units: list[Unit], ranks: int, reduction: str, bucket: int) -> None:
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket):
        layout = lay_out(units, ranks, reduction)  # type: ignore[arg-type]
    check(units, layout)
    assert layout.reduction.value == ("all_reduce" if reduction == "all_reduce" else "reduce_scatter")
    assert layout.has_cells and layout.padding <= len(layout.spans) * (ranks - 1)
    for span in layout.spans:
        inside = sum(
            u.size for u, offset in zip(units, layout.offsets, strict=True) if span.start <= offset < span.stop
        )
        assert span.size - inside < ranks
    # Units lie in their order, each in one span.
    assert list(layout.offsets) == sorted(layout.offsets)


@settings(max_examples=80, deadline=None)
@given(equal_units(), RANKS, REDUCTIONS, BUCKETS)
def test_equal_matrices(units: list[Unit], ranks: int, reduction: str, bucket: int) -> None:
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket):
        layout = lay_out(units, ranks, reduction, max_padding=0.15)  # type: ignore[arg-type]
    check(units, layout)
    size, number = units[0].matrices[0].stop, sum(len(unit.matrices) for unit in units)
    missing = -number % ranks
    if ranks > 1:
        assert layout.scattered_padding == pytest.approx(missing / number)
        scatters = reduction == "reduce_scatter" or (reduction == "auto" and missing / number <= 0.15)
        assert (layout.reduction is Reduction.REDUCE_SCATTER) is scatters is layout.has_cells
    if layout.has_cells:
        # Padding is less than one matrix for each rank, at the end; units follow one another without a gap.
        assert layout.padding == missing * size < ranks * size
        assert layout.offsets == tuple(itertools.accumulate([0, *(unit.size for unit in units[:-1])]))
        *whole, last = layout.spans
        assert len({span.size for span in whole}) <= 1 and last.stop - layout.padding > last.start
        owned = [sum(run.owner == rank for run in layout.runs) for rank in range(ranks)]
        assert max(owned) <= number // ranks + len(layout.spans)


@settings(max_examples=80, deadline=None)
@given(UNEQUAL_UNITS, RANKS, REDUCTIONS, BUCKETS, st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_unequal_matrices(units: list[Unit], ranks: int, reduction: str, bucket: int, max_padding: float) -> None:
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket):
        layout = lay_out(units, ranks, reduction, max_padding)  # type: ignore[arg-type]
    check(units, layout)
    if ranks == 1:
        assert layout.padding == 0 and {run.owner for run in layout.runs} == {0}
        return
    size = sum(unit.size for unit in units)
    if layout.has_cells:
        assert layout.scattered_padding == pytest.approx(layout.padding / size)
        # No cell is fuller than it is long, and in every span one is full.
        for span in layout.spans:
            filled = [0] * ranks
            for unit, offset in zip(units, layout.offsets, strict=True):
                if span.start <= offset < span.stop:
                    filled[(offset - span.start) // (span.size // ranks)] += unit.size
            assert max(filled) == span.size // ranks
    fits = layout.scattered_padding <= max_padding
    assert layout.has_cells is (reduction == "reduce_scatter" or (reduction == "auto" and fits))


def test_auto_scatters_where_little_is_padded() -> None:
    """Spans hold a cell of the largest unit for every rank at least: 2 x 100 elements."""
    units = [unit_of(60, 40), unit_of(80), unit_of(20)] * 2
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 10):
        scattered = lay_out(units, 2, max_padding=0.0)
        none = lay_out([*units, unit_of(9)], 2, max_padding=0.02)
        forced = lay_out([*units, unit_of(9)], 2, "reduce_scatter", max_padding=0.0)
        forced_none = lay_out(units, 2, "all_reduce", max_padding=1.0)
    assert [span.size for span in scattered.spans] == [200, 200] and scattered.scattered_padding == 0.0
    assert none.reduction is forced_none.reduction is Reduction.ALL_REDUCE
    assert none.scattered_padding == forced.scattered_padding == pytest.approx(9 / 409) and none.padding == 0
    assert [span.size for span in none.spans] == [100, 80, 20, 100, 80, 20, 9]
    assert [span.size for span in forced.spans] == [200, 200, 18]


@pytest.mark.parametrize(
    "unit",
    [
        Unit(10, (MatrixRun(0, 4, 1.0), MatrixRun(5, 10, 1.0))),
        Unit(10, (MatrixRun(0, 6, 1.0), MatrixRun(5, 10, 1.0))),
        Unit(10, (MatrixRun(0, 9, 1.0),)),
        Unit(10, (MatrixRun(1, 10, 1.0),)),
        Unit(10, (MatrixRun(0, 11, 1.0),)),
        Unit(10),
    ],
    ids=["gap", "overlap", "short", "late", "long", "none"],
)
def test_matrices_that_do_not_tile_their_unit_are_refused(unit: Unit) -> None:
    for ranks in (1, 2):
        with pytest.raises(ValueError, match="do not tile the 10 elements"):
            lay_out([unit_of(4, 6), unit], ranks)


def test_nothing_to_own() -> None:
    layout = lay_out([], 4)
    assert (layout.length, layout.spans, layout.runs, layout.scattered_padding) == (0, (), (), 0.0)


def test_more_ranks_than_elements() -> None:
    layout = lay_out([Unit(2), Unit(1)], 8)
    check([Unit(2), Unit(1)], layout)
    assert [(run.unit, run.owner) for run in layout.runs] == [(0, 0), (0, 1), (1, 2)] and layout.length == 8


# ------------------------------------------------------------------------------------ balancing


def optimum(costs: list[int], ranks: int) -> float:
    return min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


def loads_of(costs: list[float], owners: list[int], ranks: int) -> list[float]:
    return [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_grahams_bound_of_the_optimum(costs: list[int], ranks: int) -> None:
    """Longest processing time: at most 4/3 - 1/(3 m) times the best possible (Graham 1969)."""
    heaviest = max(loads_of(list(map(float, costs)), balance(costs, ranks), ranks))
    assert heaviest <= (4 / 3 - 1 / (3 * ranks)) * optimum(costs, ranks) + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=20), st.lists(st.integers(0, 50), min_size=1, max_size=5))
def test_balance_fills_up_what_ranks_have_already(costs: list[int], loads: list[int]) -> None:
    ranks = len(loads)
    owners = balance(costs, ranks, list(map(float, loads)))
    filled = list(loads)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        assert filled[owners[index]] == min(filled), "the costliest first, each to a least loaded rank"
        filled[owners[index]] += costs[index]


# ------------------------------------------------------------------------- Step 3.5 Flash's sizes

EXPERT = 1280 * 4096
"""Elements of an expert's gate, up and down projection."""


def moe_layers(layers: int, experts: int = 36) -> list[Unit]:
    """Stacked experts of a pipeline rank: down, then gate and up."""
    return [unit for _ in range(layers) for unit in (unit_of(*[EXPERT] * experts), unit_of(*[EXPERT] * (2 * experts)))]


@pytest.mark.parametrize(
    "layers, ranks, percent",
    [(6, 8, 0.0), (6, 64, 8.6), (2, 64, 18.5), (4, 64, 3.7), (5, 64, 6.7)],
    ids=str,
)
def test_padding_of_the_experts(layers: int, ranks: int, percent: float) -> None:
    """EP8: 36 of 288 experts. One buffer over all chunks of a pipeline rank pads 8.6 %, one for each chunk of two
    layers 18.5 % (figures: calls of Megatron-Core 0.19.2's own layout on the same shapes)."""
    units = moe_layers(layers)
    layout = lay_out(units, ranks, "reduce_scatter")
    assert 100 * layout.scattered_padding == pytest.approx(percent, abs=0.05)
    assert layout.padding < ranks * EXPERT
    check(units, layout)
    # Reductions are large enough for bandwidth and small enough to overlap: a cell is one matrix at 8 or 64 ranks.
    assert {span.size for span in layout.spans} == {ranks * EXPERT}
    assert lay_out(units, ranks).reduction is (Reduction.REDUCE_SCATTER if percent < 15 else Reduction.ALL_REDUCE)


def as_units(shapes: list[tuple[int, int]]) -> list[Unit]:
    return [
        Unit(rows * columns, (MatrixRun(0, rows * columns, newton_schulz_cost((rows, columns), 6)),))
        for rows, columns in shapes
    ]


def matrices_of_six_layers() -> list[tuple[int, int]]:
    """Stored parameters besides experts of a stage with one full and five sliding layers, as the figures below take
    them: without head gates, and with the routers."""
    shapes = []
    for heads in (96, 96, 96, 64, 96, 96):
        shapes += [(4096, 1280), (2 * 1280, 4096), (288, 4096), (4096, heads * 128), ((heads + 2 * 8) * 128, 4096)]
    return shapes


@pytest.mark.parametrize(
    "ranks, length, percent", [(8, 805_306_368, 11.5), (64, 3_758_096_384, 420), (512, 30_064_771_072, 4063)]
)
def test_padding_of_everything_else(ranks: int, length: int, percent: float) -> None:
    """What Megatron-Core 0.19.2 makes of the same shapes in one bucket, to the element; so nobody would have it."""
    units = as_units(matrices_of_six_layers())
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 1 << 30):
        layout = lay_out(units, ranks, "reduce_scatter")
    check(units, layout)
    assert layout.length == length and 100 * layout.scattered_padding == pytest.approx(percent, rel=0.005)
    assert lay_out(units, ranks).length == sum(unit.size for unit in units)


@pytest.mark.parametrize("ranks, percent", [(8, 53.9), (64, 427), (512, 4119)])
def test_padding_of_everything_else_as_muon_takes_it(ranks: int, percent: float) -> None:
    """Our projection holds the head gate's rows too, and the router is AdamW's: 717 instead of 722 million elements,
    and a largest unit that is longer by 96 rows; at 8 ranks in two spans, reduced while the backward runs."""
    config = load(FLASH).config
    shards = [
        shard(parameter, Place(expert_size=8))
        for layer in model_spec(config.model).layers[6:12]
        for parameter in layer.parameters()
    ]
    plans = plan_buffers(
        [own for own in shards if own.parameter.role is not ParameterRole.ROUTER_BIAS],
        OptimizerConfig(lr=1.0, sharding=ShardingConfig(reduction="reduce_scatter")),
        1,
        {"dp_cp": ranks, "expt_dp": ranks // 8},
    )
    (plan,) = (plan for plan in plans if plan.holds_matrices and plan.replicas == "dp_cp")
    assert sum(own.size for own in plan.shards) == 717_357_056
    assert 100 * plan.layout.scattered_padding == pytest.approx(percent, rel=0.005)


@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_what_follows_a_cut_parameter_is_aligned(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Whatever the number of ranks: products on GPUs want addresses that are multiples of 16 bytes."""
    monkeypatch.setattr(ownership, "ALIGNMENT", 64)
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 1):
        layout = lay_out([Unit(size) for size in (4096, 1000, 288 * 64, 64, 4096)], ranks)
    assert all(offset % 8 == 0 for offset in layout.offsets) and all(span.size % ranks == 0 for span in layout.spans)
    assert layout.padding <= 64 * ranks * len(layout.spans)


def test_later_spans_make_up_for_the_loads_of_earlier_ones() -> None:
    """Two spans, each with one costly unit: not both to the same rank."""
    units = [unit_of(60), unit_of(40), unit_of(60), unit_of(40)]
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 10):
        layout = lay_out(units, 2, "reduce_scatter")
    loads = [0, 0]
    for run in layout.runs:
        loads[run.owner] += run.stop - run.start
    assert loads == [100, 100]
