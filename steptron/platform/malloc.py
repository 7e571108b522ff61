"""What the C library does with freed memory: training keeps it, transfers of weights give it back.

glibc maps each large block separately and unmaps it when it is freed; the kernel then clears every
page again at its next use. A training step frees and takes the same blocks over and over, so they
are better kept. The price is that the process's size stays at its peak.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLDS = (1 << 30, 1 << 25)  # bytes; older versions of glibc refuse more than 32 MiB
_SMALLEST_GIVEN_BACK = 1 << 20  # bytes
_TRIM_THRESHOLD = (1 << 31) - 1  # bytes, the largest int; a run's free memory may exceed it: then some is returned

_SETTINGS = ("mmap_max", "mmap_threshold", "top_pad", "trim_threshold")  # what the user may have tuned already
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> str | None:
    """Makes this process keep freed memory. Safe to call again.

    Returns:
        None, or why the allocator was left as it is.
    """
    if (reason := obstacle(environment)) is not None:
        return reason
    mallopt = ctypes.CDLL(None).mallopt
    if not any(mallopt(_M_MMAP_THRESHOLD, threshold) for threshold in _MMAP_THRESHOLDS):
        return "glibc refuses to change its threshold"
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
    return None


def give_back_freed_memory(environment: Mapping[str, str] = os.environ) -> str | None:
    """Makes this process unmap every block from 1 MiB on when it is freed. Safe to call again.

    glibc raises the size from which it maps blocks separately (up to 32 MiB) when such a block is freed. Tensors below
    it then come from the heap, where small objects that outlive them break up the room that they leave: a process that
    moves tensor after tensor grows by nearly all of them.

    Returns:
        None, or why the allocator was left as it is.
    """
    if (reason := obstacle(environment)) is not None:
        return reason
    # Set by hand, the threshold also stays where it is.
    mapped = ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _SMALLEST_GIVEN_BACK)
    return None if mapped else "glibc refuses to change its threshold"


def obstacle(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why the allocator is left alone (it is another one, or tuned by the user); None: nothing."""
    if glibc_version() is None or not hasattr(ctypes.CDLL(None), "mallopt"):
        return "the C library is not glibc"
    preloaded = environment.get("LD_PRELOAD", "")
    if any(name in preloaded for name in _OTHER_ALLOCATORS):
        return f"LD_PRELOAD={preloaded} brings another allocator"
    tunables = environment.get("GLIBC_TUNABLES", "")
    tuned = [name for setting in _SETTINGS if (name := f"MALLOC_{setting.upper()}_") in environment]
    if any(f"glibc.malloc.{setting}=" in tunables for setting in _SETTINGS):
        tuned.append("GLIBC_TUNABLES")
    return f"{', '.join(tuned)} is set, and kept" if tuned else None


def glibc_version() -> str | None:
    """For example "glibc 2.36"; None under another C library."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
