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
    if not output.absolute().name:
        raise UserError(f"{output} is no folder that can be written: name another one")
    read, written = source.resolve(), output.resolve()
    if read.is_relative_to(written) or written.is_relative_to(read):
        raise UserError(f"{output} is, holds or lies in what is read ({source}): name another folder")
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
        raise UserError(f"{num_bytes:,} bytes are to be written, but the disk of {output.parent} has {free:,} left")
