"""The phases of a training step: marks around them while a profile runs, and their time afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from steptron.profiling.categories import Category, classify
from steptron.profiling.events import Event
from steptron.profiling.intervals import Interval, intersect, length, subtract, union

STEP = "steptron::step"
WAIT = "steptron::wait"
COLLECTION = "steptron::garbage collection"
_PREFIX = "steptron::"
_MARKED = ("data", "forward", "gradient reduction", "optimizer", "parameter gather")
_BACKWARD, _EXCHANGE, _REST = "backward", "exchange outside these", "rest: norm, clipping, statistics"
PHASES = ("data", "forward", _BACKWARD, "gradient reduction", "optimizer", "parameter gather", _EXCHANGE, _REST)

Target = tuple[Any, str, str]
"""An object or class, the name of one of its methods, and the name of the mark around each call."""


def training_targets(model: Iterable[Any], engine_config: Any, optimizer: Any, gather: Any, data: Any) -> list[Target]:
    """The methods that are the phases of a training step.

    Args:
        model: the chunks that the schedule calls for a forward pass.
        engine_config: Megatron-Core's configuration, which names what completes the gradients.
        optimizer: its ``step``.
        gather: its ``start``, which sends updated parameters on their way; where a forward pass waits for them is
            part of that.
        data: its ``micro_batch``.
    """
    return [
        (data, "micro_batch", "steptron::data"),
        *((chunk, "forward", "steptron::forward") for chunk in model),
        (engine_config, "finalize_model_grads_func", "steptron::gradient reduction"),
        (optimizer, "step", "steptron::optimizer"),
        (gather, "start", "steptron::parameter gather"),
    ]


@contextlib.contextmanager
def marked(targets: Sequence[Target]) -> Iterator[None]:
    """Within it, calls of the methods appear in the profile under the given names."""
    from torch.profiler import record_function

    def marking(method: Callable[..., object], name: str) -> Callable[..., object]:
        @functools.wraps(method)
        def call(*args: object, **kwargs: object) -> object:
            with record_function(name):
                return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for owner, attribute, name in targets:
            if attribute in vars(owner):
                undo.callback(setattr, owner, attribute, vars(owner)[attribute])
            else:
                undo.callback(delattr, owner, attribute)
            setattr(owner, attribute, marking(getattr(owner, attribute), name))
        yield


@contextlib.contextmanager
def marked_collections() -> Iterator[None]:
    """Within it, full collections of Python's garbage collector appear in the profile."""
    from torch.profiler import record_function

    open_marks: list[record_function] = []

    def observe(stage: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if stage == "start":
            open_marks.append(record_function(COLLECTION))
            open_marks[-1].__enter__()
        elif open_marks:
            open_marks.pop().__exit__(None, None, None)

    gc.callbacks.append(observe)
    try:
        yield
    finally:
        gc.callbacks.remove(observe)


def phase_intervals(host: Sequence[Event], within: list[Interval]) -> dict[str, list[Interval]]:
    """When each phase ran.

    Forward, optimizer and the others are marked; the backward is where the autograd engine evaluates functions,
    from the first to the last of them between two other phases or collectives; the exchange is collectives and
    waiting for other ranks outside of all these.

    Args:
        host: all host events.
        within: the steps; what is outside does not count.
    """
    spans = {name: union(_spans(event for event in host if event.name == _PREFIX + name)) for name in _MARKED}
    marked_spans = union(span for own in spans.values() for span in own)
    engine = union(_spans(event for event in host if event.name.startswith("autograd::engine::evaluate_function")))
    exchange = union(_spans(event for event in host if classify(event.name).category is Category.COMMUNICATION))
    borders = sorted(start for start, _ in [*marked_spans, *exchange])
    spans[_BACKWARD] = subtract(_bridged(engine, borders), marked_spans)
    spans[_EXCHANGE] = subtract(exchange, union([*marked_spans, *spans[_BACKWARD]]))
    spans[_REST] = subtract(within, union(span for own in spans.values() for span in own))
    return {name: intersect(spans[name], within) for name in PHASES}


def phase_seconds(phases: dict[str, list[Interval]]) -> dict[str, float]:
    """Seconds of each phase."""
    return {name: length(spans) / 1e9 for name, spans in phases.items()}


def _spans(events: Iterable[Event]) -> Iterator[Interval]:
    return ((event.start_ns, event.end_ns) for event in events)


def _bridged(spans: list[Interval], borders: list[int]) -> list[Interval]:
    """Closes the gaps between spans in which there is no border."""
    bridged: list[Interval] = []
    i = 0
    for start, end in spans:
        if bridged:
            while i < len(borders) and borders[i] < bridged[-1][1]:
                i += 1
            if i == len(borders) or borders[i] >= start:
                bridged[-1] = (bridged[-1][0], end)
                continue
        bridged.append((start, end))
    return bridged
