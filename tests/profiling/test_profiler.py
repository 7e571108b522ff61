"""The profiler around steps of a small model, in a process group of one."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from steptron.profiling.phases import COLLECTION, marked, marked_collections
from steptron.profiling.profiler import StepProfiler
from steptron.profiling.request import ProfileRequest, Window
from tests.worker_pool import WorkerPool


class Trainer:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self) -> None:
        (self.weight @ self.weight).sum().backward()
        dist.all_reduce(self.weight.grad)

    def step(self) -> None:
        with torch.no_grad():
            self.weight -= 1e-3 * self.weight.grad


@dataclass
class Outcome:
    printed: str
    warned: str
    files: list[str]
    ended: list[bool]


def profiled(rank: int, world_size: int, folder: Path, windows: list[tuple[int, int]], fault: str) -> Outcome:
    """Five steps; the third fails or is the last one where the fault says so."""
    printed, warned = io.StringIO(), io.StringIO()
    trainer, ended = Trainer(), []
    targets = [(trainer, "forward", "steptron::forward"), (trainer, "step", "steptron::optimizer")]
    request = ProfileRequest(tuple(Window(*pair) for pair in windows))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(warned), contextlib.suppress(ArithmeticError):  # noqa: SIM117
        with StepProfiler(request, folder, targets, torch.device("cpu"), lambda: None) as profiler:
            for step in range(1, 6):
                profiler.begin(step)
                trainer.forward()
                if fault == "error" and step == 3:
                    raise ArithmeticError
                trainer.step()
                profiler.end(step, tokens=1000)
                if fault == "stop" and step == 3:
                    break
                ended.append(profiler.write())
    assert "forward" not in vars(trainer) and dist.Work.wait.__name__ == "wait"
    assert not hasattr(dist.Work.wait, "__wrapped__")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Outcome(printed.getvalue(), warned.getvalue(), files, ended)


FILES = ("memory.json", "memory.png", "summary.md", "trace.json.gz")


def test_windows_are_written_when_they_end(pool: WorkerPool, tmp_path: Path) -> None:
    (outcome,) = pool.run(1, profiled, tmp_path, [(2, 3), (5, 5)], "none")
    assert outcome.warned == ""
    assert outcome.ended == [False, False, True, False, True]
    assert outcome.files == [f"{window}/rank0/{name}" for window in ("step-5", "steps-2-3") for name in FILES]
    page = (tmp_path / "steps-2-3/rank0/summary.md").read_text()
    assert page in outcome.printed and "2 steps in" in page and "(median of 1)" in page
    assert "| optimizer " in page and "aten::mm" in page
    with gzip.open(tmp_path / "step-5/rank0/trace.json.gz") as stream:
        names = {event["name"] for event in json.load(stream)["traceEvents"] if "name" in event}
    assert {"steptron::step", "steptron::forward", "steptron::wait", "aten::mm", "gloo:all_reduce"} <= names


def test_a_stop_inside_a_window_leaves_what_was_done(pool: WorkerPool, tmp_path: Path) -> None:
    (outcome,) = pool.run(1, profiled, tmp_path, [(2, 5)], "stop")
    assert outcome.warned == "" and "2 steps in" in (tmp_path / "steps-2-5/rank0/summary.md").read_text()


def test_a_failed_step_is_not_profiled_and_its_error_is_not_hidden(pool: WorkerPool, tmp_path: Path) -> None:
    (outcome,) = pool.run(1, profiled, tmp_path, [(3, 3)], "error")
    assert outcome.files == [] and outcome.printed == ""


def test_a_failed_write_is_a_warning(pool: WorkerPool, tmp_path: Path) -> None:
    """The folder of the first window is a file."""
    (tmp_path / "steps-2-3").write_text("in the way")
    (outcome,) = pool.run(1, profiled, tmp_path, [(2, 3), (5, 5)], "none")
    assert outcome.ended == [False, False, True, False, True]
    assert "warning: the profile of steps 2-3 is not complete: " in outcome.warned
    assert "training goes on" in outcome.warned and "Traceback" not in outcome.warned
    assert outcome.files == [*(f"step-5/rank0/{name}" for name in FILES), "steps-2-3"]


def test_marks_are_taken_back_after_an_error() -> None:
    trainer = Trainer()
    trainer.step = step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(KeyError), marked([(trainer, "forward", "a"), (trainer, "step", "b")]):
        assert trainer.step is not step
        raise KeyError
    assert "forward" not in vars(trainer) and trainer.step is step


def test_full_collections_are_marked() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof, marked_collections():
        gc.collect(0)
        gc.collect()
    gc.collect()
    assert [e.name for e in prof.events() or [] if e.name.startswith("steptron")] == [COLLECTION]
