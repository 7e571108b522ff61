"""A folder that one process at a time has."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FolderLock:
    """Lock of a folder, gone with the process however it ends.

    Raises:
        BlockingIOError: another has it.
        OSError: the folder cannot be made or locked.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise
        _held.add(self)

    def release(self) -> None:
        """Lets others have the folder; may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_all() -> None:
    # flock belongs to the open file, which a forked child (a data loader's worker) shares: it would go on holding the
    # folder when its parent is dead.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_all)
