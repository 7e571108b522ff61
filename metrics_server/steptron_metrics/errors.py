"""What a user can mend."""

from __future__ import annotations


class MetricsError(Exception):
    """Bad input or a bad environment; the message names what was wrong and what would be right."""
