"""Errors that a user can mend: shown as one message, without a traceback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar


class UserError(Exception):
    """Something the user gave cannot be used. The message says what, where, and what would be right.

    The command line prints it without a traceback and exits with its code.
    """

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A configuration that cannot be used; ``problems`` holds one line per thing to mend."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        self.title = title
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{title}: {count}", *(f"  - {problem}" for problem in self.problems)]))


class PeerError(UserError):
    """Another process of the run is the cause: it died, hangs, or failed first. Starting anew may help."""

    exit_code: ClassVar[int] = os.EX_PROTOCOL


def some_of(names: Sequence[str]) -> str:
    """Names for a message, the first twenty written out."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
