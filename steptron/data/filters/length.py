"""Removes documents that are too short or too long."""

from __future__ import annotations

from pydantic import Field

from steptron.config.schema import NonNegativeInt
from steptron.data.errors import DataError
from steptron.data.filters.interface import KEEP, Document, FilterSettings, Verdict


class LengthSettings(FilterSettings):
    """Lengths that are kept, borders included; null sets no border."""

    min_characters: NonNegativeInt | None = Field(None, description="fewest characters (Unicode code points)")
    max_characters: NonNegativeInt | None = Field(None, description="most characters")
    min_words: NonNegativeInt | None = Field(None, description="fewest words (between white space)")
    max_words: NonNegativeInt | None = Field(None, description="most words")


class Length:
    """Counts characters and words of all passages of a document together.

    Raises:
        DataError: a lower border above its upper one.
    """

    Settings = LengthSettings

    def __init__(self, settings: LengthSettings) -> None:
        self._borders = {
            "characters": (settings.min_characters, settings.max_characters),
            "words": (settings.min_words, settings.max_words),
        }
        for unit, (low, high) in self._borders.items():
            if low is not None and high is not None and low > high:
                raise DataError(f"min_{unit} {low} is above max_{unit} {high}: no document could be kept")

    def judge(self, document: Document) -> Verdict:
        texts = [passage.text for passage in document.passages]
        for unit, (low, high) in self._borders.items():
            if low is None and high is None:
                continue
            count = sum(len(text.split()) if unit == "words" else len(text) for text in texts)
            if low is not None and count < low:
                return Verdict(f"few_{unit}", f"{count:,} {unit} (at least {low:,})", count)
            if high is not None and count > high:
                return Verdict(f"many_{unit}", f"{count:,} {unit} (at most {high:,})", count)
        return KEEP
