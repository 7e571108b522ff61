"""Which tensors were alive when most memory was in use."""

from __future__ import annotations

import bisect
import gc
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptron.profiling.categories import Strength, classify
from steptron.profiling.intervals import Interval

if TYPE_CHECKING:
    import torch

_LISTED = 50


@dataclass(frozen=True)
class Change:
    """Memory taken or given back.

    Attributes:
        time_ns: nanoseconds since the epoch.
        address: of the block.
        num_bytes: negative where it is given back.
        inside: what it happened in, innermost first.
    """

    time_ns: int
    address: int
    num_bytes: int
    inside: tuple[str, ...]


@dataclass(frozen=True)
class Allocation:
    """A block that was alive at the peak.

    Attributes:
        bytes: its size.
        operator: what made it: the innermost operator that does more than allocate.
        inside: everything that it was made in, innermost first.
        seconds: since the start of the profile.
    """

    bytes: int
    operator: str
    inside: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of tensors over the time of a profile.

    Attributes:
        start_ns: of the profile.
        baseline_bytes: tensors alive before it.
        times_ns: of each change.
        totals: bytes after each change, the baseline included.
        peak_bytes: largest total.
        peak_ns: when it was reached.
        alive: blocks of the profile that were alive then, largest first.
    """

    start_ns: int
    baseline_bytes: int
    times_ns: tuple[int, ...]
    totals: tuple[int, ...]
    peak_bytes: int
    peak_ns: int
    alive: tuple[Allocation, ...]

    def phase_at_peak(self, phases: Mapping[str, list[Interval]]) -> str | None:
        """The phase in which the peak was reached; None between phases."""
        for name, spans in phases.items():
            i = bisect.bisect_right(spans, self.peak_ns, key=lambda span: span[0]) - 1
            if i >= 0 and self.peak_ns < spans[i][1]:
                return name
        return None


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors that Python can see on the CPU, or that the allocator has given out on a GPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    sizes: dict[int, int] = {}
    # What the training loop has frozen, the collector does not list.
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    with warnings.catch_warnings():
        # Looking at an object can warn that it is deprecated.
        warnings.simplefilter("ignore")
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    if was_frozen:
        gc.freeze()
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def read_changes(prof: torch.profiler.profile, device_type: str, within: Interval) -> list[Change]:
    """Allocations and frees of a finished profile (``profile_memory=True``) on one kind of device, in order."""
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    changes = [
        Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, inside)
        for event, inside in _walk(prof.profiler.kineto_results.experimental_event_tree())
        if event.name == "[memory]"
        and event.extra_fields.device.type == device_type
        and within[0] <= event.start_time_ns < within[1]
    ]
    return sorted(changes, key=lambda change: change.time_ns)


def _walk(roots: list[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    pending: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in roots]
    while pending:
        event, inside = pending.pop()
        yield event, inside
        within = (event.name, *inside)
        pending.extend((child, within) for child in event.children)


def timeline(changes: list[Change], baseline_bytes: int, start_ns: int) -> MemoryTimeline:
    """Adds up changes, in order."""
    times, totals = [start_ns], [baseline_bytes]
    for change in changes:
        times.append(change.time_ns)
        totals.append(totals[-1] + change.num_bytes)
    peak = max(range(len(totals)), key=totals.__getitem__)
    alive: dict[int, Change] = {}
    for change in changes[:peak]:
        if change.num_bytes > 0:
            alive[change.address] = change
        else:
            alive.pop(change.address, None)
    allocations = [
        Allocation(change.num_bytes, _maker(change.inside), change.inside, (change.time_ns - start_ns) / 1e9)
        for change in sorted(alive.values(), key=lambda change: -change.num_bytes)
    ]
    return MemoryTimeline(
        start_ns, baseline_bytes, tuple(times), tuple(totals), totals[peak], times[peak], tuple(allocations)
    )


def _maker(inside: tuple[str, ...]) -> str:
    """`aten::mm` rather than the `aten::empty` inside it."""
    operators = [name for name in inside if classify(name).is_operator]
    for name in operators:
        if classify(name).strength is not Strength.WEAK:
            return name
    return operators[-1] if operators else "Python"


def write_peak(memory: MemoryTimeline, phase: str | None, path: Path) -> None:
    """The peak and the largest blocks alive then, as JSON."""
    by_operator: dict[str, int] = defaultdict(int)
    for allocation in memory.alive:
        by_operator[allocation.operator] += allocation.bytes
    content = {
        "peak_bytes": memory.peak_bytes,
        "peak_seconds": (memory.peak_ns - memory.start_ns) / 1e9,
        "peak_phase": phase,
        "alive_before_bytes": memory.baseline_bytes,
        "by_operator_bytes": dict(sorted(by_operator.items(), key=lambda item: -item[1])),
        "largest_allocations": [asdict(allocation) for allocation in memory.alive[:_LISTED]],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
