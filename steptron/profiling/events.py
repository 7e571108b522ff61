"""What happened, as the profiler recorded it: plain events, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Event:
    """Something on a thread, or a kernel or copy on a stream.

    Attributes:
        name: as in the trace.
        start_ns: nanoseconds since the epoch.
        end_ns: likewise; not before the start.
        thread: of a host event; 0 on a device.
        number: of a host event, which device events refer to; 0 without one.
        launched_by: number of the host event that launched a device event; 0 when unknown.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    number: int = 0
    launched_by: int = 0


@dataclass(frozen=True)
class Recording:
    """The events of a profile.

    Attributes:
        host: operators and marks, nested per thread.
        device: kernels and copies; empty on a CPU.
        in_flight: collectives between their start and their end, whichever thread waits for them.
    """

    host: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    in_flight: list[Event] = field(default_factory=list)


def read_events(prof: torch.profiler.profile) -> Recording:
    """The events of a finished profile.

    Raises:
        ValueError: the profile was not started and stopped.
    """
    from torch.autograd import DeviceType

    results = prof.profiler.kineto_results if prof.profiler is not None else None
    if results is None:
        raise ValueError("the profile holds no result: start and stop it first")
    recording = Recording()
    for raw in results.events():
        name, kind = raw.name(), raw.activity_type()
        if name == "[memory]" or raw.duration_ns() < 0:
            continue
        event = Event(
            name,
            raw.start_ns(),
            raw.end_ns(),
            thread=raw.start_thread_id(),
            number=raw.correlation_id(),
            launched_by=raw.linked_correlation_id(),
        )
        if raw.device_type() != DeviceType.CPU:
            # The device's copy of a host annotation is not work.
            if kind != "gpu_user_annotation":
                recording.device.append(event)
        elif raw.is_async():
            recording.in_flight.append(event)
        elif kind in ("cpu_op", "user_annotation"):
            recording.host.append(event)
    return recording
