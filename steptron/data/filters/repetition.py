"""Removes text that repeats itself.

Measures and thresholds are those of MassiveText (Rae et al. 2021, "Scaling Language Models: Methods, Analysis &
Insights from Training Gopher", https://arxiv.org/abs/2112.11446, appendix A.1.1 and table A1), and one of our own: the
longest stretch of one short pattern. Where the paper leaves room:

- A repeat is an occurrence after the first one, of lines, paragraphs and n-grams alike.
- Words stand between white space, and shares of characters leave white space out.
- No character counts twice, also for the most frequent n-gram, so that every share lies between 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from steptron.config.schema import NonNegativeInt
from steptron.data.filters.interface import KEEP, Document, FilterSettings, Verdict

Share = Annotated[float, Field(ge=0, le=1)]
NgramSize = Annotated[int, Field(ge=1, le=100)]
_BLANK_LINES = re.compile(r"\n\s*\n")


class RepetitionSettings(FilterSettings):
    """The largest shares that are kept, each the published one; null switches a measure off."""

    repeated_lines: Share | None = Field(0.30, description="share of the lines that are repeats")
    repeated_paragraphs: Share | None = Field(0.30, description="share of the paragraphs that are repeats")
    repeated_line_characters: Share | None = Field(0.20, description="share of the characters in repeated lines")
    repeated_paragraph_characters: Share | None = Field(
        0.20, description="share of the characters in repeated paragraphs"
    )
    top_ngrams: dict[NgramSize, Share | None] = Field(
        default={2: 0.20, 3: 0.18, 4: 0.16},
        description="share of the characters in the most frequent n-gram of words, by n",
    )
    repeated_ngrams: dict[NgramSize, Share | None] = Field(
        default={5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        description="share of the characters in repeated n-grams of words, by n",
    )
    min_words: NonNegativeInt = Field(
        50, description="passages with fewer words are judged by max_stretch only; MassiveText has none below 50"
    )
    max_stretch: PositiveInt | None = Field(
        1000, description="longest stretch of one repeated character or pattern, characters"
    )
    max_period: Annotated[int, Field(ge=1, le=256)] = Field(
        16, description="longest pattern that max_stretch looks for, characters"
    )


class Repetition:
    """Judges each passage of a document by itself: repeats across the turns of a conversation are no degeneration."""

    Settings = RepetitionSettings

    def __init__(self, settings: RepetitionSettings) -> None:
        self._settings = settings
        self._sizes = sorted(
            size
            for limits in (settings.top_ngrams, settings.repeated_ngrams)
            for size, limit in limits.items()
            if limit is not None
        )

    def judge(self, document: Document) -> Verdict:
        for passage in document.passages:
            for reason, measured, limit, what in self._measures(passage.text):
                if limit is not None and measured > limit:
                    where = f"{passage.place}: " if len(document.passages) > 1 else ""
                    shown = f"{measured:,}" if isinstance(measured, int) else f"{measured:.2f}"
                    return Verdict(reason, f"{where}{shown} {what} (limit {limit:,})", measured)
        return KEEP

    def _measures(self, text: str) -> Iterator[tuple[str, float, float | None, str]]:
        """Reason, value, limit and what the value is, cheap measures first."""
        settings = self._settings
        if settings.max_stretch is not None and len(text) > settings.max_stretch:
            stretch, pattern = longest_stretch(text, settings.max_period)
            yield "stretch", stretch, settings.max_stretch, f"characters are one stretch of {pattern!r}"
        words = text.split()
        if len(words) < settings.min_words:
            return
        lines = repeats([line.strip() for line in text.splitlines()])
        yield "repeated_lines", lines.share, settings.repeated_lines, "of the lines are repeats"
        limit = settings.repeated_line_characters
        yield "repeated_line_characters", lines.character_share, limit, "of the characters are in repeated lines"
        paragraphs = repeats([paragraph.strip() for paragraph in _BLANK_LINES.split(text)])
        yield "repeated_paragraphs", paragraphs.share, settings.repeated_paragraphs, "of the paragraphs are repeats"
        limit, share = settings.repeated_paragraph_characters, paragraphs.character_share
        yield "repeated_paragraph_characters", share, limit, "of the characters are in repeated paragraphs"
        for shares in ngram_shares(words, self._sizes):
            what = f"of the characters are in the most frequent {shares.size}-gram"
            yield f"top_{shares.size}_gram", shares.top, settings.top_ngrams.get(shares.size), what
            what = f"of the characters are in repeated {shares.size}-grams"
            yield f"repeated_{shares.size}_grams", shares.repeated, settings.repeated_ngrams.get(shares.size), what


@dataclass(frozen=True)
class Repeats:
    """Shares of pieces, and of their characters, that are repeats of an earlier piece."""

    share: float
    character_share: float


@dataclass(frozen=True)
class NgramShares:
    """Shares of the characters of words in the most frequent n-gram, and in repeats of n-grams."""

    size: int
    top: float
    repeated: float


def repeats(pieces: Sequence[str]) -> Repeats:
    """How much of the pieces is repeated; empty ones are left out."""
    seen: set[str] = set()
    count = characters = repeated = repeated_characters = 0
    for piece in pieces:
        if not piece:
            continue
        count += 1
        characters += len(piece)
        if piece in seen:
            repeated += 1
            repeated_characters += len(piece)
        seen.add(piece)
    return Repeats(repeated / count, repeated_characters / characters) if count else Repeats(0.0, 0.0)


def ngram_shares(words: Sequence[str], sizes: Sequence[int]) -> Iterator[NgramShares]:
    """The shares of n-grams of words.

    The most frequent n-gram occurs twice at least; of several, the longest in characters counts, then the first.

    Args:
        words: none of them empty.
        sizes: lengths of the n-grams, ascending.
    """
    number_of = {word: number for number, word in enumerate(dict.fromkeys(words))}
    words_W = np.fromiter(map(number_of.__getitem__, words), np.int64, len(words))
    ends_W1 = np.concatenate([[0], np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))])
    wanted = set(sizes)
    # An n-gram that occurs once is not extended: no longer one around it occurs twice.
    starts_R, grams_R = np.arange(len(words)), words_W
    for size in range(1, max(wanted, default=0) + 1):
        if size > 1:
            inside_R = starts_R + size <= len(words)
            starts_R, grams_R = starts_R[inside_R], grams_R[inside_R]
            # The number of the (n-1)-gram and its next word name the n-gram exactly: no hash, no collision.
            grams_R = grams_R * len(number_of) + words_W[starts_R + size - 1]
        _, firsts_G, grams_R, counts_G = np.unique(grams_R, return_index=True, return_inverse=True, return_counts=True)
        if size in wanted:
            yield _shares(size, starts_R, grams_R, firsts_G, counts_G, ends_W1)
        again_R = counts_G[grams_R] > 1
        starts_R, grams_R = starts_R[again_R], grams_R[again_R]


def _shares(
    size: int,
    starts_R: np.ndarray,
    grams_R: np.ndarray,
    firsts_G: np.ndarray,
    counts_G: np.ndarray,
    ends_W1: np.ndarray,
) -> NgramShares:
    if counts_G.max(initial=0) < 2:
        return NgramShares(size, 0.0, 0.0)
    characters_G = ends_W1[starts_R[firsts_G] + size] - ends_W1[starts_R[firsts_G]]
    top = np.lexsort((firsts_G, -characters_G, -counts_G))[0]
    is_first_R = np.zeros(starts_R.size, np.bool_)
    is_first_R[firsts_G] = True
    return NgramShares(
        size,
        _covered(starts_R[grams_R == top], size, ends_W1),
        _covered(starts_R[~is_first_R], size, ends_W1),
    )


def _covered(starts: np.ndarray, size: int, ends_W1: np.ndarray) -> float:
    """Share of all characters that stand in n-grams with these first words, each counted once."""
    steps_W1 = np.zeros(ends_W1.size, np.int64)
    np.add.at(steps_W1, starts, 1)
    np.add.at(steps_W1, starts + size, -1)
    covered_W = np.cumsum(steps_W1[:-1]) > 0
    return float(np.diff(ends_W1)[covered_W].sum() / ends_W1[-1])


def longest_stretch(text: str, max_period: int) -> tuple[int, str]:
    """Length, in characters, and pattern of the longest stretch that repeats a pattern of at most ``max_period``.

    A pattern must occur twice; the last occurrence may be cut off. Of equal stretches, that of the shortest pattern,
    then the first, is returned; ``(0, "")`` where nothing repeats.
    """
    codes_C = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    best, pattern = 0, ""
    for period in range(1, min(max_period, codes_C.size // 2) + 1):
        # Runs of c[i] == c[i + period] lie between neighbouring places where that does not hold.
        breaks = np.flatnonzero(codes_C[period:] != codes_C[:-period])
        borders = np.concatenate([[-1], breaks, [codes_C.size - period]])
        runs = np.diff(borders) - 1
        longest = int(runs.argmax())
        if runs[longest] >= period and runs[longest] + period > best:
            start = int(borders[longest]) + 1
            best, pattern = int(runs[longest]) + period, text[start : start + period]
    return best, pattern
