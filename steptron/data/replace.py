"""Whether a dataset may be written where something is already."""

from __future__ import annotations

from pathlib import Path

from steptron.data.errors import DataError
from steptron.data.manifest import MANIFEST_FILE


def check_replaceable(output: Path, force: bool, disposable: str) -> None:
    """Checks that a dataset may be written to ``output``.

    Args:
        output: the folder to be.
        force: whether a dataset there may be replaced. Anything else is never replaced.
        disposable: name of a file that may be replaced when it is all there is.

    Raises:
        DataError: something is there that must not be replaced.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not output.is_symlink():
        names = {path.name for path in output.iterdir()}
        if names <= {disposable}:
            return
        if MANIFEST_FILE in names:
            if force:
                return
            raise DataError(f"{output}: holds a dataset; name another folder, or replace it with --force")
    raise DataError(f"{output}: exists and is not a dataset; name another folder")
