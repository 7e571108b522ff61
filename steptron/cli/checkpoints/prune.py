"""``steptron checkpoint prune``: deletes checkpoints of a run by the rule that training goes by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptron.cli.checkpoints.verify import READERS
from steptron.errors import UserError

if TYPE_CHECKING:
    from steptron.checkpoint.found import Found
    from steptron.config.schema import CheckpointConfig

_DEFAULT = "As the newest checkpoint's configuration says by default."


def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    keep: Annotated[int | None, typer.Option(min=1, help=f"Newest checkpoints that stay. {_DEFAULT}")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=0, help="Those at multiples of so many steps stay; 0: none for that reason.")
    ] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, help="Those of lowest validation loss that stay.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    sizes_only: Annotated[
        bool, typer.Option("--sizes-only", help="Test the newest that stay by the files' sizes, without reading them.")
    ] = False,
) -> None:
    """Delete the checkpoints of a run that are not to be kept, and what killed saves have left.

    The rule is that of train.checkpoint: the newest, those at multiples of a number of steps, and those of lowest
    validation loss stay. Nothing is asked; --dry-run shows what would go. The newest that stay are read, byte by byte:
    damaged ones do not count as kept, and nothing is deleted where none is whole. Refused while a run writes to the
    folder.
    """
    from steptron.checkpoint import retention
    from steptron.checkpoint.folder import delete_partial_folders
    from steptron.checkpoint.found import find, folder_bytes

    found = find(run)
    if found.run is None:
        raise UserError(f"{run} is one checkpoint: name a run's folder")
    folder = found.run
    try:
        with contextlib.nullcontext() if dry_run else _no_run_in(folder):
            found = find(run)
            rule = _rule(found, keep, keep_every, keep_best)
            damaged = set()
            if retention.doomed(folder, rule):
                damaged = _damaged(found.checkpoints, rule.keep, contents=not sizes_only)
            leaving = (*retention.doomed(folder, rule, damaged), *found.partial)
            sizes = {one: 0 if one.is_symlink() else folder_bytes(one) for one in leaving}
            if not dry_run:
                retention.prune(folder, rule, damaged)
                delete_partial_folders(folder / "checkpoints")
    except OSError as error:
        raise UserError(f"{run} cannot be pruned: {error}") from error
    _say(found, sizes, rule, dry_run)


def _rule(found: Found, keep: int | None, keep_every: int | None, keep_best: int | None) -> CheckpointConfig:
    """The rule that the options give, and the run's own where they are silent."""
    from steptron.config.schema import CheckpointConfig

    if keep is not None and keep_every is not None and keep_best is not None:
        own = CheckpointConfig()
    else:
        own = _rule_of_run(found.checkpoints)
    return CheckpointConfig(
        keep=own.keep if keep is None else keep,
        keep_every_steps=own.keep_every_steps if keep_every is None else keep_every or None,
        keep_best=own.keep_best if keep_best is None else keep_best,
    )


def _rule_of_run(checkpoints: list[Path]) -> CheckpointConfig:
    """That of the newest checkpoint whose configuration can be read."""
    from steptron.checkpoint.manifest import read_config
    from steptron.config.schema import CheckpointConfig

    failure = None
    for folder in reversed(checkpoints):
        try:
            return read_config(folder).train.checkpoint
        except UserError as error:
            failure = failure or error
    if failure is not None:
        raise UserError(f"{failure}\ngive --keep, --keep-every and --keep-best: the run's own rule is not known")
    return CheckpointConfig()


def _damaged(checkpoints: list[Path], keep: int, contents: bool) -> set[Path]:
    """Those among the newest that are not whole, so that they do not count as kept: as many are looked for as are kept.

    Raises:
        UserError: none at all is whole.
    """
    from rich.console import Console

    from steptron.checkpoint.verification import problems
    from steptron.cli.progress import progress

    console = Console(markup=False, emoji=False, highlight=False, stderr=True)
    damaged: dict[Path, str] = {}
    num_whole = 0
    for folder in reversed(checkpoints):
        with progress(console, f"verify {folder.name}") as report:
            faults = problems(folder, contents, report=report, threads=READERS)
        if faults:
            damaged[folder] = f"{folder}: {faults[0]}"
        else:
            num_whole += 1
        if num_whole == keep:
            break
    if not num_whole:
        raise UserError("\n  ".join(["nothing was deleted, because no checkpoint is whole:", *damaged.values()]))
    for text in damaged.values():
        typer.echo(f"damaged, not counted: {text}")
    return set(damaged)


def _say(found: Found, sizes: dict[Path, int], rule: CheckpointConfig, dry_run: bool) -> None:
    kept = f"the newest {rule.keep}"
    kept += f", multiples of {rule.keep_every_steps} steps" if rule.keep_every_steps else ""
    kept += f", the best {rule.keep_best} by validation loss" if rule.keep_best else ""
    typer.echo(f"kept: {kept}")
    verb = "would delete" if dry_run else "deleted"
    for folder, size in sizes.items():
        what = " (left by a save or deletion that did not end)" if folder in found.partial else ""
        typer.echo(f"{verb} {folder}, {size:,} bytes{what}")
    left = len(found.checkpoints) - sum(folder in found.checkpoints for folder in sizes)
    freed = "would be freed" if dry_run else "freed"
    typer.echo(f"{sum(sizes.values()):,} bytes {freed}; {left} checkpoint{'' if left == 1 else 's'} kept")


@contextlib.contextmanager
def _no_run_in(folder: Path) -> Iterator[None]:
    """Keeps runs away from a folder within the ``with`` block."""
    from steptron.train.run_lock import run_lock

    with contextlib.ExitStack() as held:
        try:
            held.enter_context(run_lock(folder))
        except UserError as error:
            raise UserError(
                f"a run writes to {folder} and thins out its checkpoints itself (train.checkpoint.keep, "
                "keep_every_steps, keep_best): prune it when it has ended"
            ) from error
        yield
