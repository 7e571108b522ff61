"""Shares of synthetic recordings come out exactly; those of real ones add up."""

from __future__ import annotations

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from steptron.profiling.breakdown import break_down, breakdown
from steptron.profiling.categories import Category
from steptron.profiling.events import Event, Recording
from steptron.profiling.phases import PHASES

MS = 1_000_000


def event(name: str, start: int, end: int, thread: int = 1, number: int = 0, launched_by: int = 0) -> Event:
    """Times in milliseconds after the epoch's first second."""
    return Event(name, (start + 1000) * MS, (end + 1000) * MS, thread, number, launched_by)


STEP = [
    event("steptron::step", 0, 1000),
    event("steptron::data", 0, 100),
    event("aten::copy_", 20, 40),
    event("steptron::forward", 100, 500),
    event("aten::linear", 110, 200),
    event("aten::t", 110, 115),
    event("aten::mm", 120, 190),
    event("aten::empty", 121, 123),
    event("aten::copy_", 123, 130),
    event("steptron_kernels::attention", 200, 300),
    event("aten::bmm", 210, 250),
    event("aten::copy_", 250, 260),
    event("_ChunkedAttention", 300, 360),
    event("aten::bmm", 310, 350),
    event("foo::bar", 360, 380),
    event("aten::empty", 375, 380),
    event("_LinearCrossEntropy", 380, 440),
    event("aten::mm", 380, 400),
    event("aten::exp_", 400, 430),
    event("autograd::engine::evaluate_function: MmBackward0", 505, 625, thread=2),
    event("MmBackward0", 506, 624, thread=2),
    event("aten::mm", 510, 600, thread=2),
    event("aten::index", 600, 620, thread=2),
    event("aten::mul", 590, 610),
    event("autograd::engine::evaluate_function: _ChunkedAttentionBackward", 630, 690, thread=2),
    event("_ChunkedAttentionBackward", 631, 689, thread=2),
    event("aten::baddbmm_", 640, 680, thread=2),
    event("steptron::gradient reduction", 700, 800),
    event("c10d::allreduce_", 700, 705),
    event("steptron::wait", 710, 790),
    event("steptron::optimizer", 800, 900),
    event("Optimizer.step#AdamW.step", 810, 890),
    event("aten::_fused_adamw_", 820, 880),
    event("aten::bmm", 880, 885),
    event("steptron::parameter gather", 900, 910),
    event("steptron::wait", 910, 950),
]

EXPECTED = {
    Category.PRODUCTS: 90 - 7 + 20 + 80,  # linear but for the copy in it; the head; 510-590 on the engine's thread
    Category.ATTENTION: 100 + 40 + 40,
    Category.COMMUNICATION: 5 + 80 + 40,
    Category.OPTIMIZER: 65,
    Category.ELEMENTWISE: 30 + 20,
    Category.COPIES: 7 + 5 + 10,  # the copy; foo's allocation; 610-620 of index
    Category.DATA: 100,
    Category.OTHER: 15,
}


def test_shares_are_exact() -> None:
    """Nested events once, threads side by side once, Python's own Functions as Python."""
    result = break_down(Recording(STEP, in_flight=[event("gloo:all_reduce", 640, 788, 7)]), 1.0)
    found = {category: round(1000 * seconds) for category, seconds in result.seconds.items()}
    assert found == {**EXPECTED, Category.PYTHON: 1000 - sum(EXPECTED.values())}
    assert sum(result.share(category) for category in Category) == pytest.approx(1, abs=1e-12)
    assert result.communication_seconds == pytest.approx(0.150 + 0.002 - 0.002 + 0.040, abs=1e-12)


def test_order_of_events_does_not_matter() -> None:
    assert break_down(Recording(STEP[::-1]), 1.0) == break_down(Recording(STEP), 1.0)


def test_phases_are_exact() -> None:
    """The backward, unmarked, goes from the engine's first function to its last; collectives in it belong to it."""
    phases = break_down(Recording(STEP), 1.0).phases
    assert [round(1000 * phases[name]) for name in PHASES] == [100, 400, 185, 100, 100, 10, 40, 65]


def test_backward_passes_are_kept_apart_by_forward_passes_and_exchanges() -> None:
    engine = "autograd::engine::evaluate_function: X"
    events = [
        event("steptron::step", 0, 100),
        event("steptron::forward", 0, 10),
        event(engine, 10, 20),
        event(engine, 25, 30),
        event("steptron::forward", 40, 50),
        event(engine, 50, 60),
        event("steptron::wait", 65, 70),
        event(engine, 72, 80),
    ]
    phases = break_down(Recording(events), 0.1).phases
    assert [round(1000 * phases[name]) for name in PHASES] == [0, 20, 38, 0, 0, 0, 5, 37]


