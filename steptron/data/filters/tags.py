"""Removes documents whose tags or code fences are not closed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from steptron.data.errors import DataError
from steptron.data.filters.interface import KEEP, Document, FilterSettings, Verdict

_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
# CommonMark 0.31, section 4.5: three or more of one character, indented by at most three spaces. The info string after
# an opening fence of back-quotes holds none of them.
_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>.*)$", re.MULTILINE)


class TagsSettings(FilterSettings):
    """Which tags have to be closed, and how strictly."""

    names: list[str] = Field(
        default_factory=lambda: ["think", "tool_call", "function", "parameter"],
        description="tags that must be balanced: <name>, <name=...>, <name ...> and </name>; <name/> needs no end",
    )
    nested: bool = Field(
        True, description="whether tags must be properly nested too, rather than only opened before they are closed"
    )
    code_fences: bool = Field(True, description="whether code fences (``` and ~~~) must be closed")
    skip_fenced: bool = Field(True, description="whether tags inside closed code fences are left out, as quoted text")


class Tags:
    """Judges each passage of a document by itself: no tag reaches from one message into another.

    Raises:
        DataError: a name that no tag can have.
    """

    Settings = TagsSettings

    def __init__(self, settings: TagsSettings) -> None:
        for name in settings.names:
            if not _NAME.fullmatch(name):
                raise DataError(f"names: {name!r} is no name of a tag; write it without brackets, such as think")
        self._settings = settings
        names = "|".join(re.escape(name) for name in sorted(settings.names, key=len, reverse=True))
        # What follows the name of an opening tag begins with white space or = ; a value may hold anything but > .
        self._tag = re.compile(rf"<(?:/(?P<end>{names})\s*|(?P<start>{names})(?:[\s=][^<>]*?)?(?P<empty>/)?)>")

    def judge(self, document: Document) -> Verdict:
        for passage in document.passages:
            for reason, problems in self._problems(passage.text):
                if problems:
                    line = passage.text.count("\n", 0, problems[0].start) + 1
                    where = f"{passage.place}, line {line}" if len(document.passages) > 1 else f"line {line}"
                    more = f"; {len(problems)} in all" if len(problems) > 1 else ""
                    return Verdict(reason, f"{where}: {problems[0].message}{more}", len(problems))
        return KEEP

    def _problems(self, text: str) -> Iterator[tuple[str, list[Problem]]]:
        settings = self._settings
        has_fences = "```" in text or "~~~" in text
        fenced, unclosed = code_fences(text) if has_fences else ([], [])
        if settings.code_fences:
            yield "unclosed_code_fence", unclosed
        if settings.names and "<" in text:
            tags = self._tag.finditer(text)
            if settings.skip_fenced and fenced:
                tags = (tag for tag in tags if not any(tag.start() in span for span in fenced))
            yield "unbalanced_tags", unbalanced(tags, settings.nested)


@dataclass(frozen=True)
class Problem:
    """Something unbalanced: the character it starts at, and what is wrong with it."""

    start: int
    message: str


def code_fences(text: str) -> tuple[list[range], list[Problem]]:
    """Characters of the closed code blocks, fences included, and a fence that is not closed."""
    closed: list[range] = []
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        fence = match["fence"]
        if opening is None:
            opening = match
        elif fence[0] == opening["fence"][0] and len(fence) >= len(opening["fence"]) and not match["info"].strip():
            closed.append(range(opening.start(), match.end()))
            opening = None
    if opening is None:
        return closed, []
    return closed, [Problem(opening.start(), f"the code fence {opening.group().strip()[:40]!r} is not closed")]


def unbalanced(tags: Iterator[re.Match[str]], nested: bool) -> list[Problem]:
    """Tags that close nothing or are not closed, in the order in which they stand.

    Args:
        tags: with the groups ``start`` or ``end`` for the name, and ``empty`` of a tag that needs no end.
        nested: whether an end must close the tag that was opened last. Otherwise it closes the last one of its name.
    """
    opened: list[re.Match[str]] = []
    problems: list[Problem] = []
    for tag in tags:
        if tag["start"]:
            if not tag["empty"]:
                opened.append(tag)
            continue
        place = next((at for at in reversed(range(len(opened))) if opened[at]["start"] == tag["end"]), None)
        if place is None:
            problems.append(Problem(tag.start(), f"{tag.group()} closes nothing"))
        elif nested:
            problems += (
                Problem(inner.start(), f"{inner.group()[:40]} is not closed before {tag.group()}")
                for inner in opened[place + 1 :]
            )
            del opened[place:]
        else:
            del opened[place]
    problems += (Problem(tag.start(), f"{tag.group()[:40]} is not closed") for tag in opened)
    return sorted(problems, key=lambda problem: problem.start)
