from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from steptron.profiling.memory import Change, live_bytes, read_changes, timeline, write_peak
from steptron.profiling.memory_plot import plot_memory

FOREVER = (0, 1 << 63)

CHANGES = [
    Change(10, 1, 100, ("aten::empty", "aten::mm", "F", "steptron::forward")),
    Change(20, 2, 50, ("aten::empty_strided", "aten::ones_like")),
    Change(30, 1, -100, ()),
    Change(40, 1, 70, ("aten::empty", "foo::bar")),
    Change(50, 3, 10, ()),
    Change(60, 2, -50, ("aten::mul",)),
    Change(70, 4, 30, ("aten::empty",)),
]


def test_peak_and_what_was_alive_then() -> None:
    memory = timeline(CHANGES, baseline_bytes=1000, start_ns=0)
    assert memory.totals == (1000, 1100, 1150, 1050, 1120, 1130, 1080, 1110)
    assert (memory.peak_bytes, memory.peak_ns) == (1150, 20)
    assert [(a.bytes, a.operator) for a in memory.alive] == [(100, "aten::mm"), (50, "aten::ones_like")]
    later = timeline(CHANGES[2:], baseline_bytes=1150, start_ns=0)
    assert later.peak_ns == 0 and later.alive == ()
    again = timeline([*CHANGES, Change(80, 5, 500, ("aten::empty", "steptron::forward"))], 0, 0)
    assert [(a.bytes, a.operator) for a in again.alive] == [
        (500, "aten::empty"),
        (70, "foo::bar"),
        (30, "aten::empty"),
        (10, "Python"),
    ]


def test_phase_at_the_peak() -> None:
    memory = timeline(CHANGES, 0, 0)
    assert memory.phase_at_peak({"forward": [(0, 15), (18, 25)], "backward": [(25, 90)]}) == "forward"
    assert memory.phase_at_peak({"forward": [(0, 20)], "backward": [(21, 90)]}) is None


def test_real_allocations_are_found_with_their_operator() -> None:
    x = torch.randn(256, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        with record_function("steptron::forward"):
            kept = torch.mm(x, x)
        freed = torch.empty(1 << 20)
        del freed
    changes = read_changes(prof, "cpu", FOREVER)
    memory = timeline(changes, baseline_bytes=0, start_ns=changes[0].time_ns)
    assert memory.peak_bytes - memory.totals[-1] >= 4 << 20
    product = next(a for a in memory.alive if a.bytes == kept.nbytes)
    assert product.operator == "aten::mm" and product.inside[-1] == "steptron::forward"
    assert memory.alive[0].bytes == 4 << 20 and memory.alive[0].operator == "aten::empty"
    assert read_changes(prof, "cuda", FOREVER) == []
    assert read_changes(prof, "cpu", (0, changes[0].time_ns)) == []


def test_live_bytes_count_each_storage_once() -> None:
    before = live_bytes(torch.device("cpu"))
    x = torch.zeros(1 << 20)
    views = [x.view(1024, 1024), x[5:], torch.nn.Parameter(x)]
    assert live_bytes(torch.device("cpu")) - before == x.nbytes
    del x, views
    assert live_bytes(torch.device("cpu")) == before


def test_files(tmp_path: Path) -> None:
    memory = timeline(CHANGES, 1000, 0)
    write_peak(memory, "forward", tmp_path / "memory.json")
    content = json.loads((tmp_path / "memory.json").read_text())
    assert content["peak_bytes"] == 1150 and content["peak_phase"] == "forward"
    assert content["alive_before_bytes"] == 1000
    assert content["by_operator_bytes"] == {"aten::mm": 100, "aten::ones_like": 50}
    assert content["largest_allocations"][0] == {
        "bytes": 100,
        "operator": "aten::mm",
        "inside": ["aten::empty", "aten::mm", "F", "steptron::forward"],
        "seconds": 1e-8,
    }
    plot_memory(memory, {"forward": [(0, 40)]}, "title", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
