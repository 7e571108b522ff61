"""Rendered conversations before they are tokens.

A sample is a row of runs, a run a row of pieces. Runs are tokenized one by one, so that no token crosses from one into
the next: the border between what the model is given and what it says is exactly where it is at inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A piece of text.

    Attributes:
        text: the text.
        is_markup: whether the template wrote it as markup: such a piece becomes a single token where the tokenizer has
            a special token of that text. All other text is ordinary characters, whatever it says.
    """

    text: str
    is_markup: bool = False


@dataclass(frozen=True)
class Run:
    """Pieces that are tokenized together, and whether the model is trained to say them."""

    pieces: tuple[Piece, ...]
    trained: bool = False

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])


Sample = tuple[Run, ...]


def text_of(runs: Iterable[Run]) -> str:
    """The rendered text."""
    return "".join(run.text for run in runs)
