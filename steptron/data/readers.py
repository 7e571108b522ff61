"""From inputs on disk to raw documents: which files are read, in what order, and how they are opened.

Reading is sequential and cheap; parsing and tokenizing (``encoding.py``) is what is spread over
processes.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, NoReturn, cast

import zstandard

from steptron.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_PROSE = "txt text md markdown rst tex org adoc html htm xml csv tsv log"
_CODE = (
    "py pyi pyx c h cc cpp cxx hpp hh cu cuh rs go java kt scala swift js jsx ts tsx mjs rb php pl lua r jl hs ml clj "
    "ex exs erl sh bash zsh sql cs fs m mm f90 f asm s v sv vhd proto yaml yml toml ini cfg cmake css scss vue tcl "
    "lisp el scm zig dart nim"
)
TEXT_EXTENSIONS = frozenset(f".{name}" for name in f"{_PROSE} {_CODE}".split())
JSONL_EXTENSIONS = frozenset({".jsonl", ".ndjson"})
PARQUET_EXTENSIONS = frozenset({".parquet"})
_COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd"}
_CHUNK = 1 << 20
_READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)

BadKind = Literal[
    "invalid_json",
    "invalid_utf8",
    "empty_file",
    "empty_document",
    "missing_field",
    "duplicate_field",
    "wrong_type",
    "bad_spans",
    "damaged_file",
]


@dataclass(frozen=True)
class InputFile:
    """A file to read; ``source`` is the number of the INPUT it came from."""

    path: Path
    format: Literal["text", "jsonl", "parquet"]
    compression: Literal["gzip", "zstd"] | None
    size: int
    source: int

    @property
    def name(self) -> str:
        """The path as it is recorded."""
        return recorded_name(self.path)


@dataclass(frozen=True)
class RawDocument:
    """An unparsed document.

    Attributes:
        file: the file it stands in.
        line: line (JSONL) or row (Parquet), from 1; None for a file that is one document.
        source: number of the INPUT.
        is_json: whether ``payload`` is a JSON line rather than the text itself.
        payload: UTF-8 text, or the JSON line.
        spans: value of the spans column (Parquet).
        metadata: values of the metadata columns that there are, by name, in the order asked for (Parquet).
    """

    file: str
    line: int | None
    source: int
    is_json: bool
    payload: bytes
    spans: object = None
    metadata: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class BadDocument:
    """Something in the input that could not become a document."""

    file: str
    line: int | None
    kind: BadKind
    message: str


@dataclass(frozen=True)
class ReadItem:
    """A raw or bad document, and the bytes of its file that were read up to it."""

    document: RawDocument | BadDocument
    file_bytes_read: int


@dataclass(frozen=True)
class Fields:
    """Names of the fields (JSONL) or columns (Parquet) of text, masked spans and metadata."""

    text: str = "text"
    spans: str = "masked_spans"
    metadata: tuple[str, ...] = ()


def recorded_name(path: Path) -> str:
    """A path as text for reports and manifests: bytes of it that are not UTF-8 become ``\\xNN``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find_files(inputs: list[Path], pattern: str | None = None) -> tuple[list[InputFile], int]:
    """Lists the files of all inputs, in the order in which they are read: by input, then by path.

    A folder is searched recursively; names that begin with a dot are left out. JSONL and Parquet
    files are told by their extension (and ``.gz``, ``.zst`` after it), everything else is one
    document per file. In a folder only known extensions are read, or, with ``pattern``, only files
    whose path below the folder or whose name matches it. A file named as input is always read.

    Returns:
        The files, and the number of files in folders that were left out.

    Raises:
        DataError: an input does not exist, or there is nothing to read.
        OSError: a folder cannot be listed.
    """
    files: list[InputFile] = []
    left_out = 0
    for source, given in enumerate(inputs):
        if given.is_file():
            files.append(_input_file(given, source))
        elif given.is_dir():
            for path in _walk(given):
                if _is_wanted(path, given, pattern):
                    files.append(_input_file(path, source))
                else:
                    left_out += 1
        else:
            raise DataError(f"{given}: no such file or folder")
    if not files:
        names = ", ".join(str(given) for given in inputs)
        reason = f"no file matches {pattern!r}" if pattern else "no file has a known extension; name them with --glob"
        raise DataError(f"{names}: nothing to read ({left_out} files left out: {reason})")
    return files, left_out


