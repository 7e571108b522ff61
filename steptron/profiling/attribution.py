"""Gives every moment of every thread and stream to the operator that ran then, and that to a category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from steptron.profiling.categories import Category, Row, Strength, classify
from steptron.profiling.events import Event
from steptron.profiling.intervals import Interval


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time in which an operator ran and none of those inside it.

    Attributes:
        span: nanoseconds.
        event: the operator.
        category: after looking at what encloses it.
    """

    span: Interval
    event: Event
    category: Category


@dataclass(frozen=True)
class HostTime:
    """Segments by thread, ascending, and the category of each numbered event."""

    segments: dict[int, list[Segment]]
    categories: dict[int, Category]


@dataclass(slots=True)
class _Open:
    """An event on the stack, with the strongest row from the outermost event down to it."""

    event: Event
    end: int
    row: Row
    is_operator: bool
    covered_until: int


def attribute_host(events: Iterable[Event]) -> HostTime:
    """Cuts each thread's nested events into segments. Moments in which only marks are open
    (Python code, the autograd engine) belong to no segment."""
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    categories: dict[int, Category] = {}
    segments = {thread: _attribute_thread(own, categories) for thread, own in threads.items()}
    return HostTime(segments, categories)


def _attribute_thread(events: list[Event], categories: dict[int, Category]) -> list[Segment]:
    events.sort(key=lambda event: (event.start_ns, -event.end_ns))
    segments: list[Segment] = []
    stack: list[_Open] = []

    def advance(moment: int) -> None:
        """Closes the events that end by then."""
        while stack and stack[-1].end <= moment:
            top = stack.pop()
            emit(top, top.end)
            if stack:
                stack[-1].covered_until = top.end

    def emit(top: _Open, until: int) -> None:
        if top.is_operator and top.row.category is not None and top.covered_until < until:
            segments.append(Segment((top.covered_until, until), top.event, top.row.category))
        top.covered_until = max(top.covered_until, until)

    for event in events:
        advance(event.start_ns)
        row, end, is_operator = classify(event.name), event.end_ns, classify(event.name).is_operator
        if stack:
            emit(stack[-1], event.start_ns)
            # Clocks of nested events may differ by a few nanoseconds: a child ends with its parent.
            end = min(end, stack[-1].end)
            row = _stronger(stack[-1].row, row)
        stack.append(_Open(event, end, row, is_operator, event.start_ns))
        if event.number and row.category is not None:
            categories[event.number] = row.category
    if stack:
        advance(stack[0].end)
    return segments


def _stronger(outer: Row, inner: Row) -> Row:
    """The row that counts for an event inside one for which ``outer`` counts."""
    if inner.category is None or (outer.category is not None and outer.strength > inner.strength):
        return outer
    return inner


def attribute_device(events: Iterable[Event], categories: dict[int, Category]) -> list[Segment]:
    """Kernels and copies with the category of the host operator that launched them. They may overlap:
    streams run side by side. NCCL's kernels are communication whoever launched them."""
    segments = []
    for event in events:
        own = classify(event.name)
        category = categories.get(event.launched_by)
        if category is None or (own.category is Category.COMMUNICATION and own.strength is Strength.ALL):
            category = own.category or Category.OTHER
        segments.append(Segment((event.start_ns, event.end_ns), event, category))
    return segments
