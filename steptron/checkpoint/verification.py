"""Whether a checkpoint is what was written: every file there, of its size, with its checksum. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from steptron.checkpoint.checksums import fault
from steptron.checkpoint.folder import MANIFEST, named_step
from steptron.checkpoint.manifest import Manifest, read_manifest
from steptron.checkpoint.shares import share_out
from steptron.errors import UserError

Report = Callable[[int, int], None]
"""Told of the bytes that were read so far, and of all."""


def problems(
    folder: Path,
    contents: bool = True,
    share: tuple[int, int] = (0, 1),
    report: Report = lambda done, total: None,
    threads: int = 1,
) -> list[str]:
    """What is wrong with a checkpoint, a line each, beginning with the file's name.

    Args:
        folder: the checkpoint.
        contents: read the files and compare checksums; otherwise only their sizes are looked at.
        share: this reader's number and the number of readers that divide the files up between them.
        report: told of the progress, by any thread, one at a time.
        threads: that read; reading and hashing both let others run.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error).removeprefix(f"{folder}/")]
    named = named_step(folder)
    if manifest.progress is not None and named is not None and named != manifest.progress.step:
        return [f"{MANIFEST} says step {manifest.progress.step}, the folder's name {named}: it was renamed or put here"]
    number, readers = share
    names = sorted(manifest.files)
    own = [names[index] for index in share_out([manifest.files[name].bytes for name in names], readers)[number]]
    total, done = sum(manifest.files[name].bytes for name in own), 0
    counting, interrupted = threading.Lock(), threading.Event()

    def count(num_bytes: int) -> None:
        nonlocal done
        if interrupted.is_set():
            raise CancelledError
        with counting:
            done += num_bytes
            report(done, total)

    def examine(name: str) -> str | None:
        return fault(folder, name, manifest.files[name], contents, count)

    pool = ThreadPoolExecutor(threads)
    try:
        return [text for text in pool.map(examine, own) if text is not None]
    except BaseException:
        interrupted.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint's folder that its manifest does not name: nobody reads them, and nothing is known of them.

    Raises:
        OSError: the folder cannot be read.
    """
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name != MANIFEST and name not in manifest.files)
