"""The figure of a run: losses above, learning rate and speed below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steptron.errors import UserError
from steptron.train.records import EventRecord, StepRecord, ValidationRecord, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every common colour-vision deficiency.
_BLUE, _VERMILION, _GREEN, _PURPLE, _SKY, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
_MTP_COLOURS = (_GREEN, _PURPLE, _ORANGE)
_DOMAIN_COLOURS = (_VERMILION, _SKY, _ORANGE, _PURPLE, _GREEN)
_DOMAIN_MARKERS = ("s", "^", "v", "D", "x")
_GREY = "#555555"


def plot_losses(jsonl: Path, png: Path, reference_lines: Mapping[str, float] | None = None) -> None:
    """Draws a run's log.

    Args:
        jsonl: log written by ``JsonlSink``.
        png: image to write.
        reference_lines: horizontal lines in the loss panel by label, nats per token (for example the
            corpus' unigram entropy).

    Raises:
        UserError: the log holds no training step, or a line cannot be read.
        FileNotFoundError: there is no log.
    """
    # A figure of its own, without pyplot: no global state and no display.
    from matplotlib.figure import Figure

    records = read_records(jsonl)
    steps = [record for record in records if isinstance(record, StepRecord)]
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    if not steps:
        raise UserError(f"{jsonl} holds no training step yet: there is nothing to plot")

    figure = Figure(figsize=(9, 7), layout="constrained", dpi=130)
    losses, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    _draw_losses(losses, steps, validations, reference_lines or {})
    _draw_rate_and_speed(rate, steps)
    # A stage's event has the step that comes first in it; a run's first stage needs no line.
    for event in records:
        if isinstance(event, EventRecord) and event.event == "stage" and event.step > 1:
            for axes in (losses, rate):
                axes.axvline(event.step - 0.5, color=_GREY, linewidth=0.8, zorder=0)
            losses.annotate(
                event.detail.split(" (")[0],
                (event.step - 0.5, 1.0),
                xycoords=losses.get_xaxis_transform(),
                xytext=(2, -10),
                textcoords="offset points",
                color=_GREY,
                fontsize=8,
            )
    figure.align_ylabels([losses, rate])
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, format="png")


def smooth(values: Sequence[float], half_width: int) -> np.ndarray:
    """Moving mean over up to ``half_width`` values on each side.

    At the start the window shrinks on both sides, so that a steep fall is not shifted; at the end it
    ends with the data. Values that are not finite are left out; a window without any gives NaN.
    """
    array = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(array))
    reach = np.minimum(half_width, index)
    first, end = index - reach, np.minimum(index + reach + 1, len(array))
    number = counts[end] - counts[first]
    return np.where(number > 0, (sums[end] - sums[first]) / np.maximum(number, 1), np.nan)


def _draw_losses(
    axes: Axes,
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationRecord],
    reference_lines: Mapping[str, float],
) -> None:
    x = [record.step for record in steps]
    # Depths that were added or frozen on the way leave gaps.
    depths = max(len(record.mtp_losses) for record in steps)
    for depth in reversed(range(depths)):
        mtp = [record.mtp_losses[depth] if depth < len(record.mtp_losses) else np.nan for record in steps]
        _raw_and_smooth(axes, x, mtp, _MTP_COLOURS[depth % len(_MTP_COLOURS)], f"training, MTP depth {depth + 1}")
    _raw_and_smooth(axes, x, [record.lm_loss for record in steps], _BLUE, "training, next token")
    if validations:
        axes.plot(
            [record.step for record in validations],
            [record.lm_loss for record in validations],
            color=_VERMILION,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            linewidth=1,
            label="validation, next token",
            zorder=4,
        )
    domains = dict.fromkeys(name for record in validations for name in record.domains)
    for number, name in enumerate(domains):
        axes.plot(
            [record.step for record in validations if name in record.domains],
            [record.domains[name] for record in validations if name in record.domains],
            color=_DOMAIN_COLOURS[number % len(_DOMAIN_COLOURS)],
            marker=_DOMAIN_MARKERS[number // len(_DOMAIN_COLOURS) % len(_DOMAIN_MARKERS)],
            markersize=4,
            linewidth=0.8,
            linestyle=(0, (2, 1.5)),
            label=f"validation, {name}",
            zorder=3,
        )
    for label, value in reference_lines.items():
        axes.axhline(value, color=_GREY, linestyle=(0, (6, 3)), linewidth=1)
        axes.annotate(
            f"{label} ({value:.2f})",
            (0.995, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=_GREY,
            fontsize=9,
        )
    axes.set_ylabel("loss (nats per token)")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9
    )
    _tidy(axes)


def _draw_rate_and_speed(axes: Axes, steps: Sequence[StepRecord]) -> None:
    x = [record.step for record in steps]
    axes.plot(x, [record.learning_rate for record in steps], color=_BLUE, linewidth=1.8)
    axes.set_ylabel("learning rate", color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_xlabel("optimizer step")
    _tidy(axes)
    speed = axes.twinx()
    speed.plot(
        x, [record.tokens_per_second for record in steps], color=_VERMILION, linewidth=1, linestyle=(0, (4, 1.5))
    )
    speed.set_ylabel("tokens per second", color=_VERMILION)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed.spines["top"].set_visible(False)


def _raw_and_smooth(axes: Axes, x: Sequence[int], y: Sequence[float], colour: str, label: str) -> None:
    axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
    axes.plot(x, smooth(y, half_width=len(y) // 60), color=colour, linewidth=1.8, label=label)


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.margins(x=0.01)
