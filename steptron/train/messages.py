"""Lines for whoever watches a run. One that cannot be shown (a file on a full disk, a closed pipe) ends no run."""

from __future__ import annotations

import contextlib
import sys
from typing import IO


def say(text: str, file: IO[str] | None = None) -> None:
    """Prints a line at once, or what of it can be printed.

    Args:
        text: without the newline.
        file: standard output by default.
    """
    # Python keeps a few kilobytes of what a file refuses and writes them first when it takes more.
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stdout, flush=True)


def warn(text: str) -> None:
    """Prints a warning on standard error."""
    say(f"warning: {text}", sys.stderr)
