"""What a filter is: the documents it gets, the verdicts it gives, and how it is made from its settings.

A filter is a class (or any callable) with an attribute ``Settings``, found by an entry point of the group
``steptron.filters`` or by its dotted path; see docs/filters.md for a worked example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from steptron.config.schema import Section


class FilterSettings(Section):
    """Base of every filter's settings."""

    kind: str | None = Field(
        None, description="built-in kind, entry point or package.module:Class; the name of the filter by default"
    )


@dataclass(frozen=True)
class Passage:
    """A piece of a document's text, with the place in the record it stands in (``text``, ``messages.2.content``)."""

    place: str
    text: str


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        file: the file it stands in.
        line: line (JSONL) or row (Parquet), from 1; None for a file that is one document.
        record: all fields of the record; ``{text_field: text}`` for a file that is one document.
        passages: its texts in order: one of a text, those of every message of a conversation.
    """

    file: str
    line: int | None
    record: Mapping[str, Any]
    passages: tuple[Passage, ...]

    @property
    def text(self) -> str:
        """All passages, one under the other."""
        return "\n".join(passage.text for passage in self.passages)


@dataclass(frozen=True)
class Verdict:
    """What a filter decided.

    Attributes:
        reason: None keeps the document. Otherwise a short key such as ``repeated_lines``: the report counts by it,
            so it must not hold what differs from document to document.
        detail: the decision in words, with what was measured and its limit.
        value: the measured value.
    """

    reason: str | None = None
    detail: str = ""
    value: float | None = None

    @property
    def keeps(self) -> bool:
        return self.reason is None


KEEP = Verdict()


@runtime_checkable
class Filter(Protocol):
    """Judges documents one by one: a pure function of the document and the settings.

    Every worker process makes its own. The constructor is also called before work starts, to find wrong settings;
    what is slow or large, such as a model, is better loaded by the first ``judge``.
    """

    def judge(self, document: Document) -> Verdict:
        """Decides on one document."""
        ...


@runtime_checkable
class CorpusFilter(Protocol):
    """Judges documents by what else is in the corpus, as the removal of near-duplicates does.

    It stands after all filters that judge documents one by one, and sees what they kept. ``observe`` runs in the
    worker processes; ``collect``, for every observation in the order of the input, and then ``judge`` run in the
    main process.
    """

    def observe(self, document: Document) -> object:
        """What has to be known of a document: small, and picklable (a signature, not the text)."""
        ...

    def collect(self, number: int, observation: object) -> None:
        """Takes the observation of document ``number``; numbers ascend, those of removed documents are missing."""
        ...

    def judge(self, number: int) -> Verdict:
        """Decides on a document that was collected, after all were."""
        ...


class FilterFactory(Protocol):
    """Makes a filter from its settings."""

    Settings: type[FilterSettings]

    def __call__(self, settings: Any) -> Filter | CorpusFilter:
        """Raises DataError for settings or files that cannot be used."""
        ...
