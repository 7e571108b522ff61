"""What each worker process does: parses a batch of records and asks the filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from steptron.data.errors import DataError
from steptron.data.filters.config import FilterConfig
from steptron.data.filters.interface import CorpusFilter, Document, Verdict
from steptron.data.filters.records import parse_record
from steptron.data.readers import BadDocument, RawDocument

_EXCERPT_CHARACTERS = 200

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Removal:
    """Which filter removed a document, and why."""

    filter: str
    verdict: Verdict


@dataclass(frozen=True)
class Judged:
    """A document that was judged.

    Attributes:
        file: file it stands in.
        line: line or row in it.
        json_line: the record as a JSON line, UTF-8, without line end.
        text_bytes: UTF-8 bytes of its text.
        excerpt: how its text begins.
        removal: None if it is kept.
        observations: of a kept document, one for each corpus filter.
    """

    file: str
    line: int | None
    json_line: bytes
    text_bytes: int
    excerpt: str
    removal: Removal | None
    observations: tuple[object, ...] = ()


class Judge:
    """Judges batches: a pure function of the configuration and the documents.

    It travels to worker processes as its configuration; each makes its own filters.

    Attributes:
        summaries: what filters say of themselves, by name.

    Raises:
        DataError: settings, or files they name, cannot be used.
    """

    def __init__(self, config: FilterConfig) -> None:
        self._config = config
        made = [(spec.name, spec.make()) for spec in config.filters]
        self._filters = [(name, each) for name, each in made if not isinstance(each, CorpusFilter)]
        self.corpus_filters = [(name, each) for name, each in made if isinstance(each, CorpusFilter)]
        self.summaries = {name: str(summary) for name, each in made if (summary := getattr(each, "summary", None))}

    def __reduce__(self) -> tuple[type[Judge], tuple[FilterConfig]]:
        return Judge, (self._config,)

    def encode(self, items: Sequence[RawDocument | BadDocument]) -> list[Judged | BadDocument]:
        """Judges the documents of a batch, in order; the pool of workers calls what it does with one ``encode``."""
        return [item if isinstance(item, BadDocument) else self._judge(item) for item in items]

    def _judge(self, raw: RawDocument) -> Judged | BadDocument:
        parsed = parse_record(raw, self._config.fields)
        if isinstance(parsed, BadDocument):
            return parsed
        document, json_line = parsed
        removal = self._removal(document)
        observations: tuple[object, ...] = ()
        if removal is None:
            observations = tuple(_asked(name, document, each.observe) for name, each in self.corpus_filters)
        text_bytes = sum(len(passage.text.encode()) for passage in document.passages)
        excerpt = next(passage.text for passage in document.passages if passage.text)[:_EXCERPT_CHARACTERS]
        return Judged(raw.file, raw.line, json_line, text_bytes, excerpt, removal, observations)

    def _removal(self, document: Document) -> Removal | None:
        for name, each in self._filters:
            verdict = _asked(name, document, each.judge)
            if not isinstance(verdict, Verdict):
                raise DataError(f"filters.{name}: judge returned {verdict!r}, not a Verdict")
            if not verdict.keeps:
                return Removal(name, verdict)
        return None


def _asked(name: str, document: Document, question: Callable[[Document], _Answer]) -> _Answer:
    """The answer of a filter; an error of one that is not ours names the filter and the document."""
    try:
        return question(document)
    except Exception as error:
        place = document.file if document.line is None else f"{document.file}:{document.line}"
        raise DataError(f"filters.{name}: failed at {place}: {type(error).__name__}: {error}") from error
