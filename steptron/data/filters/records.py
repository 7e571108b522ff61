"""From files to whole records and their texts.

JSON lines are kept as they are, byte for byte; other formats become JSON lines. So every field of a kept record is
preserved, and an unchanged corpus gives an unchanged output.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steptron.data.filters.interface import Document, Passage
from steptron.data.readers import BadDocument, BadKind, Fields, InputFile, RawDocument, ReadItem, read_file

if TYPE_CHECKING:
    import pyarrow

_PARQUET_BATCH_ROWS = 256


@dataclass(frozen=True)
class RecordFields:
    """Names of the fields that hold text.

    A record with ``text`` is a document, one with ``messages`` a conversation; a record with both is judged by both.
    """

    text: str = "text"
    messages: str = "messages"


class _Unusable(Exception):
    """A record that cannot become a document."""

    def __init__(self, kind: BadKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_records(file: InputFile) -> Iterator[ReadItem]:
    """Yields the raw records of a file in order, with all their fields; rows of Parquet as JSON lines.

    What cannot be read comes as ``BadDocument``, never as an exception.
    """
    return _read_parquet_rows(file) if file.format == "parquet" else read_file(file, Fields())


def parse_record(raw: RawDocument, fields: RecordFields) -> tuple[Document, bytes] | BadDocument:
    """A raw record as document, and the JSON line that preserves it (UTF-8, without line end)."""
    try:
        text = _decoded(raw)
        if not raw.is_json:
            record = {fields.text: text}
            line = json.dumps(record, ensure_ascii=False).encode()
        else:
            record = _object(text)
            line = raw.payload.strip()
        return Document(raw.file, raw.line, record, tuple(_passages(record, fields))), line
    except _Unusable as error:
        return BadDocument(raw.file, raw.line, error.kind, str(error))


def json_type(value: object) -> str:
    """The name of a value's type in JSON."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def shown_names(record: Mapping[str, object]) -> str:
    """The fields of a record, for a message; a name may hold lone surrogates, which no file takes."""
    return ", ".join(record).encode("utf-8", "backslashreplace").decode() or "none"


# ------------------------------------------------------------------------------------------- texts


def _decoded(raw: RawDocument) -> str:
    try:
        return raw.payload.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw.payload[error.start]
        raise _Unusable("invalid_utf8", f"byte 0x{byte:02x} at byte {error.start}: {error.reason}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable("invalid_json", str(error)) from None
    if not isinstance(record, dict):
        raise _Unusable("wrong_type", f"the line is a JSON {json_type(record)}, not an object")
    return record


def _passages(record: Mapping[str, Any], fields: RecordFields) -> Iterator[Passage]:
    """The texts of a record; raises _Unusable where there is none."""
    text, messages = record.get(fields.text), record.get(fields.messages)
    if text is None and messages is None:
        raise _Unusable(
            "missing_field",
            f"neither field {fields.text!r} (text_field) nor {fields.messages!r} (messages_field) is there; "
            f"there are: {shown_names(record)}",
        )
    passages = [] if text is None else [_passage(fields.text, text)]
    if messages is not None:
        passages += _message_passages(fields.messages, messages)
    if not any(passage.text for passage in passages):
        raise _Unusable("empty_document", "the text is empty")
    yield from passages


def _message_passages(field: str, messages: object) -> Iterator[Passage]:
    for place, message in _items(field, messages, "messages"):
        if not isinstance(message, dict):
            raise _Unusable(
                "wrong_type", f"{place} is a JSON {json_type(message)}, not an object with role and content"
            )
        if (reasoning := message.get("reasoning_content")) is not None:
            yield _passage(f"{place}.reasoning_content", reasoning)
        yield from _content_passages(f"{place}.content", message.get("content"))
        if (calls := message.get("tool_calls")) is not None:
            for call_place, call in _items(f"{place}.tool_calls", calls, "tool calls"):
                yield from (_passage(call_place, text) for text in _leaves(_arguments(call)))


def _content_passages(place: str, content: object) -> Iterator[Passage]:
    """Content is a string, null (of a message that only calls tools), or a list of parts with ``text``."""
    if isinstance(content, str):
        yield _passage(place, content)
    elif content is not None:
        for part_place, part in _items(place, content, "parts"):
            if isinstance(part, dict) and part.get("text") is not None:
                yield _passage(f"{part_place}.text", part["text"])


def _items(place: str, value: object, what: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, list):
        raise _Unusable("wrong_type", f"{place} is a JSON {json_type(value)}, not a list of {what}")
    return ((f"{place}.{number}", item) for number, item in enumerate(value))


def _arguments(call: object) -> object:
    """The arguments of a tool call, which stand in it or in its ``function``; None where there are none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _leaves(value: object) -> Iterator[str]:
    """All strings inside a value, in order, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)


def _passage(place: str, text: object) -> Passage:
    if not isinstance(text, str):
        raise _Unusable("wrong_type", f"{place} is a JSON {json_type(text)}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Unusable("invalid_utf8", f"{place} has a lone surrogate at character {error.start}") from None
    return Passage(place, text)


# ----------------------------------------------------------------------------------------- Parquet


def _read_parquet_rows(file: InputFile) -> Iterator[ReadItem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def bad(line: int | None, kind: BadKind, message: str) -> ReadItem:
        return ReadItem(BadDocument(file.name, line, kind, message), file.size)

    row = 0
    try:
        with open(file.path, "rb") as stream, pq.ParquetFile(stream) as table:
            schema, total = table.schema_arrow, table.metadata.num_rows
            repeated = {name for name in schema.names if schema.names.count(name) > 1}
            if repeated:
                yield bad(None, "duplicate_field", f"several columns are named {', '.join(sorted(repeated))}")
                return
            binary = [field.name for field in schema if _holds_binary(field.type)]
            if binary:
                message = f"bytes cannot be kept in JSON lines; leave out or decode the columns {', '.join(binary)}"
                yield bad(None, "wrong_type", message)
                return
            if total == 0:
                yield bad(None, "empty_file", "the file holds no row")
                return
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for record in _rows(batch):
                    row += 1
                    if record is None:
                        yield bad(row, "invalid_utf8", "a string of the row is not UTF-8")
                        continue
                    try:
                        payload = json.dumps(record, ensure_ascii=False, default=_as_text).encode()
                    except TypeError as error:
                        yield bad(row, "wrong_type", str(error))
                        continue
                    yield ReadItem(RawDocument(file.name, row, file.source, True, payload), file.size * row // total)
    except (pa.ArrowException, OSError) as error:
        message = f"cannot be read or is cut off: {error}; nothing after this point was read"
        yield bad(row + 1 if row else None, "damaged_file", message)


def _rows(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | None]:
    """The rows of a batch; None for one whose strings are not UTF-8, which pyarrow finds for the batch only."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for number in range(batch.num_rows) for row in _rows(batch.slice(number, 1))]


def _holds_binary(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return is_binary or any(_holds_binary(kind.field(number).type) for number in range(kind.num_fields))


def _as_text(value: object) -> str:
    """Dates, times and decimals, which JSON lacks, as text (ISO 8601)."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be kept in JSON lines")
