"""How many bytes a command has moved: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_LINE_SECONDS = 10.0


@contextlib.contextmanager
def progress(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that shows how many bytes are done: a bar in a terminal, now and then a line elsewhere."""
    if not console.is_terminal:
        yield _plain_lines(console, description)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _plain_lines(console: Console, description: str) -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < _PLAIN_LINE_SECONDS:
            return
        last, rate = now, done / max(now - start, 1e-9)
        left = f", {(total - done) / rate:,.0f} s left" if 0 < done < total else ""
        share = done / total if total else 1.0
        console.print(
            f"{description}: {share:.0%}, {done / 1e9:,.3f} of {total / 1e9:,.3f} GB, {rate / 1e6:,.0f} MB/s{left}",
            soft_wrap=True,
        )

    return report
