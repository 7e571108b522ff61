"""Named arrays in an .npz file, written and read one at a time."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steptron.errors import UserError

Array = NDArray[Any]

INPUT_IDS = "input_ids"
"""Name of the token ids [B, S] in a trace, beside those of its sites."""


def output_problem(path: Path) -> str | None:
    """Why an archive cannot be written there; None where it can."""
    folder = path.parent
    if path.is_dir():
        return f"--out {path} is a folder: name a file"
    if path.exists() and not path.is_file():
        return f"--out {path} is no file that can be replaced"
    if not folder.is_dir():
        return f"--out {path}: there is no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"--out {path}: no permission to write in {folder}"
    return None


def write_arrays(path: Path, arrays: Iterable[tuple[str, Array]]) -> None:
    """Writes arrays in the order in which they come, each before the next is asked for.

    The file appears complete, in place of an older one, or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


class Archive:
    """An open .npz file: names in the order in which they were written, arrays read when asked for."""

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        self._content = content

    @property
    def names(self) -> list[str]:
        return list(self._content.files)

    def __contains__(self, name: str) -> bool:
        return name in self._content.files

    def read(self, name: str) -> Array:
        """
        Raises:
            UserError: the array cannot be read.
        """
        try:
            array: Array = self._content[name]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path}: {name} cannot be read: {error}") from error
        return array


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Opens an .npz file.

    Raises:
        UserError: there is no such file, or it is no .npz file.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is no .npz file: expected one that `steptron model trace` has written")
    try:
        content = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an .npz file: {error}") from error
    with content:
        yield Archive(path, content)
