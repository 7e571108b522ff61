"""The study's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .readings import Readings, running_median

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every common colour-vision deficiency.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
GREY = "#555555"
LOSS_STEPS = 50  # of the running median that is drawn of losses and loads


def draw_blow_up(arms: Mapping[str, Sequence[Readings]], png: Path) -> None:
    """Loss, max/median and the two norms, a column an arm: seeds as thin lines, their median as a bold one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(arms), 8.4), layout="constrained", dpi=130)
    axes = figure.subplots(3, len(arms), sharex=True, sharey="row", squeeze=False)
    for column, (title, runs) in enumerate(arms.items()):
        losses, ratios, norms = axes[:, column]
        colour = COLOURS[column % len(COLOURS)]
        losses.set_title(title, fontweight="bold")
        _lines(losses, [running_median(run.loss, LOSS_STEPS) for run in runs], colour)
        _lines(ratios, [running_median(run.ratio) for run in runs], colour)
        ratios.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (6, 3)))
        _lines(norms, [running_median(run.largest) for run in runs], colour, "largest")
        _lines(norms, [running_median(run.median) for run in runs], GREY, "median")
        norms.legend(loc="lower right", frameon=False, fontsize=9)
        norms.set_xlabel("step")
        for one in (ratios, norms):
            one.set_yscale("log")
    names = ("loss of the main head (nats)", "experts' output norms: max / median", "largest and median output norm")
    for row, name in enumerate(names):
        axes[row, 0].set_ylabel(name)
    for one in axes.flat:
        _tidy(one)
    # The first steps would leave no room for the rest.
    losses_of_all = np.concatenate([running_median(run.loss, LOSS_STEPS) for runs in arms.values() for run in runs])
    low, high = np.percentile(losses_of_all, (0, 97))
    axes[0, 0].set_ylim(low - 0.05 * (high - low), high + 0.3 * (high - low))
    axes[2, 0].set_ylim(bottom=1)  # likewise
    figure.savefig(png, format="png")


def draw_balance(arms: Mapping[str, Sequence[Readings]], png: Path) -> None:
    """Loss and load over steps, and load over loss; seeds as thin lines, their median as a bold one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained", dpi=130)
    losses, loads = figure.subplots(1, 2, sharex=True)
    for index, (title, runs) in enumerate(arms.items()):
        colour = COLOURS[index % len(COLOURS)]
        _lines(losses, [running_median(run.loss, LOSS_STEPS) for run in runs], colour, title)
        _lines(loads, [running_median(run.load, LOSS_STEPS) for run in runs], colour, title)
    losses.set_ylabel("loss of the main head (nats)")
    loads.set_ylabel("max / mean load of EP groups in a micro-batch")
    loads.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (6, 3)))
    losses.legend(frameon=False, fontsize=9)
    for one in (losses, loads):
        one.set_xlabel("step")
        _tidy(one)
    figure.savefig(png, format="png")


def _lines(axes: Axes, values: Sequence[np.ndarray], colour: str, label: str | None = None) -> None:
    steps = np.arange(1, len(values[0]) + 1)
    for one in values:
        axes.plot(steps, one, color=colour, linewidth=0.7, alpha=0.55)
    axes.plot(steps, np.median(values, axis=0), color=colour, linewidth=2.0, label=label)


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    axes.margins(x=0.01)
