"""``steptron checkpoint verify``: whether checkpoints are what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptron.errors import UserError

DAMAGED = 1
READERS = 8
"""Files that are read at a time: one reader alone does not keep a fast disk busy."""


def verify(
    path: Annotated[Path, typer.Argument(help="Checkpoint, or a run's folder: all its checkpoints.")],
    sizes_only: Annotated[
        bool, typer.Option("--sizes-only", help="Only look at the files' sizes: a flipped bit is not found.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Files that are read at a time.")] = READERS,
) -> None:
    """Read checkpoints, compare every file with the checksum it was written with, and name those that differ.

    Exit code 0: all are whole, 1: something is damaged, 2: there is no checkpoint.
    """
    from steptron.checkpoint.found import LEFTOVER, find

    found = find(path)
    try:
        num_damaged = _verify(found.checkpoints, sizes_only, threads)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for folder in found.partial:
        typer.echo(f"{folder}: not a checkpoint: {LEFTOVER}")
    total = len(found.checkpoints)
    if total > 1:
        typer.echo(f"{total - num_damaged} of {total} checkpoints whole")
    if num_damaged:
        raise typer.Exit(DAMAGED)


def _verify(folders: list[Path], sizes_only: bool, threads: int) -> int:
    """Says how each checkpoint is; returns how many are damaged."""
    from rich.console import Console

    from steptron.checkpoint.verification import problems
    from steptron.cli.interruption import terminated_like_interrupted
    from steptron.cli.progress import progress

    sizes = {folder: 0 if sizes_only else _bytes_to_read(folder) for folder in folders}
    total, before = sum(sizes.values()), 0
    console = Console(markup=False, emoji=False, highlight=False, stderr=True)
    found: dict[Path, list[str]] = {}
    with terminated_like_interrupted(), progress(console, "verify") as report:
        for folder, size in sizes.items():

            def count(done: int, _: int, before: int = before) -> None:
                report(before + done, total)

            found[folder] = problems(folder, contents=not sizes_only, report=count, threads=threads)
            before += size
    # A run that goes on meanwhile deletes what it no longer keeps.
    gone = [folder for folder in found if not folder.exists()]
    for folder, faults in found.items():
        if folder in gone:
            typer.echo(f"{folder}: deleted while it was read")
        else:
            _say(folder, faults, sizes_only)
    return sum(bool(faults) for folder, faults in found.items() if folder not in gone)


def _bytes_to_read(folder: Path) -> int:
    from steptron.checkpoint.manifest import read_manifest

    try:
        return sum(file.bytes for file in read_manifest(folder).files.values())
    except UserError:
        return 0


def _say(folder: Path, faults: list[str], sizes_only: bool) -> None:
    from steptron.checkpoint.manifest import read_manifest
    from steptron.checkpoint.verification import unknown_files

    if faults:
        typer.echo("\n  ".join([f"{folder}: DAMAGED", *faults]))
    try:
        manifest = read_manifest(folder)
    except UserError:
        return
    if not faults:
        size = sum(file.bytes for file in manifest.files.values())
        how = "sizes only" if sizes_only else "every byte"
        typer.echo(f"{folder}: whole ({len(manifest.files)} files, {size:,} bytes, {how})")
    for name in unknown_files(folder, manifest):
        typer.echo(f"  {name} is not in the manifest: nobody reads it")
