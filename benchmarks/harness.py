"""Side-by-side timing: contenders take turns in one process, and only ratios are claimed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table


def interleave(contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Times every contender once per round, in turn, after a few untimed rounds.

    Returns:
        Seconds by contender, one entry per round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain table: the first column is text, the others are numbers."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)


def print_result(benchmark: str, ratios: Mapping[str, float], targets: Mapping[str, float]) -> None:
    """The last line of every benchmark: one JSON object."""
    rounded = {key: round(value, 3) for key, value in ratios.items()}
    print(json.dumps({"benchmark": benchmark, "ratios": rounded, "targets": dict(targets)}))


def median(values: list[float]) -> float:
    return statistics.median(values)
