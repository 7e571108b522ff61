"""The error that every part of the data pipeline raises for input it cannot use."""

from __future__ import annotations

from steptron.errors import UserError


class DataError(UserError):
    """A corpus, dataset or tokenizer that cannot be used; the message names it and says what would be right."""
