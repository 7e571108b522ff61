"""What the study reads back of a run from the metrics server."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np

from steptron_metrics.reading.reader import MetricsReader

NORM = "moe.output_norm_max"
PATIENCE_SECONDS = 180.0
SMOOTH_STEPS = 25  # of the running median, for what scatters from step to step


@dataclass(frozen=True)
class Readings:
    """A run, step by step; float64 [steps] each unless said otherwise.

    Attributes:
        loss: of the main head, nats.
        ratio: max/median over the experts of the largest norm of an expert's output, in the layer where it is largest.
        layer: int64, that layer.
        largest, median: the two norms in that layer.
        alignment: of the expert with the largest norm, ||silu(g) * u|| / (||silu(g)|| ||u||); NaN where not sampled.
        usual_alignment: median over the experts of that layer, likewise.
        load: max/mean load of EP groups in the micro-batch, mean over layers.
        shares: float64 [layers, steps, groups], load of each group over the mean of the groups.
    """

    loss: np.ndarray
    ratio: np.ndarray
    layer: np.ndarray
    largest: np.ndarray
    median: np.ndarray
    alignment: np.ndarray
    usual_alignment: np.ndarray
    load: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True)
class Peak:
    """Where the running median of a run's ratio is largest.

    Attributes:
        step: 1 for the first.
        ratio: the running median there.
        layer: of that step.
        largest, median, alignment, usual_alignment: running medians there.
    """

    step: int
    ratio: float
    layer: int
    largest: float
    median: float
    alignment: float
    usual_alignment: float


def wait_for(reader: MetricsReader, run: str, steps: int, patience: float = PATIENCE_SECONDS) -> None:
    """Returns once the server has stored all steps.

    Raises:
        TimeoutError: it has not after so many seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            stored = len(reader.iterations(run, 1, steps))
        except KeyError:
            stored = 0
        if stored >= steps:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server has stored {stored} of {steps} steps of run {run} after {patience:g} s")
        time.sleep(0.2)


def read(reader: MetricsReader, run: str, steps: int) -> Readings:
    """Reads a run that is complete at the server."""
    ratios = reader.derived(run, f"{NORM}.max_over_median", 1, steps)
    layers = [int(layer) for layer in ratios.columns]
    # [layers, steps, experts]; NaN of an expert without tokens.
    norms = np.stack([reader.aggregates(run, NORM, layer, None, 1, steps).to_numpy(np.float64) for layer in layers])
    shares = np.stack(
        [reader.aggregates(run, "moe.group_share", layer, "mean", 1, steps).to_numpy(np.float64) for layer in layers]
    )
    alignments = np.stack([_sampled(reader, run, "moe.alignment", layer, steps) for layer in layers])
    worst = ratios.to_numpy(np.float64).argmax(axis=1)
    each = np.arange(len(worst))
    expert = np.nanargmax(norms[worst, each], axis=1)
    return Readings(
        loss=reader.aggregates(run, "train.lm_loss", -1, None, 1, steps).to_numpy(np.float64)[:, 0],
        ratio=ratios.to_numpy(np.float64)[each, worst],
        layer=np.array(layers)[worst],
        largest=np.nanmax(norms[worst, each], axis=1),
        median=np.nanmedian(norms[worst, each], axis=1),
        alignment=alignments[worst, each, expert],
        usual_alignment=_median_of_known(alignments[worst, each]),
        load=reader.derived(run, "moe.group_imbalance", 1, steps).to_numpy(np.float64).mean(axis=1),
        shares=shares,
    )


def _sampled(reader: MetricsReader, run: str, metric: str, layer: int, steps: int) -> np.ndarray:
    """float64 [steps, items], NaN in steps that do not measure the metric."""
    frame = reader.aggregates(run, metric, layer, None, 1, steps)
    return frame.reindex(range(1, steps + 1)).to_numpy(np.float64)


def _median_of_known(values: np.ndarray) -> np.ndarray:
    """float64 [steps] of [steps, items]: NaN where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps without a value
        return np.asarray(np.nanmedian(values, axis=1))


def running_median(values: np.ndarray, width: int = SMOOTH_STEPS) -> np.ndarray:
    """float64 [steps]: median of each value and those up to ``width // 2`` steps before and after it, NaN left out."""
    padded = np.pad(np.asarray(values, np.float64), width // 2, constant_values=np.nan)
    return _median_of_known(np.lib.stride_tricks.sliding_window_view(padded, 2 * (width // 2) + 1))


def trailing_mean(values: np.ndarray, width: int) -> np.ndarray:
    """float64 [steps - width + 1]: mean of ``width`` values; the first ends at step ``width``."""
    return np.convolve(np.asarray(values, np.float64), np.full(width, 1 / width), mode="valid")


def share_over(readings: Readings, ratio: float) -> float:
    """Share of the steps in which the running median of the ratio is larger."""
    return float((running_median(readings.ratio) > ratio).mean())


def peak(readings: Readings) -> Peak:
    ratio = running_median(readings.ratio)
    at = int(ratio.argmax())
    others = (readings.largest, readings.median, readings.alignment, readings.usual_alignment)
    return Peak(
        at + 1, float(ratio[at]), int(readings.layer[at]), *(float(running_median(values)[at]) for values in others)
    )


@dataclass(frozen=True)
class LoadAt:
    """Load of EP groups when a run has come down to a loss.

    Attributes:
        step: the last of the window whose mean loss is the first to be as low.
        loss: that mean, nats.
        in_micro_batch: max/mean of each micro-batch, mean over the window and the layers.
        over_window: max/mean of all tokens of the window, mean over the layers.
    """

    step: int
    loss: float
    in_micro_batch: float
    over_window: float


def load_at(readings: Readings, loss: float, window: int) -> LoadAt:
    """The load over the ``window`` steps whose mean loss is the first at or below ``loss``.

    Raises:
        ValueError: the run never comes down to it.
    """
    means = trailing_mean(readings.loss, window)
    reached = np.flatnonzero(means <= loss)
    if not len(reached):
        raise ValueError(f"the mean loss of {window} steps never comes down to {loss:g}: the lowest is {means.min():g}")
    first = int(reached[0])
    steps = slice(first, first + window)
    return LoadAt(
        first + window,
        float(means[first]),
        float(readings.load[steps].mean()),
        float(readings.shares[:, steps].mean(axis=1).max(axis=1).mean()),
    )


def common_loss(runs: list[Readings], window: int) -> float:
    """The lowest mean loss of ``window`` steps that every run has come down to, nats."""
    return max(float(trailing_mean(readings.loss, window).min()) for readings in runs)
