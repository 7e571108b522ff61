"""Writes what is stored of a run as TensorBoard's event files."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from steptron_metrics.errors import MetricsError
from steptron_metrics.reading.export import Progress, begin, finish
from steptron_metrics.reading.reader import headline
from steptron_metrics.reading.source import LAST_ITERATION, Source
from steptron_metrics.reading.whole import LAYERS, parts, run_of
from steptron_metrics.results import Points, Run

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

Items = Literal["none", "histograms", "scalars"]
_BINS = 30


def export_tensorboard(
    source: Source,
    run: str,
    folder: Path,
    *,
    items: Items = "histograms",
    metrics: Sequence[str] | None = None,
    first: int = 0,
    last: int = LAST_ITERATION,
    overwrite: bool = False,
    progress: Progress = lambda part, done, total: None,
) -> Path:
    """Writes an event file: ``tensorboard --logdir FOLDER`` shows it.

    Scalars are derived figures (``<figure>/layer_<n>``) and the headline statistic of metrics with a single value, such
    as ``train.loss`` or ``moe.confidence/layer_<n>``; steps are iterations, their time is when they ended.

    Args:
        source: of :func:`~steptron_metrics.reading.source.open_source`.
        items: what becomes of metrics with several items (experts, ranks, ...): a histogram over them of their headline
            statistic, a scalar each (``.../item_<n>``), or nothing.
        metrics: only these, without derived figures; all of both without it.
        first, last: only these iterations.
        overwrite: replaces an earlier export in the folder.

    Returns:
        the folder.

    Raises:
        MetricsError: the package tensorboard is missing, the folder exists, or something broke off.
        KeyError: there is no such run or metric.
    """
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise MetricsError("the package tensorboard is missing: pip install tensorboard") from error
    found = run_of(source, run)
    infos = source.metrics(run)
    for name in metrics or ():
        if name not in [one.metric for one in infos]:
            raise KeyError(name)
    work, (first, last) = begin(folder, source, found, f"tensorboard {items}", metrics, (first, last), overwrite)
    chosen = [
        (one, layer)
        for one in infos
        if (metrics is None or one.metric in metrics) and (one.items == 1 or items != "none")
        for layer in one.layers
    ]
    figures = source.figures(run) if metrics is None else []
    total = len(chosen) + len(figures)
    # One file has to hold it all, so it is begun anew when the last try broke off.
    path = work / f"events.out.tfevents.{found.started_ns // 10**9:010d}.{socket.gethostname()}.steptron"
    try:
        with open(path, "wb") as file:
            events = _Events(RecordWriter(file), _times(source, run, first, last))
            for number, name in enumerate(figures, 1):
                for points in _figure(source, found, name, first, last):
                    for column, layer in enumerate(points.layers.tolist()):
                        events.scalars(_tag(name, layer), points.first, points.values[:, column])
                progress(name, number, total)
            for number, (info, layer) in enumerate(chosen, len(figures) + 1):
                tag = _tag(info.metric, layer)
                for points in _metric(source, found, info.metric, layer, info.items, first, last):
                    if info.items == 1:
                        events.scalars(tag, points.first, points.values[:, 0])
                    elif items == "histograms":
                        events.histograms(tag, points.first, points.values)
                    else:
                        for item in range(points.values.shape[1]):
                            events.scalars(f"{tag}/item_{item}", points.first, points.values[:, item])
                progress(tag, number, total)
    except OSError as error:
        raise MetricsError(f"{path} cannot be written: {error}") from error
    finish(work, folder, overwrite)
    return folder


def _tag(name: str, layer: int) -> str:
    return name if layer < 0 else f"{name}/layer_{layer}"


def _figure(source: Source, run: Run, name: str, first: int, last: int) -> Iterator[Points]:
    return parts(run, lambda a, b, most: source.derived(run.name, name, a, b, most), first, last, LAYERS)


def _metric(source: Source, run: Run, metric: str, layer: int, items: int, first: int, last: int) -> Iterator[Points]:
    statistic = headline(metric)
    return parts(
        run, lambda a, b, most: source.points(run.name, metric, layer, statistic, a, b, most), first, last, items
    )


def _times(source: Source, run: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Iterations, int64 ascending, and when they ended, seconds since 1970."""
    tables = list(source.iterations(run, first, last))
    if not tables:
        return np.empty(0, np.int64), np.empty(0)
    iteration = np.concatenate([table.column("iteration").to_numpy() for table in tables])
    ended = np.concatenate([table.column("ended_ns").to_numpy() for table in tables])
    return iteration, ended / 1e9


class _Events:
    """Writes an event file."""

    def __init__(self, writer: RecordWriter, times: tuple[np.ndarray, np.ndarray]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._writer = writer
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._iteration, self._ended = times
        start = float(self._ended[0]) if len(self._ended) else 0.0
        self._writer.write(self._event(wall_time=start, file_version="brain.Event:2").SerializeToString())

    def scalars(self, tag: str, steps: np.ndarray, values: np.ndarray) -> None:
        """One where there is a value; NaN says that there is none."""
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            if not math.isnan(value):
                self._write(step, self._summary.Summary.Value(tag=tag, simple_value=value))

    def histograms(self, tag: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Of the finite values of each row."""
        for step, row in zip(steps.tolist(), values, strict=True):
            there = row[np.isfinite(row)].astype(np.float64)
            if not len(there):
                continue
            low, high = float(there.min()), float(there.max())
            counts, edges = np.histogram(there, _BINS, (low, high) if low < high else (low - 0.5, high + 0.5))
            histogram = self._summary.HistogramProto(
                min=low,
                max=high,
                num=len(there),
                sum=float(there.sum()),
                sum_squares=float((there**2).sum()),
                bucket_limit=edges[1:].tolist(),
                bucket=counts.tolist(),
            )
            self._write(step, self._summary.Summary.Value(tag=tag, histo=histogram))

    def _write(self, step: int, value: Any) -> None:
        place = int(np.searchsorted(self._iteration, step))
        known = place < len(self._iteration) and self._iteration[place] == step
        ended = float(self._ended[place]) if known else 0.0
        event = self._event(wall_time=ended, step=step, summary=self._summary.Summary(value=[value]))
        self._writer.write(event.SerializeToString())
