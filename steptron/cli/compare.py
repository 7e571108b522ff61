"""`steptron checkpoint compare`: what differs between two sets of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steptron.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.checkpoint.compare import Comparison, TensorDifference
    from steptron.checkpoint.compare_sources import Source

DIFFERENT = 1
_WHAT = "A released model, a checkpoint, a run's folder, or a model that transformers saved."


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=_WHAT)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same; differences are relative to A.")],
    tolerance: Annotated[
        float, typer.Option(help="Relative difference of a tensor that is let pass, dtypes aside; 0: the same bits.")
    ] = 0.0,
    limit: Annotated[int, typer.Option(min=1, help="Longest list that is printed; JSON has all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Name the tensors and configuration fields that differ, and by how much, worst first.

    Tensors have their released names, whatever the layout. Exit code 0: the same, 1: different, 2: cannot be compared.
    """
    from steptron.checkpoint.compare import compare_weights
    from steptron.checkpoint.compare_sources import open_source

    if not tolerance >= 0:
        raise UserError(f"--tolerance is {tolerance}: it must be 0 or larger")
    source_a, source_b = open_source(a), open_source(b)
    with _progress() as report:
        comparison = compare_weights(source_a, source_b, report)
    if as_json:
        typer.echo(json.dumps(_as_json(source_a, source_b, comparison, tolerance), indent=2, allow_nan=False))
    else:
        _print(source_a, source_b, comparison, tolerance, limit)
    if not comparison.is_same(tolerance):
        raise typer.Exit(DIFFERENT)


def _print(a: Source, b: Source, comparison: Comparison, tolerance: float, limit: int) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for letter, side in (("A", a), ("B", b)):
        console.print(f"{letter}  {side.path} ({side.kind})")
    _print_fields(console, comparison, limit)
    beyond = comparison.beyond(tolerance)
    within = len(comparison.differences) - len(beyond)
    parts = [f"{comparison.compared - len(comparison.differences):,} the same bit by bit"]
    if tolerance:
        parts.append(f"{within:,} within the tolerance {tolerance:g}")
    parts.append(f"{len(beyond):,} different")
    console.print(f"\nTensors in both: {comparison.compared:,}, {', '.join(parts)}")
    if beyond:
        _print_differences(console, beyond[:limit])
        _print_rest(console, len(beyond), limit)
    for letter, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        _print_names(console, f"Only in {letter}", names, limit)
    _print_names(console, "Not compared, because transformers' model does not hold it", comparison.not_compared, limit)
    console.print("\nthe same" if comparison.is_same(tolerance) else "\ndifferent")


def _print_fields(console: Console, comparison: Comparison, limit: int) -> None:
    if comparison.fields is None:
        console.print("\nConfiguration: not compared, because one of them has none")
    elif not comparison.fields:
        console.print("\nConfiguration: the same")
    else:
        console.print(f"\nConfiguration: {len(comparison.fields):,} fields differ")
        for field in comparison.fields[:limit]:
            console.print(f"  {field.key}: {json.dumps(field.a)} in A, {json.dumps(field.b)} in B")
        _print_rest(console, len(comparison.fields), limit)


def _print_differences(console: Console, differences: list[TensorDifference]) -> None:
    rows: list[tuple[str, ...]] = [("tensor", "differing", "of", "max abs", "relative", "")]
    for difference in differences:
        values = difference.values
        if values is None:
            rows.append((difference.name, "", "", "", "", _notes(difference)))
        else:
            figures = (
                f"{values.differing:,}",
                f"{values.elements:,}",
                f"{values.max_abs:.3g}",
                f"{values.relative:.3g}",
            )
            rows.append((difference.name, *figures, _notes(difference)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells, notes in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=False)]
        console.print(f"  {name:<{widths[0]}}  {'  '.join(cells)}  {notes}".rstrip())


def _notes(difference: TensorDifference) -> str:
    notes = []
    if difference.a.shape != difference.b.shape:
        notes.append(f"shape {list(difference.a.shape)} in A, {list(difference.b.shape)} in B")
    if difference.a.dtype != difference.b.dtype:
        notes.append(f"{difference.a.dtype} in A, {difference.b.dtype} in B")
    values = difference.values
    if values is not None and (values.nans_a or values.nans_b):
        notes.append(f"NaNs: {values.nans_a:,} in A, {values.nans_b:,} in B")
    if values is not None and values.zero_signs:
        notes.append(f"{values.zero_signs:,} zeros of another sign (equal as numbers)")
    return "; ".join(notes)


def _print_names(console: Console, title: str, names: list[str], limit: int) -> None:
    if names:
        console.print(f"\n{title}: {len(names):,}")
        for name in names[:limit]:
            console.print(f"  {name}")
        _print_rest(console, len(names), limit)


def _print_rest(console: Console, count: int, limit: int) -> None:
    if count > limit:
        console.print(f"  and {count - limit:,} more (--limit)")


def _as_json(a: Source, b: Source, comparison: Comparison, tolerance: float) -> dict[str, Any]:
    return {
        "a": {"path": str(a.path), "kind": a.kind},
        "b": {"path": str(b.path), "kind": b.kind},
        "tolerance": _number(tolerance),
        "same": comparison.is_same(tolerance),
        "configuration": None
        if comparison.fields is None
        else [{"field": field.key, "a": field.a, "b": field.b} for field in comparison.fields],
        "compared": comparison.compared,
        "identical": comparison.compared - len(comparison.differences),
        "only_in_a": comparison.only_a,
        "only_in_b": comparison.only_b,
        "not_compared": comparison.not_compared,
        "differences": [_difference_as_json(difference, tolerance) for difference in comparison.differences],
    }


def _difference_as_json(difference: TensorDifference, tolerance: float) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tensor": difference.name,
        "within_tolerance": difference.is_within(tolerance),
        "shape_a": list(difference.a.shape),
        "shape_b": list(difference.b.shape),
        "dtype_a": difference.a.dtype,
        "dtype_b": difference.b.dtype,
    }
    if difference.values is not None:
        described |= {name: _number(value) for name, value in vars(difference.values).items()}
    return described


def _number(value: float) -> float | str:
    """JSON has no infinity: it is written as text."""
    return value if math.isfinite(value) else str(value)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows how many of the elements are compared, where someone watches; on stderr, so that output stays clean."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("comparing"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("")
        yield lambda done, total: bars.update(task, completed=done, total=total)
