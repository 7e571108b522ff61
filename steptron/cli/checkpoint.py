"""``steptron checkpoint``: weights between the released layout and ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steptron.cli.compare import compare
from steptron.cli.interruption import terminated_like_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from steptron.checkpoint.released.processes import Transfer
    from steptron.checkpoint.weights import CheckpointWeights

app = typer.Typer(
    name="checkpoint", help="Move weights between the released layout and ours, and compare them.", no_args_is_help=True
)
app.command()(compare)

_JOIN_SECONDS = 600.0
_PLAIN_LINE_SECONDS = 10.0

_Nproc = Annotated[
    int | None,
    typer.Option(min=1, help="Local processes that share the work; 1 by default. Not under torchrun or srun."),
]


@app.command(name="import-hf")
def import_hf(
    folder: Annotated[Path, typer.Argument(help="Released model: config.json with safetensors files.")],
    output: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="OUT")],
    nproc: _Nproc = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Turn a released model into a checkpoint that every parallel layout reads.

    Missing, extra, wrongly shaped and wrongly typed tensors are all listed before anything is written. Tensors are
    moved piece by piece; no process holds more than 256 MiB of them.
    """
    from steptron.platform.megatron_cpu import install

    arguments = ["import-hf", str(folder), str(output), *(["--force"] if force else [])]
    if _starts_workers(nproc):
        install()
        from steptron.checkpoint.weights import ReleasedWeights

        ReleasedWeights(folder)
        _run_workers(nproc, arguments)
    with _transfer("import", output) as (report, conclude):
        from steptron.checkpoint.released.importing import import_released
        from steptron.data.tokenizer import TOKENIZER_FILE

        done = import_released(folder, output, force=force, report=report)
        following = [
            f"steptron pretrain FILE train.initial_weights={output}   (FILE names {output}/model.yaml under base:)"
        ]
        if (output / TOKENIZER_FILE).is_file():
            following.append(f"steptron generate {output} --prompt 'Once upon a time'")
        conclude(done, following)


@app.command(name="export-hf")
def export_hf(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or a run's folder (its newest checkpoint).")],
    folder: Annotated[Path, typer.Argument(help="Released folder to write.")],
    max_shard_size: Annotated[
        str, typer.Option(help="Most bytes of tensors in a file: 5GB, 500MB, 4GiB or a number.")
    ] = "5GB",
    dtype: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Convert the tensors; as they are by default. Router biases are always fp32."),
    ] = None,
    companions_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Released folder to take tokenizer, generation settings and remote code from."
        ),
    ] = None,
    nproc: _Nproc = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a released folder that is there.")] = False,
) -> None:
    """Turn a checkpoint into a released model, with the names, shapes and dtypes that other engines load.

    One tensor at a time is in memory. The same command goes on where an interrupted one stopped.
    """
    from steptron.checkpoint.released.shards import parse_size
    from steptron.platform.megatron_cpu import install

    max_shard_bytes = parse_size(max_shard_size)
    if _starts_workers(nproc):
        install()
        # A run's newest checkpoint now, not whichever each process would find.
        found = _opened(checkpoint).path
        arguments = ["export-hf", str(found), str(folder), "--max-shard-size", max_shard_size]
        for option, value in (("--dtype", dtype), ("--companions-from", companions_from)):
            arguments += [] if value is None else [option, str(value)]
        arguments += ["--force"] if force else []
        _run_workers(nproc, arguments)
    with _transfer("export", folder) as (report, conclude):
        from steptron.checkpoint.released.exporting import export_released

        try:
            done = export_released(
                _opened(checkpoint),
                folder,
                max_shard_bytes=max_shard_bytes,
                precision=dtype,
                companions_from=companions_from,
                force=force,
                report=report,
            )
        except KeyboardInterrupt:
            typer.echo("interrupted: what is complete stays; the same command goes on from there", err=True)
            raise
        conclude(done, [f"steptron checkpoint compare {checkpoint} {folder}"])


def _opened(checkpoint: Path) -> CheckpointWeights:
    from steptron.checkpoint.weights import CheckpointWeights, open_weights
    from steptron.errors import UserError

    weights = open_weights(checkpoint)
    if not isinstance(weights, CheckpointWeights):
        raise UserError(f"{checkpoint} is a released model already: name a checkpoint")
    return weights


def _starts_workers(nproc: int | None) -> bool:
    """Whether this process is to start others.

    Raises:
        UserError: a launcher has started this one among others than ``nproc``.
    """
    from steptron.platform import launch

    return launch.joined_size(nproc) is None and (nproc or 1) > 1


def _run_workers(nproc: int | None, arguments: Sequence[str]) -> None:
    from steptron.platform import launch

    raise typer.Exit(launch.run_local(nproc or 1, ["checkpoint", *arguments]))


@contextlib.contextmanager
def _transfer(
    verb: str, output: Path
) -> Iterator[tuple[Callable[[int, int], None], Callable[[Transfer, Sequence[str]], None]]]:
    """Joins the other processes; yields the functions that show progress and the summary, on the first process."""
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

    distributed.initialize(torch.device("cpu"), _JOIN_SECONDS)
    description = verb if place.size == 1 else f"{verb}, share of rank 0 of {place.size}"
    try:
        with terminated_like_interrupted(), _progress(console, description) as report:
            yield report, conclude
    finally:
        distributed.shutdown()
    for line in summary:
        console.print(line, soft_wrap=True)


@contextlib.contextmanager
def _progress(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that shows how far the transfer is: a bar in a terminal, now and then a line elsewhere."""
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
