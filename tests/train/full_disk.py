"""A disk that takes no more, for tests that are not root."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The kernel lets no file grow beyond a size: a write is cut off there, and the next one fails with EFBIG (Python
    ignores SIGXFSZ), which is how a full disk behaves with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
