"""Giving freed memory back at once, so that a transfer's process stays as small as what it holds.

glibc raises the size from which it maps blocks separately (up to 32 MiB) when such a block is freed. Tensors below it
then come from the heap, where the small objects that outlive them (what was written where) break up the room that they
leave: the process grows by nearly every tensor that it moves.
"""

from __future__ import annotations

import ctypes

from steptron.platform.malloc import obstacle

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_THRESHOLD = 2**20  # bytes


def give_back_freed_memory() -> str | None:
    """Makes this process map every block from 1 MiB on by itself, and unmap it when it is freed.

    Returns:
        None, or why the allocator was left as it is.
    """
    if (reason := obstacle()) is not None:
        return reason
    # Set by hand, the threshold also stays where it is.
    return None if ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD) else "glibc refuses to change its threshold"
