"""The figure of a profile's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from steptron.profiling.intervals import Interval
from steptron.profiling.memory import MemoryTimeline

# Okabe and Ito's palette, told apart with every common colour-vision deficiency.
_LINE, _PEAK = "#000000", "#D55E00"
_PHASES = {
    "data": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "gradient reduction": "#CC79A7",
    "optimizer": "#009E73",
}


def plot_memory(memory: MemoryTimeline, phases: Mapping[str, list[Interval]], title: str, png: Path) -> None:
    """Draws tensors' bytes over time, the phases behind them and the peak."""
    # A figure of its own, without pyplot: no global state and no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained", dpi=130)
    axes = figure.subplots()
    for name, colour in _PHASES.items():
        for i, (start, end) in enumerate(phases.get(name, [])):
            axes.axvspan(
                (start - memory.start_ns) / 1e9,
                (end - memory.start_ns) / 1e9,
                color=colour,
                alpha=0.25,
                linewidth=0,
                label=name if i == 0 else None,
            )
    seconds = (np.asarray(memory.times_ns, dtype=np.int64) - memory.start_ns) / 1e9
    mebibytes = np.asarray(memory.totals, dtype=float) / 2**20
    axes.plot(seconds, mebibytes, color=_LINE, linewidth=1, drawstyle="steps-post")
    axes.axhline(memory.baseline_bytes / 2**20, color="#555555", linestyle=(0, (6, 3)), linewidth=1, label="before")
    peak = ((memory.peak_ns - memory.start_ns) / 1e9, memory.peak_bytes / 2**20)
    axes.plot(*peak, marker="o", color=_PEAK)
    axes.annotate(
        f"peak {peak[1]:,.1f} MiB", peak, xytext=(8, 6), textcoords="offset points", color=_PEAK, fontweight="bold"
    )
    axes.set_title(title)
    axes.set_xlabel("seconds since the start of the profile")
    axes.set_ylabel("tensors (MiB)")
    axes.set_ylim(0, max(peak[1] * 1.12, 1e-3))
    axes.margins(x=0.01)
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.savefig(png, format="png")
