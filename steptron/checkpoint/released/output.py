"""Whether a folder may be written, and whether it fits on its disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from steptron.errors import UserError


def check_output(output: Path, source: Path, force: bool, kind: str, markers: Sequence[str]) -> None:
    """Checks that a folder may be written to ``output``.

    Args:
        output: the folder to be.
        source: what is read; never replaced.
        force: whether a folder of the same kind may be replaced. Anything else is never replaced.
        kind: what the folder will be, for the error.
        markers: names of files of which such a folder has at least one.

    Raises:
        UserError: something is there that must not be replaced.
    """
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"{output} is, or holds, what is read ({source}): name another folder")
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not output.is_symlink():
        names = {path.name for path in output.iterdir()}
        if not names:
            return
        if names.intersection(markers):
            if force:
                return
            raise UserError(f"{output} holds {kind} already: name another folder, or replace it with --force")
    raise UserError(f"{output} exists and is not {kind}: name another folder")


def check_space(output: Path, num_bytes: int) -> None:
    """Checks that ``num_bytes`` more fit on the disk of ``output``, whose parent exists.

    Raises:
        UserError: they do not.
    """
    free = shutil.disk_usage(output.parent).free
    if free < num_bytes:
        raise UserError(
            f"{num_bytes / 1e9:,.2f} GB are to be written, but {output.parent} has {free / 1e9:,.2f} GB left"
        )
