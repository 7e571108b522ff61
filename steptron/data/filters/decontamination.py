"""Removes documents that hold items of benchmarks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from steptron.data.errors import DataError
from steptron.data.filters.benchmarks import BenchmarkSettings, Item, read_items
from steptron.data.filters.interface import KEEP, Document, FilterSettings, Verdict
from steptron.data.filters.ngrams import ItemIndex, Match
from steptron.data.filters.words import normalised_words


class DecontaminationSettings(FilterSettings):
    """Benchmarks, and what counts as an occurrence. Texts are compared as ``words.py`` describes."""

    benchmarks: dict[str, BenchmarkSettings] = Field(min_length=1, description="benchmarks by name")
    exact: bool = Field(True, description="whether to find items whose words all occur in a row")
    ngram_size: Annotated[int, Field(ge=2, le=1000)] = Field(
        13, description="words of an n-gram; GPT-3 took 13, Brown et al. 2020, appendix C"
    )
    ngram_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        0.5, description="share of an item's different n-grams from which it counts as occurring; null: exact only"
    )
    min_words: PositiveInt = Field(
        8, description="items with fewer normalised words are not looked for; GPT-3 took 8, ibid."
    )


class Decontamination:
    """Looks for benchmark items in all passages of a document together, so that an item whose question stands in one
    message and whose answer in the next is found.

    Raises:
        DataError: a benchmark cannot be read, or nothing would be looked for.
    """

    Settings = DecontaminationSettings

    def __init__(self, settings: DecontaminationSettings) -> None:
        if not settings.exact and settings.ngram_share is None:
            raise DataError("exact is false and ngram_share null: nothing would be looked for; set one of them")
        self._settings = settings
        self._items: list[tuple[str, str, int]] = []
        words: list[list[str]] = []
        counts: dict[str, int] = {}
        for name, benchmark in settings.benchmarks.items():
            for item in read_items(name, benchmark):
                words.append(normalised_words(item.text))
                self._items.append(_place(item))
                if len(words[-1]) >= settings.min_words:
                    counts[name] = counts.get(name, 0) + 1
        unsearched = [name for name in settings.benchmarks if name not in counts]
        if unsearched:
            raise DataError(f"benchmarks {', '.join(unsearched)}: no item has min_words {settings.min_words} words")
        self._index = ItemIndex(words, settings.ngram_size, settings.min_words)

    @property
    def summary(self) -> str:
        """What is looked for, for the report."""
        short = len(self._items) - self._index.num_searched
        return (
            f"{self._index.num_searched:,} items with {self._index.num_ngrams:,} n-grams; "
            f"{short:,} items with fewer than {self._settings.min_words} words are not looked for"
        )

    def judge(self, document: Document) -> Verdict:
        matches = self._index.matches(normalised_words(document.text), self._settings.ngram_share, self._settings.exact)
        if not matches:
            return KEEP
        best = min(matches, key=lambda match: (match.kind != "exact", -match.share, match.item))
        benchmark, file, line = self._items[best.item]
        more = f"; {len(matches)} items in all" if len(matches) > 1 else ""
        return Verdict(f"{benchmark} {best.kind}", f"{file}:{line} {self._words_for(best)}{more}", best.share)

    def _words_for(self, match: Match) -> str:
        if match.kind == "exact":
            return "word for word, digits masked"
        grams = f"{match.found} of {match.total} {self._settings.ngram_size}-grams"
        return f"in {match.share:.2f} of its n-grams ({grams}, limit {self._settings.ngram_share:g})"


def _place(item: Item) -> tuple[str, str, int]:
    return item.benchmark, item.file, item.line
