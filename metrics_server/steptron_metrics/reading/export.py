"""Writes what is stored of a run to files for other tools.

A folder is written, part by part, under a name that ends in ``.partial``, and gets its own name when it is complete. An
export that broke off is taken up again where it was, when the same is asked for.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from steptron_metrics.errors import MetricsError
from steptron_metrics.reading.source import LAST_ITERATION, Source
from steptron_metrics.reading.whole import LAYERS, parts, run_of
from steptron_metrics.results import Alert, Points, Run

Form = Literal["parquet", "csv"]
Progress = Callable[[str, int, int], None]
"""Called with the part that is done, how many are, and how many there are."""

MANIFEST = "manifest.json"
_ROWS_IN_GROUP = 1 << 20


def _quiet(part: str, done: int, total: int) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class _Part:
    """A file of an export: its path in the folder, and what is in it."""

    path: str
    read: Callable[[], Iterator[pa.RecordBatch]]


def export_tables(
    source: Source,
    run: str,
    folder: Path,
    form: Form = "parquet",
    *,
    metrics: Sequence[str] | None = None,
    first: int = 0,
    last: int = LAST_ITERATION,
    overwrite: bool = False,
    progress: Progress = _quiet,
) -> Path:
    """Writes a run's tables.

    The folder gets, partitioned as Spark, DuckDB, pandas and Arrow's data sets expect it:

    - ``aggregates/metric=<name>/data.parquet``: iteration, layer, item, count, mean, rms, min, median, max, p99;
    - ``derived/figure=<name>/data.parquet``: iteration, layer, value;
    - ``iterations.parquet``, ``events.parquet``, ``alerts.parquet``;
    - ``manifest.json``, which says of what they are.

    Parquet is compressed by zstd; in CSV, lists (of missing ranks) are separated by spaces and NaN is ``nan``.

    Args:
        source: of :func:`~steptron_metrics.reading.source.open_source`.
        metrics: only these aggregates, without derived figures; all of both without it.
        first, last: only these iterations.
        overwrite: replaces an earlier export in the folder.

    Returns:
        the folder.

    Raises:
        MetricsError: the folder exists, or something broke off; what was written is then kept in
            ``<folder>.partial`` for the next try.
        KeyError: there is no such run or metric.
    """
    found = run_of(source, run)
    known = [one.metric for one in source.metrics(run)]
    for name in metrics or ():
        if name not in known:
            raise KeyError(name)
    work, bounds = begin(folder, source, found, form, metrics, (first, last), overwrite)
    pieces = list(_parts(source, found, form, known if metrics is None else metrics, metrics is None, *bounds))
    for number, piece in enumerate(pieces, 1):
        target = work / piece.path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(piece.read(), target, form)
        progress(piece.path, number, len(pieces))
    finish(work, folder, overwrite)
    return folder


def begin(
    folder: Path,
    source: Source,
    run: Run,
    form: str,
    metrics: Sequence[str] | None,
    bounds: tuple[int, int],
    overwrite: bool,
) -> tuple[Path, tuple[int, int]]:
    """The folder to work in, and the iterations to write: those of the export that is taken up again.

    Raises:
        MetricsError: there is an export already, or another one broke off there.
    """
    if folder.exists() and not overwrite:
        raise MetricsError(
            f"{folder} exists: choose another folder, or have it replaced (--force; overwrite=True in Python)"
        )
    if overwrite and folder.exists() and not (folder / MANIFEST).is_file():
        raise MetricsError(f"{folder} is no export, it has no {MANIFEST}: it is not overwritten")
    asked = {
        "run": run.name,
        "started_ns": run.started_ns,
        "form": form,
        "metrics": None if metrics is None else sorted(metrics),
        "asked": list(bounds),
    }
    work = folder.with_name(folder.name + ".partial")
    try:
        if (work / MANIFEST).is_file():
            before = json.loads((work / MANIFEST).read_text(encoding="utf-8"))
            if {name: before.get(name) for name in asked} != asked:
                raise MetricsError(f"{work} is an export of something else that broke off: delete it first")
        else:
            if work.exists():
                raise MetricsError(f"{work} is in the way: it is no export that broke off")
            # Iterations that arrive later belong to no part, so that all parts are of the same ones.
            before = {
                **asked,
                "first": max(bounds[0], run.first_iteration),
                "last": min(bounds[1], run.last_iteration),
                "source": source.name,
            }
            work.mkdir(parents=True)
            _replace(work / MANIFEST, json.dumps(before, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise MetricsError(f"{work} cannot be used: {error}") from error
    return work, (int(before["first"]), int(before["last"]))


def finish(work: Path, folder: Path, overwrite: bool) -> None:
    """Gives a complete export its name."""
    try:
        if overwrite and folder.exists():
            old = folder.with_name(folder.name + ".old")
            os.rename(folder, old)
            os.rename(work, folder)
            shutil.rmtree(old)
        else:
            os.rename(work, folder)
    except OSError as error:
        raise MetricsError(f"the export is complete in {work} and could not be renamed to {folder}: {error}") from error


def _parts(
    source: Source, run: Run, form: Form, metrics: Sequence[str], with_figures: bool, first: int, last: int
) -> Iterator[_Part]:
    def aggregates(metric: str) -> Iterator[pa.RecordBatch]:
        for batch in source.table(run.name, [metric], first, last):
            yield batch.drop_columns(["metric"])

    yield _Part(f"iterations.{form}", lambda: _batches(source.iterations(run.name, first, last)))
    yield _Part(f"events.{form}", lambda: _batches(source.events(run.name, first, last)))
    yield _Part(f"alerts.{form}", lambda: iter([_alerts(source.alerts(run.name))]))
    for metric in metrics:
        yield _Part(f"aggregates/metric={metric}/data.{form}", partial(aggregates, metric))
    for name in source.figures(run.name) if with_figures else ():
        yield _Part(f"derived/figure={name}/data.{form}", partial(_figure, source, run, name, first, last))


def _batches(tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from table.to_batches()


def _figure(source: Source, run: Run, name: str, first: int, last: int) -> Iterator[pa.RecordBatch]:
    def read(begin: int, end: int, most: int) -> Points:
        return source.derived(run.name, name, begin, end, most)

    for points in parts(run, read, first, last, LAYERS):
        number = len(points.layers)
        yield pa.record_batch(
            {
                "iteration": pa.array(points.first.repeat(number)),
                "layer": pa.array(points.layers.tolist() * len(points.first), pa.int32()),
                "value": pa.array(points.values.ravel()),
            }
        )


def _alerts(alerts: Sequence[Alert]) -> pa.RecordBatch:
    kinds = {int: pa.int64(), int | None: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in get_type_hints(Alert).items()])
    return pa.RecordBatch.from_pylist([asdict(alert) for alert in alerts], schema)


def _write(batches: Iterator[pa.RecordBatch], target: Path, form: Form) -> None:
    """Atomically; a part without rows becomes a file without rows."""
    temporary = target.with_name(target.name + ".tmp")
    try:
        if form == "parquet":
            _write_parquet(batches, temporary)
        else:
            _write_csv(batches, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise MetricsError(f"{target} cannot be written: {error}") from error


def _write_parquet(batches: Iterator[pa.RecordBatch], path: Path) -> None:
    first = next(batches, None)
    schema = pa.schema([]) if first is None else first.schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        batch = first
        while batch is not None:
            writer.write_batch(batch, row_group_size=_ROWS_IN_GROUP)
            batch = next(batches, None)


def _write_csv(batches: Iterator[pa.RecordBatch], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        for number, batch in enumerate(batches):
            if number == 0:
                rows.writerow(batch.schema.names)
            columns = [
                [" ".join(map(str, one or ())) for one in column.to_pylist()]
                if pa.types.is_list(column.type)
                else column.to_pylist()
                for column in batch.columns
            ]
            rows.writerows(zip(*columns, strict=True))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
