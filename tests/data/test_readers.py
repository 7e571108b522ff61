"""Which files are read, in which order, and what becomes of broken ones."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from steptron.data.errors import DataError
from steptron.data.readers import BadDocument, Fields, RawDocument, find_files, read_file


def _read(path: Path) -> list[RawDocument | BadDocument]:
    files, _ = find_files([path])
    return [item.document for file in files for item in read_file(file, Fields())]


def _lines(path: Path) -> list[int | None]:
    return [document.line for document in _read(path) if isinstance(document, RawDocument)]


def _bad(path: Path) -> list[tuple[str, int | None, str]]:
    return [
        (Path(document.file).name, document.line, document.kind)
        for document in _read(path)
        if isinstance(document, BadDocument)
    ]


def _jsonl(count: int, filler: int = 0) -> bytes:
    # Incompressible enough that half of the compressed file holds many lines.
    return b"".join(
        json.dumps({"text": f"{number} {hash((number, filler)):x}" * 40}).encode() + b"\n" for number in range(count)
    )


def test_a_folder_is_read_recursively_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/y.md", "a/unknown.bin", ".git/config.txt", "a/.hidden.txt", "A.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files, left_out = find_files([tmp_path])
    assert [str(file.path.relative_to(tmp_path)) for file in files] == ["A.TXT", "b.txt", "a/y.md", "a/z.py"]
    assert left_out == 1
    assert all(file.format == "text" for file in files)


def test_glob_replaces_the_known_extensions(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.bin", "a/y.bin", "c/x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(pattern: str) -> list[str]:
        return [str(file.path.relative_to(tmp_path)) for file in find_files([tmp_path], pattern)[0]]

    assert names("*.bin") == ["a/y.bin", "a/z.bin", "c/x.bin"]
    assert names("a/*") == ["a/y.bin", "a/z.bin"]
    with pytest.raises(DataError, match=r"nothing to read \(4 files left out: no file matches '\*\.json'\)"):
        find_files([tmp_path], "*.json")


def test_missing_and_empty_inputs_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="nothing to read"):
        find_files([tmp_path])


def test_formats_are_told_by_extension(tmp_path: Path) -> None:
    names = {
        "a.jsonl": ("jsonl", None),
        "b.jsonl.gz": ("jsonl", "gzip"),
        "c.ndjson.zst": ("jsonl", "zstd"),
        "d.parquet": ("parquet", None),
        "e.txt.gz": ("text", "gzip"),
        "f.rst": ("text", None),
    }
    for name in names:
        (tmp_path / name).touch()
    files, _ = find_files([tmp_path])
    assert {file.path.name: (file.format, file.compression) for file in files} == names


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("c.jsonl", lambda data: data),
        ("c.jsonl.gz", gzip.compress),
        ("c.jsonl.gz", lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:])),
        ("c.jsonl.zst", lambda data: zstandard.ZstdCompressor().compress(data)),
        (
            "c.jsonl.zst",  # several frames, one of them empty
            lambda data: b"".join(
                zstandard.ZstdCompressor().compress(part) for part in (data[:5000], b"", data[5000:])
            ),
        ),
    ],
)
def test_compressed_lines_equal_plain_ones(tmp_path: Path, name: str, compress: Callable[[bytes], bytes]) -> None:
    data = _jsonl(50)
    (tmp_path / name).write_bytes(compress(data))
    documents = _read(tmp_path / name)
    assert [document.payload for document in documents if isinstance(document, RawDocument)] == data.splitlines(True)
    assert _lines(tmp_path / name) == list(range(1, 51))


@pytest.mark.parametrize(
    ("name", "compress"),
    [("c.jsonl.gz", gzip.compress), ("c.jsonl.zst", lambda data: zstandard.ZstdCompressor().compress(data))],
)
def test_cut_off_compressed_files_are_reported_after_their_last_whole_line(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    whole = compress(_jsonl(20_000))
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) * 2 // 3])
    good = _lines(path)
    assert good == list(range(1, len(good) + 1)) and 0 < len(good) < 20_000
    assert _bad(path) == [(name, len(good) + 1, "damaged_file")]
    # Only the last byte missing: still noticed.
    path.write_bytes(whole[:-1])
    assert [kind for _, _, kind in _bad(path)] == ["damaged_file"]
    # Not compressed data at all.
    path.write_bytes(b"plain text, wrongly named\n")
    assert _bad(path) == [(name, 1, "damaged_file")]


def test_cut_off_compressed_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-5])
    assert _bad(tmp_path / "a.txt.gz") == [("a.txt.gz", None, "damaged_file")]


def test_empty_files_are_reported(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        assert _bad(tmp_path / name) == [(name, None, "empty_file")]


def test_blank_lines_and_a_byte_order_mark_are_passed_over_and_lines_still_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert _lines(tmp_path / "a.jsonl") == [1, 4]
    assert json.loads(_read(tmp_path / "a.jsonl")[0].payload) == {"text": "a"}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_rows_with_spans(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", "zwei 漢", None, "four"]
    spans = [None, [[0, 2], [3, 4]], None, []]
    table = pa.table({"id": range(4), "text": pa.array(texts, pa.string()).cast(kind), "masked_spans": spans})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    documents = _read(tmp_path / "a.parquet")
    assert [document.payload.decode() for document in documents if isinstance(document, RawDocument)] == [
        "one",
        "zwei 漢",
        "four",
    ]
    assert [document.spans for document in documents if isinstance(document, RawDocument)] == [
        None,
        [[0, 2], [3, 4]],
        [],
    ]
    assert _lines(tmp_path / "a.parquet") == [1, 2, 4]
    assert _bad(tmp_path / "a.parquet") == [("a.parquet", 3, "missing_field")]


def test_unusable_parquet_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"]}), path)
    assert _bad(path) == [("a.parquet", None, "missing_field")]
    assert "the columns are body" in _read(path)[0].message  # type: ignore[union-attr]
    pq.write_table(pa.table({"text": [1, 2]}), path)
    assert _bad(path) == [("a.parquet", None, "wrong_type")]
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert _bad(path) == [("a.parquet", None, "empty_file")]
    pq.write_table(pa.table({"text": ["x" * 100] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert _bad(path) == [("a.parquet", None, "damaged_file")]
    path.write_bytes(b"")
    assert _bad(path) == [("a.parquet", None, "damaged_file")]


def test_names_that_are_no_utf8_are_recorded_escaped(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.parquet")
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(path)
    assert [document.file for document in _read(path)] == [f"{tmp_path}/\\xff.parquet"] * 2
    assert _lines(path) == [1]


@pytest.mark.parametrize("name", ["text", "masked_spans"])
def test_parquet_columns_of_the_same_name_are_refused(tmp_path: Path, name: str) -> None:
    texts, spans = pa.array(["x"]), pa.array([[[0, 1]]])
    columns = {"text": [texts], "masked_spans": [spans], name: [texts if name == "text" else spans] * 2}
    flat = [(key, column) for key, values in columns.items() for column in values]
    table = pa.Table.from_arrays([column for _, column in flat], [key for key, _ in flat])
    pq.write_table(table, tmp_path / "a.parquet")
    assert _bad(tmp_path / "a.parquet") == [("a.parquet", None, "duplicate_field")]
    assert f"2 columns are named '{name}'" in _read(tmp_path / "a.parquet")[0].message  # type: ignore[union-attr]


INT = pa.int32()


@pytest.mark.parametrize(
    ("kind", "usable"),
    [
        (pa.list_(pa.list_(INT)), True),
        (pa.large_list(pa.list_(pa.uint8(), 2)), True),
        (pa.list_(pa.null()), True),
        (pa.null(), True),
        (pa.list_(INT), False),
        (pa.list_(pa.list_(pa.float32())), False),
        (pa.timestamp("ns"), False),
        (pa.binary(), False),
        (pa.struct([("start", INT)]), False),
        (pa.dictionary(INT, pa.string()), False),
    ],
)
def test_columns_of_spans_need_a_type_that_holds_them(tmp_path: Path, kind: pa.DataType, usable: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "masked_spans": pa.array([None], pa.null()).cast(kind)}), path)
    assert _bad(path) == ([] if usable else [("a.parquet", None, "wrong_type")])
    assert _lines(path) == ([1] if usable else [])


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        find_files([tmp_path])


def test_parquet_with_damaged_pages_keeps_the_rows_before_them(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} {hash((number, 1)):x}" * 20 for number in range(3000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=500, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = b"\xff" * 2000
    path.write_bytes(content)
    good = _lines(path)
    assert good == list(range(1, len(good) + 1)) and 500 <= len(good) < 3000
    assert _bad(path) == [("a.parquet", len(good) + 1, "damaged_file")]


def test_invalid_utf8_in_a_parquet_row_reaches_the_parser_as_bytes(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"b\xffd", b"fine"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    payloads = [document.payload for document in _read(tmp_path / "a.parquet")]  # type: ignore[union-attr]
    assert payloads == [b"good", b"b\xffd", b"fine"]


def test_an_unreadable_file_is_reported_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    files, _ = find_files([path])
    path.unlink()
    document = next(iter(read_file(files[0], Fields()))).document
    assert isinstance(document, BadDocument)
    assert document.kind == "damaged_file"
    assert "No such file" in document.message
