"""Commands that move the tensors of a model: processes that share the work, progress, and a summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from steptron.cli.interruption import terminated_like_interrupted
from steptron.cli.progress import progress

if TYPE_CHECKING:
    from steptron.checkpoint.released.processes import Transfer

JOIN_SECONDS = 600.0

Nproc = Annotated[
    int | None,
    typer.Option(min=1, help="Local processes that share the work; 1 by default. Not under torchrun or srun."),
]


def starts_workers(nproc: int | None) -> bool:
    """Whether this process is to start others, ``nproc`` in all.

    Raises:
        UserError: a launcher has started this one among others than ``nproc``.
    """
    from steptron.platform import launch

    return launch.joined_size(nproc) is None and (nproc or 1) > 1


def run_workers(nproc: int | None, arguments: Sequence[str]) -> NoReturn:
    """Runs ``steptron checkpoint ARGUMENTS`` in several processes, and ends this one with their exit code."""
    from steptron.platform import launch

    raise typer.Exit(launch.run_local(nproc or 1, ["checkpoint", *arguments]))


@contextlib.contextmanager
def transfer(
    verb: str, output: Path, timeout_seconds: float = JOIN_SECONDS
) -> Iterator[tuple[Callable[[int, int], None], Callable[[Transfer, Sequence[str]], None]]]:
    """Joins the other processes; yields the functions that show progress and the summary, on the first process.

    Args:
        verb: what is done, for the line of the progress.
        output: what is written.
        timeout_seconds: longest wait for the other processes.
    """
    import torch
    from rich.console import Console

    from steptron.platform import distributed
    from steptron.platform.malloc import give_back_freed_memory

    give_back_freed_memory()
    place, start = distributed.world(), time.monotonic()
    console = Console(markup=False, emoji=False, highlight=False, quiet=place.rank > 0)
    summary: list[str] = []

    def conclude(done: Transfer, next_commands: Sequence[str]) -> None:
        seconds = time.monotonic() - start
        summary.append(
            f"{output}: {done.num_tensors:,} tensors, {done.num_bytes:,} bytes in {seconds:,.1f} s "
            f"({done.num_bytes / 1e6 / seconds:,.0f} MB/s)"
        )
        summary.append("Next:")
        summary.extend(f"  {command}" for command in next_commands)

    distributed.initialize(torch.device("cpu"), timeout_seconds)
    description = verb if place.size == 1 else f"{verb}, share of rank 0 of {place.size}"
    try:
        with terminated_like_interrupted(), progress(console, description) as report:
            yield report, conclude
    finally:
        distributed.shutdown()
    for line in summary:
        console.print(line, soft_wrap=True)
