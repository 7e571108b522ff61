"""The disk of a server's folder: what is left of it, and a reserve for what frees it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from steptron_metrics.errors import MetricsError

log = logging.getLogger(__name__)

FILE = "reserve"
RESERVE_BYTES = 128 << 20
"""The embedded database's log, which it writes once more before it gives it back, and a little."""


def free_on(folder: Path) -> int:
    """Bytes that are left on a folder's disk."""
    return shutil.disk_usage(folder).free


class Space:
    """Knows whether the disk takes more.

    Args:
        folder: of the server.
        min_free_bytes: that are to be left.
        is_embedded: whether the database is on that disk, too; else it takes whatever the disk is like.
        free: bytes left on a folder's disk.
        reserve_bytes: size of a file that is given up where a deletion has no room, and made again when there is some.
    """

    def __init__(
        self,
        folder: Path,
        min_free_bytes: int,
        is_embedded: bool = True,
        *,
        free: Callable[[Path], int] = free_on,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self._folder, self._min_free_bytes, self._is_embedded, self._free = folder, min_free_bytes, is_embedded, free
        self._reserve_bytes = reserve_bytes

    @property
    def is_short(self) -> bool:
        """Whether less is left than is to be."""
        return self._free(self._folder) < self._min_free_bytes

    def check(self) -> None:
        """Raises:
        MetricsError: the database is to take no more.
        """
        free = self._free(self._folder)
        if self._is_embedded and free < self._min_free_bytes:
            raise MetricsError(
                f"the disk of {self._folder} has {free / 1e9:.2f} GB left, of which {self._min_free_bytes / 1e9:.2f} "
                "stay free (--min-free-gb): make room, or delete a run"
            )

    def keep_reserve(self) -> None:
        """Makes the reserve where there is none and room enough."""
        path = self._folder / FILE
        if (
            not self._reserve_bytes
            or path.exists()
            or self._free(self._folder) < self._min_free_bytes + 2 * self._reserve_bytes
        ):
            return
        draft = path.with_suffix(".new")
        try:
            with open(draft, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
            os.replace(draft, path)
        except OSError as error:
            log.warning("no reserve for deletions can be made: %s", error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def use_reserve(self) -> None:
        """Gives the reserve up, if there is less room without it than it takes."""
        if self._free(self._folder) < self._reserve_bytes:
            try:
                (self._folder / FILE).unlink()
            except FileNotFoundError:
                return
            log.warning("the disk of %s is full: the reserve for deletions is used", self._folder)