def test_operators_are_told_apart_by_category_and_unknown_ones_are_named() -> None:
    result = break_down(Recording(STEP), 1.0)
    table = {(o.name, o.category): (round(1000 * o.seconds), o.calls) for o in result.operators}
    assert table["aten::bmm", Category.ATTENTION] == (80, 2)
    assert table["aten::bmm", Category.OPTIMIZER] == (5, 1)
    assert table["aten::mm", Category.PRODUCTS] == (61 + 20 + 80, 3)
    assert [(o.name, round(1000 * o.seconds)) for o in result.unknown] == [("foo::bar", 15)]
    assert sum(o.seconds for o in result.operators) == pytest.approx(1 - result.seconds[Category.PYTHON])


def test_events_outside_the_steps_do_not_count() -> None:
    """Records, validations and checkpoints between two profiled steps."""
    events = [
        event("steptron::step", 0, 100),
        event("aten::mm", 50, 99),
        event("aten::mul", 120, 190),
        event("steptron::step", 200, 300),
        event("aten::mm", 210, 230),
    ]
    result = break_down(Recording(events), 0.2)
    assert round(1000 * result.seconds[Category.PRODUCTS]) == 49 + 20
    assert result.seconds[Category.ELEMENTWISE] == 0


def test_a_child_that_outlasts_its_parent_ends_with_it() -> None:
    """Clock reads of nested events differ by nanoseconds."""
    events = [event("aten::linear", 0, 50), event("aten::mm", 10, 51), event("aten::add", 50, 60)]
    result = break_down(Recording(events), 0.06)
    assert round(1000 * result.seconds[Category.PRODUCTS]) == 50
    assert round(1000 * result.seconds[Category.ELEMENTWISE]) == 10


def test_collections_of_garbage_are_python_and_named() -> None:
    result = break_down(Recording([event("steptron::garbage collection", 0, 40), event("aten::mm", 40, 60)]), 0.1)
    assert result.seconds[Category.PYTHON] == pytest.approx(0.08)
    assert result.operators[0].name == "steptron::garbage collection"


def test_on_a_gpu_moments_belong_to_its_kernels() -> None:
    """Kernels have the category of the operator that launched them, on whichever thread; communication counts
    where no other kernel runs; the host counts only where it keeps an idle GPU waiting."""
    host = [
        event("steptron::step", 0, 100),
        event("steptron::data", 0, 10),
        event("aten::mm", 10, 12, number=5),
        event("steptron_kernels::attention", 12, 20, number=6),
        event("aten::bmm", 13, 15, number=7),
        event("aten::mm", 14, 16, thread=2, number=8),
        event("c10d::allreduce_", 16, 17, thread=2, number=9),
        event("steptron::wait", 80, 90),
    ]
    device = [
        event("gemm", 12, 30, launched_by=5),
        event("softmax_kernel", 30, 35, launched_by=6),
        event("gemm", 35, 45, launched_by=7),
        event("gemm", 45, 55, launched_by=8),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 70, launched_by=9),
        event("gemm", 50, 60, launched_by=5),
        event("Memcpy DtoH (Device -> Pageable)", 70, 72),
        event("mystery_kernel", 72, 75),
    ]
    result = break_down(Recording(host, device), 0.1)
    found = {category: round(1000 * seconds) for category, seconds in result.seconds.items() if seconds}
    assert found == {
        Category.PRODUCTS: 18 + 10 + 5,
        Category.ATTENTION: 5 + 10,
        Category.COMMUNICATION: 10 + 10,
        Category.COPIES: 2,
        Category.DATA: 10,
        Category.OTHER: 3,
        Category.PYTHON: 17,
    }
    assert result.on_device
    assert [o.name for o in result.unknown] == ["mystery_kernel"]
    assert result.communication_seconds == pytest.approx(0.030 + 0.010 + 0.001)


def test_a_wall_time_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operators took 0\.100000 s of a wall time of 0\.050000 s"):
        break_down(Recording([event("aten::mm", 0, 100)]), 0.05)


def test_an_unfinished_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="start and stop it first"):
        breakdown(profile(activities=[ProfilerActivity.CPU]), 1.0)


def test_a_real_profile() -> None:
    x = torch.randn(400, 400, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        start = time.perf_counter()
        with record_function("steptron::data"):
            time.sleep(0.02)
        for _ in range(3):
            (x @ x).exp().sum().backward()
        time.sleep(0.03)
        wall = time.perf_counter() - start
    result = breakdown(prof, wall)
    assert sum(result.seconds.values()) == pytest.approx(wall, rel=1e-9)
    assert result.seconds[Category.DATA] >= 0.02
    assert result.seconds[Category.PYTHON] >= 0.03
    assert result.seconds[Category.PRODUCTS] > 0 and result.seconds[Category.ELEMENTWISE] > 0
    (mm,) = [o for o in result.operators if o.name == "aten::mm"]
    assert mm.calls == 9 and mm.category is Category.PRODUCTS
    assert result.unknown == () and not result.on_device and result.phases == {}
