"""Reads benchmark files: the items that must not be in the training data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from steptron.config.schema import FilePath, Section
from steptron.data.errors import DataError
from steptron.data.filters.records import json_type, read_records, shown_names
from steptron.data.readers import BadDocument, RawDocument, find_files


class BenchmarkSettings(Section):
    """One benchmark."""

    files: list[FilePath] = Field(
        min_length=1,
        description="files or folders: JSONL and Parquet with an item per line or row, other text with one per line",
    )
    fields: list[str] = Field(
        default_factory=lambda: ["question"],
        min_length=1,
        description="fields that make up the text of an item, in order; of text files all of the line",
    )


@dataclass(frozen=True)
class Item:
    """An item of a benchmark.

    Attributes:
        benchmark: its name.
        file: file it stands in.
        line: line or row, from 1.
        text: its fields, one under the other.
    """

    benchmark: str
    file: str
    line: int
    text: str


def read_items(name: str, settings: BenchmarkSettings) -> Iterator[Item]:
    """The items of a benchmark, in order.

    Raises:
        DataError: there is no such file, or an item cannot be read. Nothing is passed over: what is not read is not
            found either.
    """
    files, _ = find_files(settings.files)
    for file in files:
        for item in read_records(file):
            document = item.document
            if isinstance(document, BadDocument):
                place = document.file if document.line is None else f"{document.file}:{document.line}"
                raise DataError(f"benchmark {name}: {place}: {document.kind}: {document.message}")
            if document.is_json:
                assert document.line is not None
                text = _item_text(name, document, settings.fields)
                yield Item(name, document.file, document.line, text)
            else:
                yield from _lines(name, document)


def _lines(name: str, document: RawDocument) -> Iterator[Item]:
    for number, line in enumerate(document.payload.split(b"\n"), start=1):
        if text := _decoded(name, document.file, number, line).strip():
            yield Item(name, document.file, number, text)


def _item_text(name: str, document: RawDocument, fields: list[str]) -> str:
    place = f"benchmark {name}: {document.file}:{document.line}"
    try:
        record = json.loads(_decoded(name, document.file, document.line, document.payload))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: invalid JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: the line is a JSON {json_type(record)}, not an object with fields")
    return "\n".join(_field_text(place, record, field) for field in fields)


def _field_text(place: str, record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise DataError(f"{place}: field {field!r} is missing; there are: {shown_names(record)}. Name them in `fields`")
    value = record[field]
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not isinstance(part, str):
            within = "a list with " if isinstance(value, list) else ""
            found = f"{within}a JSON {json_type(part)}"
            raise DataError(f"{place}: field {field!r} holds {found}, not a string or a list of strings")
    return "\n".join(parts)


def _decoded(name: str, file: str, line: int | None, payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = payload[error.start]
        message = f"byte 0x{byte:02x} at byte {error.start} is not UTF-8: {error.reason}"
        raise DataError(f"benchmark {name}: {file}:{line}: {message}") from None
