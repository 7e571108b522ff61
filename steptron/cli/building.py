"""What the commands that build datasets share on the terminal: progress, bad input, errors of the system."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.data.build import BadInputLog, Progress


def terminal() -> Console:
    from rich.console import Console

    return Console(markup=False, emoji=False)  # paths and text are shown as they are


@contextlib.contextmanager
def system_errors_named(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into a DataError of one line.

    Args:
        path: named where the error names no file, as that of a full disk.
    """
    from steptron.data.errors import DataError

    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{error.filename or path}: not a folder; name another place") from error
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror or error}") from error


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yields the function that shows progress: documents, bytes on disk, MB/s, time left."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]:,} docs, {task.fields[bad]:,} bad"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console) as bars:

        def report(progress: Progress) -> None:
            if progress.phase not in tasks:
                tasks[progress.phase] = bars.add_task(
                    progress.phase, total=progress.total_file_bytes, documents=0, bad=0
                )
            bars.update(
                tasks[progress.phase],
                completed=progress.file_bytes,
                documents=progress.documents,
                bad=progress.bad_documents,
            )

        yield report


def print_bad_input(console: Console, bad: BadInputLog) -> None:
    from rich.text import Text

    for kind, count in bad.counts.items():
        console.print(Text(f"{count:,} × {kind}", style="bold yellow"))
        for example in bad.examples[kind]:
            place = example.file if example.line is None else f"{example.file}:{example.line}"
            console.print(Text(f"  {place}: {example.message}"), soft_wrap=True)
        if count > len(bad.examples[kind]):
            console.print(Text(f"  ... and {count - len(bad.examples[kind]):,} more"))
