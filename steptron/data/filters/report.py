"""Counts and examples of a filter run, as JSON and as a page to read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from steptron.data.filters.config import FilterConfig
from steptron.data.filters.judge import Judged, Removal
from steptron.data.readers import BadDocument

REPORT_FILE = "report.json"
FORMAT = "steptron-filter-report"
FORMAT_VERSION = 1
EXAMPLES_PER_REASON = 3


@dataclass
class Count:
    """Documents, and UTF-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add(self, text_bytes: int) -> None:
        self.documents += 1
        self.bytes += text_bytes


@dataclass
class FileCount:
    """What became of the documents of an input file."""

    kept: Count = field(default_factory=Count)
    removed: Count = field(default_factory=Count)
    bad_documents: int = 0


@dataclass(frozen=True)
class Example:
    """A removed document: where it stands, why it was removed, and how it begins."""

    file: str
    line: int | None
    detail: str
    value: float | None
    excerpt: str


@dataclass
class ReasonCount(Count):
    """What a filter removed for one reason, and the first documents of it."""

    examples: list[Example] = field(default_factory=list)


@dataclass
class Report:
    """What became of every document. The counts of filters and reasons add up: one removal per document.

    Attributes:
        files: by name, in the order of reading.
        reasons: by filter, in the order of judging, then by reason.
        summaries: what filters say of themselves, by filter.
        bad: number of bad documents by kind.
    """

    files: dict[str, FileCount]
    reasons: dict[str, dict[str, ReasonCount]]
    summaries: Mapping[str, str]
    bad: Counter[str] = field(default_factory=Counter)

    @classmethod
    def empty(cls, files: Iterable[str], filters: Iterable[str], summaries: Mapping[str, str]) -> Report:
        """The report before the first document."""
        return cls({name: FileCount() for name in files}, {name: {} for name in filters}, summaries)

    @property
    def kept(self) -> Count:
        return _total(file.kept for file in self.files.values())

    @property
    def removed(self) -> Count:
        return _total(file.removed for file in self.files.values())

    def add_bad(self, document: BadDocument) -> None:
        self.files[document.file].bad_documents += 1
        self.bad[document.kind] += 1

    def add_kept(self, judged: Judged) -> None:
        self.files[judged.file].kept.add(judged.text_bytes)

    def add_removed(self, judged: Judged, removal: Removal) -> ReasonCount:
        """Counts a removed document; returns the count of its reason."""
        verdict = removal.verdict
        self.files[judged.file].removed.add(judged.text_bytes)
        count = self.reasons[removal.filter].setdefault(str(verdict.reason), ReasonCount())
        count.add(judged.text_bytes)
        if len(count.examples) < EXAMPLES_PER_REASON:
            count.examples.append(Example(judged.file, judged.line, verdict.detail, verdict.value, judged.excerpt))
        return count

    def write(self, folder: Path, config: FilterConfig, kept_files: Sequence[str]) -> None:
        """Writes ``report.json`` and ``report.md``."""
        record = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kept": asdict(self.kept),
            "removed": asdict(self.removed),
            "bad_documents": self.bad.total(),
            "bad_kinds": dict(self.bad),
            "kept_files": list(kept_files),
            "filters": [
                {
                    "name": spec.name,
                    "kind": spec.target,
                    "settings": spec.settings.model_dump(mode="json", exclude={"kind"}),
                    "summary": self.summaries.get(spec.name, ""),
                    "removed": asdict(_total(self.reasons[spec.name].values())),
                    "reasons": {reason: asdict(count) for reason, count in _most_first(self.reasons[spec.name])},
                }
                for spec in config.filters
            ],
            "files": {name: asdict(count) for name, count in self.files.items()},
        }
        (folder / REPORT_FILE).write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", "utf-8")
        (folder / "report.md").write_text(self.markdown(), "utf-8")

    def markdown(self) -> str:
        """The report as a page."""
        kept, removed = self.kept, self.removed
        total = kept.documents + removed.documents
        lines = [
            "# Filter report",
            "",
            *_table(
                ["", "documents", "share", "bytes of text"],
                [
                    ["kept", f"{kept.documents:,}", _percent(kept.documents, total), f"{kept.bytes:,}"],
                    ["removed", f"{removed.documents:,}", _percent(removed.documents, total), f"{removed.bytes:,}"],
                    ["bad (not judged)", f"{self.bad.total():,}", "", ""],
                ],
            ),
            "## By filter and reason",
            "",
            *_table(["filter", "reason", "documents", "share", "bytes of text"], self._reason_rows(total)),
        ]
        lines += [f"- {name}: {summary}" for name, summary in self.summaries.items()]
        lines += ["", "## By file", ""]
        lines += _table(
            ["file", "kept", "removed", "bad", "bytes kept", "bytes removed"],
            [[_code(name), *(f"{number:,}" for number in _file_numbers(count))] for name, count in self.files.items()],
        )
        lines += ["## Examples", ""]
        for name, reasons in self.reasons.items():
            for reason, count in _most_first(reasons):
                lines += [f"### {name}: {reason}", ""]
                for example in count.examples:
                    place = example.file if example.line is None else f"{example.file}:{example.line}"
                    lines += [f"- {_code(place)}: {_code(example.detail)}", f"  {_code(example.excerpt)}"]
                lines.append("")
        return "\n".join(lines).rstrip() + "\n"

    def _reason_rows(self, total: int) -> list[list[str]]:
        return [
            [name, reason, f"{count.documents:,}", _percent(count.documents, total), f"{count.bytes:,}"]
            for name, reasons in self.reasons.items()
            for reason, count in (_most_first(reasons) or [("", ReasonCount())])
        ]


def _file_numbers(count: FileCount) -> list[int]:
    return [count.kept.documents, count.removed.documents, count.bad_documents, count.kept.bytes, count.removed.bytes]


def _total(counts: Iterable[Count]) -> Count:
    listed = list(counts)
    return Count(sum(count.documents for count in listed), sum(count.bytes for count in listed))


def _most_first(reasons: Mapping[str, ReasonCount]) -> list[tuple[str, ReasonCount]]:
    return sorted(reasons.items(), key=lambda item: (-item[1].documents, item[0]))


def _percent(part: int, total: int) -> str:
    return f"{part / total:.2%}" if total else ""


def _code(text: str) -> str:
    """Text as Markdown code on one line, whatever it holds."""
    line = " ".join(text.split())
    fence = "`" * (max((len(run) for run in _backquotes(line)), default=0) + 1)
    return f"{fence} {line} {fence}".replace("|", "\\|")


def _backquotes(text: str) -> list[str]:
    return [run for run in "".join("`" if c == "`" else " " for c in text).split() if run]


def _table(headings: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table and the blank line after it."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
