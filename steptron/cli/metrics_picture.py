"""The picture of a run: what its experts do, beside its loss."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from steptron.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from steptron_metrics.reading.source import Source
    from steptron_metrics.results import Points

# Okabe and Ito's palette, told apart with every common colour-vision deficiency.
_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
_MAX_POINTS = 800
_RULES = ("blow_up_intermediate", "blow_up_output", "expert_collapse")
"""Whose alerts are drawn."""
_LOSSES = ("train.lm_loss", "train.loss")


@dataclass(frozen=True)
class Alert:
    """An alert as far as it is drawn."""

    layer: int
    expert: int
    since: int


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        run, metric: names.
        iterations: float64 [P], middle of each point.
        layers: ascending.
        norms: float64 [L, experts, P]; NaN where nothing was measured.
        loss_iterations, loss, loss_name: float64 [Q] each, empty without a loss.
        alerts: about experts of these layers.
    """

    run: str
    metric: str
    iterations: np.ndarray
    layers: tuple[int, ...]
    norms: np.ndarray
    loss_iterations: np.ndarray
    loss: np.ndarray
    loss_name: str
    alerts: tuple[Alert, ...] = ()


def read_picture(source: Source, run: str, metric: str, first: int = 0, last: int | None = None) -> Picture:
    """Reads what is to be drawn.

    Raises:
        UserError: the metric is not there, or has nothing in these iterations.
        KeyError: the run is not there.
    """
    from steptron_metrics.reading.reader import headline
    from steptron_metrics.reading.source import LAST_ITERATION

    last = LAST_ITERATION if last is None else last
    infos = {info.metric: info for info in source.metrics(run)}
    info = infos.get(metric)
    if info is None or info.items < 2:
        several = sorted(one.metric for one in infos.values() if one.items > 1)
        raise UserError(f"run {run} has no metric {metric} by expert; it has {', '.join(several) or 'none'}")
    found = [source.points(run, metric, layer, headline(metric), first, last, _MAX_POINTS) for layer in info.layers]
    iterations = np.unique(np.concatenate([_middles(points) for points in found]))
    if not len(iterations):
        raise UserError(f"run {run} has no {metric} in these iterations")
    norms = np.full((len(found), info.items, len(iterations)), np.nan)
    for index, points in enumerate(found):
        norms[index, : points.values.shape[1], np.searchsorted(iterations, _middles(points))] = points.values
    loss_name = next((name for name in _LOSSES if name in infos), "")
    loss_iterations = loss = np.empty(0)
    if loss_name:
        points = source.points(run, loss_name, -1, "mean", first, last, _MAX_POINTS)
        loss_iterations, loss = _middles(points), points.values[:, 0].astype(np.float64)
    return Picture(
        *(run, metric, iterations, info.layers, norms, loss_iterations, loss, loss_name),
        alerts=tuple(
            Alert(one.layer, one.item, one.since_iteration)
            for one in source.alerts(run)
            if one.layer in info.layers and one.item is not None and one.item < info.items and one.rule in _RULES
        ),
    )


def _middles(points: Points) -> np.ndarray:
    """float64 [P]: iterations in the middle of what each point stands for."""
    return (points.first + points.last) / 2


KINDS = ("png", "pdf", "svg")
"""Of files that are written."""


def draw(picture: Picture, output: Path) -> None:
    """Draws a picture to a file, whose name ends in one of ``KINDS``.

    Raises:
        OSError: the file cannot be written.
    """
    figure_of(picture).savefig(output, format=output.suffix[1:].lower())


def figure_of(picture: Picture) -> Figure:
    """Loss, and max/median and min/median by layer, on the left; experts of all layers over time on the right."""
    # A figure of its own, without pyplot: no global state and no display.
    from matplotlib.figure import Figure

    rows = picture.norms.shape[0] * picture.norms.shape[1]
    figure = Figure(figsize=(14, min(max(5.5, 2.5 + rows / 28), 12)), layout="constrained", dpi=130)
    columns = figure.add_gridspec(1, 2, width_ratios=(1, 1.35))
    left, right = (figure.add_subfigure(columns[0, column]) for column in range(2))
    loss, ratios = left.subplots(2, 1, sharex=True)
    _draw_loss(loss, picture)
    _draw_ratios(ratios, picture)
    left.align_ylabels([loss, ratios])
    _draw_experts(right.subplots(), picture)
    figure.suptitle(f"{picture.run}: {_title(picture.metric)} beside the loss", fontsize=13, fontweight="bold")
    return figure


def _title(metric: str) -> str:
    return metric.removeprefix("moe.").replace("_", " ") + " by expert"


