"""Where the wall time of a profile went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptron.profiling.attribution import Segment, attribute_device, attribute_host
from steptron.profiling.categories import Category, classify
from steptron.profiling.events import Event, Recording, read_events
from steptron.profiling.intervals import Interval, intersect, length, subtract, union
from steptron.profiling.phases import STEP, phase_intervals, phase_seconds

if TYPE_CHECKING:
    import torch

_CLOCK_TOLERANCE = 1.02
"""The profile's clock and the one of the wall time given may differ by so much."""


@dataclass(frozen=True)
class OperatorTime:
    """An operator in one category.

    Attributes:
        name: of the operator, or of the kernel on a device.
        category: by what encloses it, so that one name may appear in several.
        seconds: of the wall time, without what ran inside it.
        calls: number of events.
    """

    name: str
    category: Category
    seconds: float
    calls: int


@dataclass(frozen=True)
class Breakdown:
    """The wall time of a profile, every moment of it counted once.

    Attributes:
        wall_seconds: the whole.
        seconds: by category, every category named; they add up to the whole.
        operators: longest first.
        phases: seconds by phase of the training step, as the host went through them; empty without
            marks of steps.
        communication_seconds: collectives in flight, whether something else ran at the same time or not.
        on_device: moments were given to what a GPU did, otherwise to what the threads did.
    """

    wall_seconds: float
    seconds: dict[Category, float]
    operators: tuple[OperatorTime, ...]
    phases: dict[str, float]
    communication_seconds: float
    on_device: bool

    def share(self, category: Category) -> float:
        """Part of the wall time, 0 to 1."""
        return self.seconds[category] / self.wall_seconds

    @property
    def unknown(self) -> tuple[OperatorTime, ...]:
        """Operators without a category, longest first."""
        return tuple(operator for operator in self.operators if operator.category is Category.OTHER)


def breakdown(prof: torch.profiler.profile, wall_seconds: float) -> Breakdown:
    """Shares of a finished profile's wall time by category.

    Args:
        prof: started and stopped, with the CPU's activities and, on a GPU, CUDA's.
        wall_seconds: of the steps profiled, measured around them; on a GPU up to a synchronisation.

    Raises:
        ValueError: the profile holds no result, or its operators took longer than the wall time.
    """
    return break_down(read_events(prof), wall_seconds)


def break_down(recording: Recording, wall_seconds: float) -> Breakdown:
    """As `breakdown`, from plain events.

    On a CPU a moment belongs to the operator that the training thread runs then, or else to one that another
    thread runs (the autograd engine's, on a GPU). With a GPU it belongs to the kernel that runs then, to
    communication only where nothing else does; where the GPU is idle, data loading and waiting for
    collectives are told apart. What is left is Python's and unaccounted for.
    """
    steps = union((event.start_ns, event.end_ns) for event in recording.host if event.name == STEP)
    host = attribute_host(recording.host)
    threads = _training_thread_first(recording.host, host.segments)
    if recording.device:
        layers = _device_layers(attribute_device(recording.device, host.categories), threads)
    else:
        layers = threads
    nanoseconds: dict[tuple[str, Category], int] = defaultdict(int)
    events: dict[tuple[str, Category], set[int]] = defaultdict(set)
    free = steps or _whole(layers)
    for layer in layers:
        counted = []
        for segment, span in _visible(layer, free):
            key = (segment.event.name, segment.category)
            nanoseconds[key] += span[1] - span[0]
            events[key].add(id(segment.event))
            counted.append(span)
        free = subtract(free, union(counted))
    covered = sum(nanoseconds.values()) / 1e9
    if covered > wall_seconds * _CLOCK_TOLERANCE:
        raise ValueError(
            f"operators took {covered:.6f} s of a wall time of {wall_seconds:.6f} s: measure it around all of them"
        )
    marked = length(steps) / 1e9
    if marked / _CLOCK_TOLERANCE < wall_seconds < marked * _CLOCK_TOLERANCE:
        wall_seconds = marked  # the same time by the profile's own clock, which the phases are measured by
    wall_seconds = max(wall_seconds, covered, marked)  # phases must not take up more than all of it
    seconds = dict.fromkeys(Category, 0.0)
    for (_, category), value in nanoseconds.items():
        seconds[category] += value / 1e9
    seconds[Category.PYTHON] += wall_seconds - covered
    operators = [OperatorTime(*key, value / 1e9, len(events[key])) for key, value in nanoseconds.items()]
    return Breakdown(
        wall_seconds,
        seconds,
        tuple(sorted(operators, key=lambda operator: -operator.seconds)),
        phase_seconds(phase_intervals(recording.host, steps)) if steps else {},
        _communication_seconds(recording, steps),
        bool(recording.device),
    )


def _training_thread_first(host: list[Event], segments: dict[int, list[Segment]]) -> list[list[Segment]]:
    """Segments by thread: of the thread that marks the steps, or runs most; then of the others in that order."""
    marking = {event.thread for event in host if event.name == STEP}
    busy = {thread: length(segment.span for segment in own) for thread, own in segments.items()}
    return [segments[thread] for thread in sorted(segments, key=lambda thread: (thread not in marking, -busy[thread]))]


def _device_layers(device: list[Segment], threads: list[list[Segment]]) -> list[list[Segment]]:
    """Work on the device, its communication, and what the host does that can keep an idle device waiting."""
    waiting = (Category.DATA, Category.COMMUNICATION)
    return [
        [segment for segment in device if segment.category is not Category.COMMUNICATION],
        [segment for segment in device if segment.category is Category.COMMUNICATION],
        *([segment for segment in own if segment.category in waiting] for own in threads),
    ]


def _visible(layer: list[Segment], free: list[Interval]) -> Iterator[tuple[Segment, Interval]]:
    """The parts of segments that lie in free moments; where segments overlap, the earlier one is seen."""
    seen_until = 0
    i = 0
    for segment in sorted(layer, key=lambda segment: segment.span):
        start, end = max(segment.span[0], seen_until), segment.span[1]
        seen_until = max(seen_until, end)
        while i < len(free) and free[i][1] <= start:
            i += 1
        for j in range(i, len(free)):
            if free[j][0] >= end:
                break
            span = (max(start, free[j][0]), min(end, free[j][1]))
            if span[0] < span[1]:
                yield segment, span


def _whole(layers: list[list[Segment]]) -> list[Interval]:
    spans = [segment.span for layer in layers for segment in layer]
    return [(min(start for start, _ in spans), max(end for _, end in spans))] if spans else []


def _communication_seconds(recording: Recording, steps: list[Interval]) -> float:
    """Time in which some collective was on its way."""
    collectives = [
        event
        for event in [*recording.host, *recording.device, *recording.in_flight]
        if classify(event.name).category is Category.COMMUNICATION
    ]
    spans = union((event.start_ns, event.end_ns) for event in collectives)
    return length(intersect(spans, steps) if steps else spans) / 1e9
