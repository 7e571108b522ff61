"""Profiles chosen steps of a training run and writes what was found."""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from steptron.profiling.breakdown import break_down
from steptron.profiling.events import read_events
from steptron.profiling.intervals import union
from steptron.profiling.memory import live_bytes, read_changes, timeline, write_peak
from steptron.profiling.memory_plot import plot_memory
from steptron.profiling.phases import STEP, WAIT, Target, marked, marked_collections, phase_intervals
from steptron.profiling.request import ProfileRequest, Window
from steptron.profiling.summary import Profiled, render

_REMEMBERED_STEPS = 100


@dataclass
class _Session:
    """A window that is being profiled, or was and is not written yet.

    Attributes:
        undo: takes back the marks and whatever else was set up.
        earlier_seconds: wall times of the steps before.
        wall_seconds, num_steps, tokens, process_peak_bytes: of the window's steps so far.
        is_finished: its last step is done.
    """

    window: Window
    prof: profile
    baseline_bytes: int
    undo: contextlib.ExitStack
    earlier_seconds: list[float]
    wall_seconds: float = 0.0
    num_steps: int = 0
    tokens: int = 0
    process_peak_bytes: int = 0
    is_finished: bool = False


class StepProfiler:
    """Profiles the windows of a request, on one rank.

    Nothing that goes wrong here ends the training: it is said, and the run goes on. As a context it stops what is
    running at the end, and writes what was finished unless the run failed.

    Args:
        request: what to profile.
        folder: of all profiles of the run.
        targets: methods to mark, with the names of their phases.
        device: of this process.
        settle: waits for collectives that are under way. Their threads record what they do, and a profiler that stops
            meanwhile may take the process with it.
    """

    def __init__(
        self,
        request: ProfileRequest,
        folder: Path,
        targets: Sequence[Target],
        device: torch.device,
        settle: Callable[[], object],
    ) -> None:
        self._windows = deque(request.windows)
        self._folder = folder
        self._targets = targets
        self._device = device
        self._settle = settle
        self._prints = dist.get_rank() == request.ranks[0]
        self._earlier: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._session: _Session | None = None
        self._step_mark: record_function | None = None
        self._step_start = 0.0

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._stop(session)
        if error is None:
            self._write(session)

    def begin(self, step: int) -> bool:
        """Before a step's data is read.

        Args:
            step: counted from 1.

        Returns:
            Whether a profile was started: the time that it took does not belong to training.
        """
        starts = self._session is None and bool(self._windows) and step in self._windows[0]
        if starts:
            with self._tolerating("the profiler cannot be started"):
                self._session = self._start(self._windows.popleft())
        if self._session is not None:
            self._step_mark = record_function(STEP)
            self._step_mark.__enter__()
        self._step_start = time.perf_counter()
        return starts

    def end(self, step: int, tokens: int) -> None:
        """After the step's update.

        Args:
            step: as given to `begin`.
            tokens: of all processes in this step.
        """
        session = self._session
        if session is None:
            self._earlier.append(time.perf_counter() - self._step_start)
            return
        self._synchronize()
        session.wall_seconds += time.perf_counter() - self._step_start
        assert self._step_mark is not None
        self._step_mark.__exit__(None, None, None)
        session.num_steps += 1
        session.tokens += tokens
        session.process_peak_bytes = self._process_peak_bytes()
        session.is_finished = step == session.window.last

    def write(self) -> bool:
        """Ends and writes the window whose last step is done, if there is one.

        Returns:
            Whether there was one: the time that it took does not belong to training.
        """
        session = self._session
        if session is None or not session.is_finished:
            return False
        self._session = None
        self._stop(session)
        self._write(session)
        return True

    def _start(self, window: Window) -> _Session:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Kineto's own messages would come between the lines of the console.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        prof = profile(activities=activities, profile_memory=True, record_shapes=True)
        undo = contextlib.ExitStack()
        try:
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history()
                undo.callback(torch.cuda.memory._record_memory_history, enabled=None)
            undo.enter_context(marked([*self._targets, (dist.Work, "wait", WAIT)]))
            undo.enter_context(marked_collections())
            baseline = live_bytes(self._device)
            self._synchronize()
            prof.start()
        except BaseException:
            undo.close()
            raise
        return _Session(window, prof, baseline, undo, list(self._earlier))

    def _stop(self, session: _Session) -> None:
        with self._tolerating("the profiler cannot be stopped"), session.undo:
            self._settle()
            session.prof.stop()
            if self._device.type == "cuda":
                path = self._rank_folder(session) / "memory_snapshot.pickle"
                torch.cuda.memory._dump_snapshot(str(path))

    def _write(self, session: _Session) -> None:
        if session.num_steps:
            with self._tolerating(f"the profile of {session.window} is not complete"):
                self._write_files(session)

    def _write_files(self, session: _Session) -> None:
        folder = self._rank_folder(session)
        with self._tolerating("no trace"):
            _write_trace(session.prof, folder / "trace.json.gz")
        recording = read_events(session.prof)
        steps = union((event.start_ns, event.end_ns) for event in recording.host if event.name == STEP)
        phases = phase_intervals(recording.host, steps)
        profiled = self._profiled(session)
        memory, phase_at_peak = None, None
        with self._tolerating("no memory timeline"):
            changes = read_changes(session.prof, self._device.type, (steps[0][0], steps[-1][1]))
            memory = timeline(changes, session.baseline_bytes, start_ns=steps[0][0])
            phase_at_peak = memory.phase_at_peak(phases)
            write_peak(memory, phase_at_peak, folder / "memory.json")
            plot_memory(memory, phases, profiled.title, folder / "memory.png")
        page = render(profiled, break_down(recording, session.wall_seconds), memory, phase_at_peak)
        (folder / "summary.md").write_text(page)
        if self._prints:
            print(f"\n{page}\nprofile: {folder}", flush=True)

    def _rank_folder(self, session: _Session) -> Path:
        folder = self._folder / session.window.folder_name / f"rank{dist.get_rank()}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _profiled(self, session: _Session) -> Profiled:
        if self._device.type == "cuda":
            device = torch.cuda.get_device_name(self._device)
        else:
            device = f"the CPU, {torch.get_num_threads()} threads"
        return Profiled(
            session.window,
            dist.get_rank(),
            dist.get_world_size(),
            device,
            session.num_steps,
            session.tokens,
            session.earlier_seconds,
            session.process_peak_bytes,
        )

    def _process_peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            print(f"warning: {what}: {error}; training goes on", file=sys.stderr, flush=True)


def _write_trace(prof: profile, path: Path) -> None:
    """The Chrome trace, compressed; many times faster than torch's own compression, which goes line by line."""
    plain = path.with_suffix(".partial")
    try:
        prof.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
