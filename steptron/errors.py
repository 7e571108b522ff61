"""Errors that a user can mend: shown as one message, without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something the user gave cannot be used. The message says what, where, and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """


class ConfigError(UserError):
    """A configuration that cannot be used; ``problems`` holds one line per thing to mend."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        self.title = title
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{title}: {count}", *(f"  - {problem}" for problem in self.problems)]))


def some_of(names: Sequence[str]) -> str:
    """Names for a message, the first twenty written out."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
