"""The one page about a profile."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from steptron.profiling.breakdown import Breakdown
from steptron.profiling.categories import Category
from steptron.profiling.memory import MemoryTimeline
from steptron.profiling.request import Window

_TOP_OPERATORS = 15
_TOP_MEMORY = 5
_TOP_UNKNOWN = 5
_LONGEST_NAME = 60

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Profiled:
    """What was profiled.

    Attributes:
        window: the steps.
        rank: of this process.
        world_size: processes of the run.
        device: name of the device, such as "cpu, 2 threads".
        num_steps: steps that the window really holds; fewer than it names when the run was stopped in it.
        tokens: of all processes in these steps, padding not counted.
        earlier_seconds: wall time of each step before, since the start of the process.
        process_peak_bytes: resident memory of the process at its peak (CPU), or bytes given out by the
            allocator (GPU).
    """

    window: Window
    rank: int
    world_size: int
    device: str
    num_steps: int
    tokens: int
    earlier_seconds: Sequence[float]
    process_peak_bytes: int

    @property
    def title(self) -> str:
        return f"Profile of {self.window}, rank {self.rank} of {self.world_size}"


def render(profiled: Profiled, result: Breakdown, memory: MemoryTimeline | None, phase_at_peak: str | None) -> str:
    """The page, in Markdown that reads well as plain text."""
    wall = result.wall_seconds
    lines = [
        f"# {profiled.title}",
        "",
        f"{profiled.num_steps} step{'s' if profiled.num_steps > 1 else ''} in {wall:.3f} s on {profiled.device}: "
        f"{wall / profiled.num_steps:.3f} s per step, {profiled.tokens / wall:,.0f} tokens/s of all processes.",
        _slowdown(profiled, wall),
        "",
        *_table(
            ["GPU time" if result.on_device else "time", "share", "s per step"],
            [
                [_category_name(category, result), f"{100 * result.share(category):.1f} %", seconds]
                for category, seconds in _per_step(result.seconds, profiled.num_steps)
            ],
        ),
        "",
        *_communication(result, profiled.num_steps),
        *_unknown(result),
        *_table(
            [
                f"{'kernel' if result.on_device else 'operator'}, self time",
                "of",
                "share",
                "s per step",
                "calls per step",
            ],
            [
                [
                    _shortened(operator.name),
                    operator.category.value.split(":")[0],
                    f"{100 * operator.seconds / wall:.1f} %",
                    f"{operator.seconds / profiled.num_steps:.4f}",
                    f"{operator.calls / profiled.num_steps:,.0f}",
                ]
                for operator in result.operators[:_TOP_OPERATORS]
            ],
        ),
        "",
        *_table(
            ["phase (host's time)" if result.on_device else "phase", "share", "s per step"],
            [
                [name, f"{100 * result.phases[name] / wall:.1f} %", seconds]
                for name, seconds in _per_step(result.phases, profiled.num_steps)
            ],
        ),
        "",
        *_memory(profiled, memory, phase_at_peak),
    ]
    return "\n".join(lines) + "\n"


def _slowdown(profiled: Profiled, wall: float) -> str:
    warning = "Profiling slows the step, Python and small operators most"
    if not profiled.earlier_seconds:
        return f"{warning}; by how much is not known: no step ran before."
    usual = statistics.median(profiled.earlier_seconds)
    ratio = wall / profiled.num_steps / usual
    return f"{warning}: {ratio:.2f} times the {usual:.3f} s of before (median of {len(profiled.earlier_seconds)})."


def _category_name(category: Category, result: Breakdown) -> str:
    if category is Category.PYTHON and result.on_device:
        return "GPU idle: Python, launches, unaccounted"
    return category.value


def _per_step(seconds: Mapping[_Key, float], steps: int) -> list[tuple[_Key, str]]:
    return [(key, f"{value / steps:.4f}") for key, value in seconds.items()]


def _communication(result: Breakdown, steps: int) -> list[str]:
    if not result.communication_seconds:
        return []
    exposed = result.seconds[Category.COMMUNICATION]
    return [
        f"Collectives were on their way for {result.communication_seconds / steps:.4f} s per step; for "
        f"{exposed / steps:.4f} s nothing else ran.",
        "",
    ]


def _unknown(result: Breakdown) -> list[str]:
    if not result.unknown:
        return []
    longest = result.unknown[:_TOP_UNKNOWN]
    shown = [f"{_shortened(o.name)} ({100 * o.seconds / result.wall_seconds:.1f} %)" for o in longest]
    more = len(result.unknown) - len(shown)
    return [f"Other operators: {', '.join(shown)}{f' and {more} more' if more else ''}.", ""]


def _memory(profiled: Profiled, memory: MemoryTimeline | None, phase: str | None) -> list[str]:
    lines = [f"Peak of the process so far, with the profiler's own: {_mebibytes(profiled.process_peak_bytes)}."]
    if memory is None:
        return lines
    lines[0] += (
        f" Tensors: {_mebibytes(memory.baseline_bytes)} before the step, {_mebibytes(memory.peak_bytes)} at the peak"
        f"{f' ({phase})' if phase else ''}."
    )
    largest = [
        [_mebibytes(a.bytes), _shortened(a.operator), _shortened(_place(a.inside))] for a in memory.alive[:_TOP_MEMORY]
    ]
    return [*lines, "", *_table(["largest alive at the peak", "made by", "inside"], largest)] if largest else lines


def _place(inside: Sequence[str]) -> str:
    """The autograd Function or phase around an allocation."""
    marks = [name for name in inside if "::" not in name or name.startswith("steptron")]
    return (marks or ["Python"])[0]


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table with padded columns; numbers to the right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    numeric = [bool(rows) and all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w - 1)}{':' if n else '-'}" for w, n in zip(widths, numeric, strict=True)]
    return [line(header), line(rule), *map(line, rows)]