def read_file(file: InputFile, fields: Fields) -> Iterator[ReadItem]:
    """Yields the documents of a file in order; what cannot be read comes as ``BadDocument``, never as an exception."""
    reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}[file.format]
    return reader(file, fields)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _raise(error: OSError) -> NoReturn:
    """A folder that cannot be listed is no empty folder."""
    raise error


def _is_wanted(path: Path, folder: Path, pattern: str | None) -> bool:
    if pattern is not None:
        return fnmatch.fnmatch(str(path.relative_to(folder)), pattern) or fnmatch.fnmatch(path.name, pattern)
    return _extension(path) in TEXT_EXTENSIONS | JSONL_EXTENSIONS | PARQUET_EXTENSIONS


def _extension(path: Path) -> str:
    """Extension in lower case, without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSIONS else suffix


def _input_file(path: Path, source: int) -> InputFile:
    extension = _extension(path)
    compression = _COMPRESSIONS.get(path.suffix.lower())
    if extension in PARQUET_EXTENSIONS and compression is None:
        return InputFile(path, "parquet", None, path.stat().st_size, source)
    kind: Literal["jsonl", "text"] = "jsonl" if extension in JSONL_EXTENSIONS else "text"
    return InputFile(path, kind, compression, path.stat().st_size, source)


def _read_text(file: InputFile, fields: Fields) -> Iterator[ReadItem]:
    try:
        with _open_decompressed(file) as (stream, _):
            payload = stream.read()
    except _READ_ERRORS as error:
        yield ReadItem(_damaged(file, None, error), file.size)
        return
    if not payload:
        yield ReadItem(BadDocument(file.name, None, "empty_file", "the file is empty"), file.size)
        return
    yield ReadItem(RawDocument(file.name, None, file.source, False, payload), file.size)


def _read_jsonl(file: InputFile, fields: Fields) -> Iterator[ReadItem]:
    line_number = 0
    is_empty = True
    name = file.name  # made of the path each time it is asked for
    try:
        with _open_decompressed(file) as (stream, compressed):
            for line_number, line in enumerate(stream, start=1):
                if line_number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.isspace() or not line:
                    continue
                is_empty = False
                yield ReadItem(
                    RawDocument(name, line_number, file.source, True, line), min(compressed.tell(), file.size)
                )
    except _READ_ERRORS as error:
        yield ReadItem(_damaged(file, line_number + 1, error), file.size)
        return
    if is_empty:
        yield ReadItem(BadDocument(file.name, None, "empty_file", "the file holds no line"), file.size)


def _read_parquet(file: InputFile, fields: Fields) -> Iterator[ReadItem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def bad(line: int | None, kind: BadKind, message: str) -> ReadItem:
        return ReadItem(BadDocument(file.name, line, kind, message), file.size)

    row = 0
    try:
        # A stream, for pyarrow takes no path that is not UTF-8.
        with open(file.path, "rb") as stream, pq.ParquetFile(stream) as table:
            names = table.schema_arrow.names
            for name in (fields.text, fields.spans, *fields.metadata):
                if names.count(name) > 1:
                    yield bad(None, "duplicate_field", f"{names.count(name)} columns are named {name!r}")
                    return
            if fields.text not in names:
                yield bad(None, "missing_field", f"no column {fields.text!r}; the columns are {', '.join(names)}")
                return
            metadata = [name for name in fields.metadata if name in names]
            for name in (fields.text, *metadata):
                kind = table.schema_arrow.field(name).type
                if not (_holds_text(kind) or (name in metadata and pa.types.is_null(kind))):
                    yield bad(None, "wrong_type", f"column {name!r} is {kind}, not string")
                    return
            if fields.spans in names and not _holds_spans(table.schema_arrow.field(fields.spans).type):
                found = table.schema_arrow.field(fields.spans).type
                yield bad(None, "wrong_type", f"column {fields.spans!r} is {found}, not lists of [start, end]")
                return
            if table.metadata.num_rows == 0:
                yield bad(None, "empty_file", "the file holds no row")
                return
            columns = [name for name in (fields.text, fields.spans, *metadata) if name in names]
            for batch in table.iter_batches(batch_size=256, columns=columns):
                # As bytes, so that invalid UTF-8 is found row by row instead of failing the batch.
                texts = batch.column(fields.text).cast(pa.large_string(), safe=False).cast(pa.large_binary())
                spans = batch.column(fields.spans).to_pylist() if fields.spans in columns else [None] * len(texts)
                values = [_as_texts(batch.column(name)) for name in metadata]
                for number, (payload, row_spans) in enumerate(zip(texts.to_pylist(), spans, strict=True)):
                    row += 1
                    if payload is None:
                        yield bad(row, "missing_field", f"column {fields.text!r} is null")
                        continue
                    position = file.size * row // table.metadata.num_rows
                    about = tuple((name, own[number]) for name, own in zip(metadata, values, strict=True))
                    document = RawDocument(file.name, row, file.source, False, payload, row_spans, about)
                    yield ReadItem(document, position)
    except (pa.ArrowException, *_READ_ERRORS) as error:
        yield ReadItem(_damaged(file, row + 1 if row else None, error), file.size)


def _holds_text(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_texts(column: pyarrow.Array) -> list[object]:
    """Values of a column of text; what is no UTF-8 comes as bytes."""
    import pyarrow as pa

    def decoded(value: bytes | None) -> str | bytes | None:
        try:
            return None if value is None else value.decode("utf-8")
        except UnicodeDecodeError:
            return value

    return [decoded(value) for value in column.cast(pa.large_string(), safe=False).cast(pa.large_binary()).to_pylist()]


def _holds_spans(kind: pyarrow.DataType, depth: int = 2) -> bool:
    """Whether an Arrow type is one of lists of lists of whole numbers; null, as of empty lists, may stand for any."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return True
    if depth == 0:
        return bool(pa.types.is_integer(kind))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and _holds_spans(kind.value_type, depth - 1)


