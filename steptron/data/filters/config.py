"""The YAML file of ``steptron data filter``: which filters, in which order, with which settings.

The settings of each filter are checked by its own ``Settings``. A first reading of the file finds the kinds; from them
the type of the whole file is made, so that the second one names unknown keys and wrong values, with file and line, as
in every other configuration.
"""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, create_model

from steptron.config.loader import load_section
from steptron.config.schema import Section
from steptron.data.errors import DataError
from steptron.data.filters.interface import CorpusFilter, Filter, FilterFactory, FilterSettings
from steptron.data.filters.records import RecordFields
from steptron.errors import ConfigError

ENTRY_POINT_GROUP = "steptron.filters"
BUILT_IN = {
    "length": "steptron.data.filters.length:Length",
    "repetition": "steptron.data.filters.repetition:Repetition",
    "tags": "steptron.data.filters.tags:Tags",
    "decontamination": "steptron.data.filters.decontamination:Decontamination",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class FilterSpec:
    """How to make a filter, in any process.

    Attributes:
        name: its key in the file.
        target: ``package.module:attribute`` of its factory.
        settings: checked.
    """

    name: str
    target: str
    settings: FilterSettings

    def make(self) -> Filter | CorpusFilter:
        """Makes the filter.

        Raises:
            DataError: the settings, or files they name, cannot be used; or what was made is no filter.
        """
        try:
            made = find_factory(self.target)(self.settings)
        except DataError as error:
            raise DataError(f"filters.{self.name}: {error}") from error
        if not isinstance(made, Filter | CorpusFilter):
            raise DataError(f"filters.{self.name}: {self.target} has no method judge (see docs/filters.md)")
        return made


@dataclass(frozen=True)
class FilterConfig:
    """Filters in the order in which they judge, and the fields that hold text."""

    fields: RecordFields
    filters: tuple[FilterSpec, ...]


class _Top(Section):
    """What the file holds beside the filters."""

    text_field: str = Field("text", description="field (JSONL) or column (Parquet) of a document's text")
    messages_field: str = Field("messages", description="field or column of a conversation's messages")


class _Outline(_Top):
    """The first reading: nothing is refused yet."""

    model_config = ConfigDict(extra="ignore", strict=False)
    text_field: Any = None
    messages_field: Any = None
    filters: Any = None


def load_filters(file: Path) -> FilterConfig:
    """Reads the file.

    A filter that is null, in a file that builds on others with ``base:``, is switched off.

    Raises:
        ConfigError: lists unknown kinds, unknown keys and wrong values, each with what would be right.
    """
    outline = load_section(file, _Outline).filters
    if outline is not None and not isinstance(outline, dict):
        raise ConfigError(
            str(file), ["filters takes a mapping from names to settings, such as length: {min_words: 50}"]
        )
    listed: dict[Any, Any] = outline or {}
    problems: list[str] = []
    targets: dict[str, str] = {}
    slots: dict[str, Any] = {}
    for name, settings in listed.items():
        kind = settings.get("kind") if isinstance(settings, dict) else None
        try:
            targets[name] = _checked_target(name, kind if isinstance(kind, str) else name, settings is None)
            schema = find_factory(targets[name]).Settings if targets[name] else FilterSettings
        except DataError as error:
            problems.append(f"filters.{name}: {error}")
            continue
        slots[name] = (schema | None, Field(None, description=f"settings of the filter {name}"))
    if problems:
        raise ConfigError(str(file), problems)
    filters = create_model("Filters", __base__=Section, **slots)
    file_schema = create_model(
        "FilterFile", __base__=_Top, filters=(filters, Field(description="filters by name, in the order of judging"))
    )
    loaded = cast(Any, load_section(file, file_schema))
    specs = [
        FilterSpec(name, targets[name], settings)
        for name in listed  # the order of the file
        if (settings := getattr(loaded.filters, name)) is not None
    ]
    if not specs:
        raise ConfigError(str(file), [f"filters: there is none; known kinds: {', '.join(_kinds())}"])
    return FilterConfig(RecordFields(loaded.text_field, loaded.messages_field), tuple(specs))


def find_factory(target: str) -> FilterFactory:
    """Imports a factory.

    Raises:
        DataError: there is none, or it has no ``Settings``.
    """
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"{target} cannot be imported: {error}; write package.module:Class") from error
    settings = getattr(factory, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, FilterSettings)):
        raise DataError(f"{target} has no Settings, a subclass of steptron.data.filters.FilterSettings")
    return cast(FilterFactory, factory)


def _checked_target(name: object, kind: str, is_off: bool) -> str:
    """Where the factory of a kind is; an empty string for a filter that is switched off."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or hasattr(BaseModel, name):
        raise DataError(
            "cannot be the name of a filter; take lower-case letters, digits and underscores, such as length "
            "(copy, json, schema and other names of pydantic's are taken)"
        )
    if is_off:
        return ""
    if ":" in kind:
        return kind
    kinds = _kinds()
    if kind in kinds:
        return kinds[kind]
    close = difflib.get_close_matches(kind, kinds, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(kinds)}, or package.module:Class"
    raise DataError(f"{kind!r} is not a known kind of filter; {hint}")


def _kinds() -> dict[str, str]:
    """Targets by kind: entry points, and the built-in ones, which they cannot replace."""
    return {**{point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}, **BUILT_IN}
