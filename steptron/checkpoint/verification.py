"""Whether a checkpoint is what was written: every file there, of its size, with its checksum. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steptron.checkpoint.checksums import fault
from steptron.checkpoint.manifest import Manifest, read_manifest
from steptron.errors import UserError

Report = Callable[[int, int], None]
"""Told of the bytes that were read so far, and of all."""


def problems(
    folder: Path,
    contents: bool = True,
    share: tuple[int, int] = (0, 1),
    report: Report = lambda done, total: None,
) -> list[str]:
    """What is wrong with a checkpoint, a line each, beginning with the file's name.

    Args:
        folder: the checkpoint.
        contents: read the files and compare checksums; otherwise only their sizes are looked at.
        share: this reader's number and the number of readers that divide the files up between them.
        report: told of the progress.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error).removeprefix(f"{folder}/")]
    own = _share(manifest, *share)
    total, done = sum(manifest.files[name].bytes for name in own), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(done, total)

    found = (fault(folder, name, manifest.files[name], contents, count) for name in own)
    return [text for text in found if text is not None]


def _share(manifest: Manifest, number: int, readers: int) -> list[str]:
    """The files of one reader: each takes, largest first, the next file when it has least to read."""
    loads = [0] * readers
    own = []
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name)):
        reader = loads.index(min(loads))
        loads[reader] += manifest.files[name].bytes + 1
        if reader == number:
            own.append(name)
    return own
