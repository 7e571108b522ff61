"""Folders and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """Yields a temporary folder beside ``output``; removes it at the end, whatever happened.

    Folders that a killed process left there are removed first. They are told from those in use by a
    file lock, which the kernel releases with its process.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.building-"
    for leftover in output.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    # Some network file systems have no locks: there, leftovers are not removed, for fear of those in use.
    lock = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        lock.enter_context(_locked(folder))
    try:
        folder.chmod(0o777 & ~_umask())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


@contextlib.contextmanager
def staging_file(output: Path) -> Iterator[Path]:
    """Yields an empty file beside ``output`` that takes its place at the end, or is removed after an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.touch()
    try:
        yield partial
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def publish(folder: Path, output: Path) -> None:
    """Moves a finished folder to ``output``, replacing what is there.

    What was there before is moved aside first, and moved back if the new folder cannot take its place;
    should the process die between the two renames, it stays aside as ``.NAME.replaced-*``.
    """
    _flush_folder(folder)
    if not output.exists():
        os.rename(folder, output)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.replaced-", dir=output.parent))
        os.rename(output, aside)
        try:
            os.rename(folder, output)
        except BaseException:
            os.rename(aside, output)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    _flush_folder(output.parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder; raises OSError if another process has it or there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