def _draw_loss(axes: Axes, picture: Picture) -> None:
    if len(picture.loss):
        axes.plot(picture.loss_iterations, picture.loss, color=_BLUE, linewidth=1.6)
        axes.set_ylabel(f"{picture.loss_name.removeprefix('train.').replace('_', ' ')} (nats)")
    else:
        axes.text(0.5, 0.5, "no loss was sent", ha="center", va="center", transform=axes.transAxes, color=_GREY)
        axes.set_ylabel("loss")
    _mark(axes, picture)
    _tidy(axes)


def _draw_ratios(axes: Axes, picture: Picture) -> None:
    median = _over_experts(picture.norms, "median")
    with np.errstate(all="ignore"):
        largest = _over_experts(picture.norms, "max") / median
        smallest = _over_experts(picture.norms, "min") / median
    for ratios, colour, label in ((largest, _VERMILION, "max / median"), (smallest, _GREEN, "min / median")):
        shown = np.where(np.isfinite(ratios) & (ratios > 0), ratios, np.nan)
        for layer in range(len(picture.layers)):
            axes.plot(picture.iterations, shown[layer], color=colour, alpha=0.35, linewidth=0.8)
        worst = np.nanmax if label.startswith("max") else np.nanmin
        known = ~np.isnan(shown).all(axis=0)
        if known.any():
            extreme = worst(shown[:, known], axis=0)
            axes.plot(picture.iterations[known], extreme, color=colour, linewidth=1.8, label=f"{label}, worst layer")
    axes.axhline(1, color=_GREY, linewidth=0.8, linestyle=(0, (6, 3)))
    axes.set_yscale("log")
    axes.set_ylabel("over the layer's median")
    axes.set_xlabel("iteration")
    if axes.get_legend_handles_labels()[0]:
        # Above the axes: nowhere within them is free of curves in every run.
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1.02), ncols=2, frameon=False, borderaxespad=0, fontsize=9)
    _mark(axes, picture)
    _tidy(axes)


def _over_experts(norms: np.ndarray, what: Literal["median", "max", "min"]) -> np.ndarray:
    """float64 [L, P], NaN where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of points without a value
        if what == "median":
            return np.asarray(np.nanmedian(norms, axis=1))
        return np.asarray(np.nanmax(norms, axis=1) if what == "max" else np.nanmin(norms, axis=1))


def _draw_experts(axes: Axes, picture: Picture) -> None:
    """All layers one above the other, the first on top, experts in their order within a layer."""
    from matplotlib.colors import LogNorm

    layers, experts, points = picture.norms.shape
    usable = np.where(np.isfinite(picture.norms) & (picture.norms > 0), picture.norms, np.nan)
    known = usable[~np.isnan(usable)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.1, 1.0)
    edges = _edges(picture.iterations)
    image = axes.pcolormesh(
        edges,
        np.arange(layers * experts + 1),
        np.ma.masked_invalid(usable.reshape(layers * experts, points)),
        norm=LogNorm(low, max(high, low * 1.001)),
        cmap="viridis",
        rasterized=True,
    )
    axes.set_facecolor("#EEEEEE")
    axes.set_ylim(layers * experts, 0)
    for boundary in range(1, layers):
        axes.axhline(boundary * experts, color="white", linewidth=1.2 if layers <= 16 else 0.6)
    shown = range(0, layers, -(-layers // 24))
    axes.set_yticks([(layer + 0.5) * experts for layer in shown], [f"{picture.layers[layer]}" for layer in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(f"layer ({experts} experts each)")
    axes.set_xlabel("iteration")
    for alert in picture.alerts:
        row = picture.layers.index(alert.layer) * experts + alert.expert + 0.5
        axes.annotate(
            f"expert {alert.expert}",
            (alert.since, row),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            color="white",
            bbox={"boxstyle": "round,pad=0.25", "facecolor": _VERMILION, "edgecolor": "white", "linewidth": 0.8},
            arrowprops={"arrowstyle": "-|>", "color": _VERMILION},
        )
    for side in axes.spines.values():
        side.set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.015, aspect=40)
    bar.set_label(picture.metric)
    bar.outline.set_visible(False)


def _edges(middles: np.ndarray) -> np.ndarray:
    """Edges of cells around points."""
    if len(middles) == 1:
        return np.array([middles[0] - 0.5, middles[0] + 0.5])
    between = (middles[1:] + middles[:-1]) / 2
    return np.concatenate([[2 * middles[0] - between[0]], between, [2 * middles[-1] - between[-1]]])


def _mark(axes: Axes, picture: Picture) -> None:
    for since in sorted({alert.since for alert in picture.alerts}):
        axes.axvline(since, color=_VERMILION, linewidth=1, linestyle=(0, (2, 2)))


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(False)
    axes.margins(x=0.01)
