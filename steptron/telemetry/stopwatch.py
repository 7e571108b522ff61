"""How long a rank is busy with an operation in which it waits for nobody, so that a slow rank can be told from the many
that wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Times calls: on a GPU by events, read when the next step's are queued, on the CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timing(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._on_gpu:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                result = operation(*arguments, **options)
                end.record()
                self._events.append((begin, end))
                return result
            start = time.perf_counter()
            result = operation(*arguments, **options)
            self._seconds += time.perf_counter() - start
            return result

        return timed

    def take(self) -> Callable[[], float]:
        """Ends an interval: what gives its seconds, once the GPU has come that far."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []
        if not self._on_gpu:
            return lambda: seconds

        def read() -> float:
            if events:
                events[-1][1].synchronize()
            return sum(begin.elapsed_time(end) for begin, end in events) / 1000

        return read