def _damaged(file: InputFile, line: int | None, error: Exception) -> BadDocument:
    what = "compressed data is damaged or cut off" if file.compression else "cannot be read or is cut off"
    return BadDocument(file.name, line, "damaged_file", f"{what}: {error}; nothing after this point was read")


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a .zst file of any number of frames.

    zstandard's own ``stream_reader`` ends silently when a frame is cut off; this raises EOFError.
    """

    def __init__(self, compressed: IO[bytes]) -> None:
        self._compressed = compressed
        # Frames written with --long=31 need a window of 2 GiB.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame = self._decompressor.decompressobj()
        self._inside_frame = False
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer)).cast("B")
        while not self._pending:
            data = self._frame.unused_data if self._frame.eof else b""
            data = data or self._compressed.read(_CHUNK)
            if not data:
                if self._inside_frame and not self._frame.eof:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._inside_frame = True
            self._pending = self._frame.decompress(data)
        count = min(len(view), len(self._pending))
        view[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


class _open_decompressed:
    """Context: the decompressed stream of a file, and the file itself (to tell how far it was read)."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def __enter__(self) -> tuple[IO[bytes], IO[bytes]]:
        self._compressed = open(self._file.path, "rb")
        if self._file.compression == "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=self._compressed)), self._compressed
        if self._file.compression == "zstd":
            return cast(IO[bytes], io.BufferedReader(_ZstdStream(self._compressed), _CHUNK)), self._compressed
        return self._compressed, self._compressed

    def __exit__(self, *exc_info: object) -> None:
        self._compressed.close()
