"""Whole runs: nothing is lost or changed, whatever the number of workers; bad input; what is left at the output."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from steptron.data.build import TooManyBadDocuments
from steptron.data.errors import DataError
from steptron.data.filters.config import load_filters
from steptron.data.filters.run import FilterOptions, FilterResult, filter_corpus
from tests.data.corpora import save_tokenizer, varied_texts, write_jsonl
from tests.data.filters.documents import kept_lines, removed_records, write_config


def _run(
    folder: Path, inputs: list[Path], filters: dict[str, Any], output: str = "out", **options: Any
) -> FilterResult:
    config = load_filters(write_config(folder / "filter.yaml", filters=filters))
    return filter_corpus(FilterOptions(inputs, folder / output, config, **options))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of file, some documents of them to be removed and some bad."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = varied_texts(1500)
    write_jsonl(folder / "a.jsonl", [{"id": n, "text": text} for n, text in enumerate(texts[:1200])] + ["{broken"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text":"a b c d e"}\n{"text":"x"}\n', mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"text":"z st and ard"}\n{"no":"text"}\n'))
    (folder / "d.md").write_text("a whole file of text\n")
    pq.write_table(pa.table({"text": texts[1200:], "n": range(300)}), folder / "e.parquet")
    return folder


def test_the_files_do_not_depend_on_the_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    filters = {"length": {"min_words": 5}, "repetition": {"repeated_lines": None}}
    results = [_run(tmp_path, [corpus], filters, f"out{workers}", workers=workers) for workers in (1, 2)]
    assert _files(tmp_path / "out1") == _files(tmp_path / "out2")
    assert {"bad_input.jsonl", "report.json", "report.md", "removed.jsonl.zst"} < set(_files(tmp_path / "out1"))
    report = results[0].report
    assert report.kept.documents + report.removed.documents + results[0].bad.total == 1200 + 1 + 2 + 2 + 1 + 300
    assert report.removed.documents == len(removed_records(tmp_path / "out1")) > 100
    assert report.kept.documents == len(kept_lines(tmp_path / "out1"))
    record = json.loads((tmp_path / "out1" / "report.json").read_text())
    assert record["bad_kinds"] == {"invalid_json": 1, "missing_field": 1}
    assert sum(file["kept"]["documents"] for file in record["files"].values()) == report.kept.documents
    by_filter = {each["name"]: each["removed"]["documents"] for each in record["filters"]}
    assert sum(by_filter.values()) == report.removed.documents
    assert "few_words" in (tmp_path / "out1" / "report.md").read_text()


_LINES = st.lists(
    st.one_of(
        st.builds(lambda text: json.dumps({"text": text, "extra": [1, {"a": None}]}), st.text(max_size=8)),
        st.sampled_from(
            ["{broken", "[1]", '{"text": 3}', '{"text": "\\ud800"}', '{"messages": [{"content": "a b c"}]}']
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(lines=_LINES, shard_bytes=st.integers(1, 80))
def test_nothing_is_lost_doubled_or_changed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("property")
    source = write_jsonl(folder / "in.jsonl", lines)
    filters = {"length": {"min_characters": 3}}
    try:
        result = _run(folder, [source], filters, shard_bytes=shard_bytes, max_bad_fraction=1.0)
    except TooManyBadDocuments as error:
        assert error.bad.total == len(lines)  # there is no document
        return
    output = folder / "out"
    kept = [line.decode() for line in kept_lines(output)]
    removed = {record["line"]: record["record"] for record in removed_records(output)}
    bad = result.bad.path.read_text().splitlines() if result.bad.total else []
    bad_lines = {json.loads(line)["line"] for line in bad}
    assert len(kept) + len(removed) + len(bad) == len(lines)
    assert kept == [
        line for number, line in enumerate(lines, start=1) if number not in removed and number not in bad_lines
    ]
    assert all(record == json.loads(lines[number - 1]) for number, record in removed.items())
    assert all(len(record["text"]) < 3 for record in removed.values())


def test_every_field_of_a_kept_record_is_preserved(tmp_path: Path) -> None:
    line = '{"b": 1.50, "text":"\\u00e9 kept text",  "masked_spans": [[0, 2]], "big": 12345678901234567890, "b": 2}'
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y"}}}]},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", [line])
    table = pa.table(
        {
            "text": pa.array([None, "a row"]),
            "messages": pa.array([[{"role": "user", "content": "hello"}], None]),
            "when": pa.array([0, 1], pa.timestamp("s")),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages, "tools": []}])
    (tmp_path / "in.txt").write_text("a text\n")
    inputs = [source, tmp_path / "in.parquet", chat, tmp_path / "in.txt"]
    _run(tmp_path, inputs, {"length": {"min_characters": 1}})
    kept = kept_lines(tmp_path / "out")
    assert kept[0].decode() == line
    assert [json.loads(record) for record in kept[1:]] == [
        {"text": None, "messages": [{"role": "user", "content": "hello"}], "when": "1970-01-01T00:00:00"},
        {"text": "a row", "messages": None, "when": "1970-01-01T00:00:01"},
        {"messages": messages, "tools": []},
        {"text": "a text\n"},
    ]


def test_all_texts_of_a_conversation_are_judged(tmp_path: Path) -> None:
    calls = [{"id": "1", "function": {"name": "run", "arguments": {"code": ["print(1)"]}}}]
    parts = [{"type": "image", "url": "x"}, {"type": "text", "text": "see"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "reasoning_content": "hm", "content": None, "tool_calls": calls},
    ]
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"talk": messages}, {"talk": []}, {"talk": [1]}, {"talk": [{"content": 1}]}]
    )
    config = write_config(tmp_path / "c.yaml", filters={"length": {"max_characters": 12}}, messages_field="talk")
    options = FilterOptions([source], tmp_path / "out", load_filters(config), max_bad_fraction=1.0)
    result = filter_corpus(options)
    assert removed_records(tmp_path / "out")[0]["detail"] == "13 characters (at most 12)"  # see, hm, print(1)
    bad = [json.loads(line) for line in result.bad.path.read_text().splitlines()]
    assert [(each["line"], each["kind"], each["message"]) for each in bad] == [
        (2, "empty_document", "the text is empty"),
        (3, "wrong_type", "talk.0 is a JSON number, not an object with role and content"),
        (4, "wrong_type", "talk.0.content is a JSON number, not a list of parts"),
    ]


def test_parquet_that_cannot_be_kept_is_bad(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "image": [b"\xff"]}), tmp_path / "bytes.parquet")
    strings = pa.array([b"good", b"\xff\xfe", b"good too"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), tmp_path / "strings.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "strings.parquet").read_bytes()[:50])
    result = _run(tmp_path, [tmp_path], {"length": {}}, max_bad_fraction=1.0, pattern="*.parquet")
    assert kept_lines(tmp_path / "out") == [b'{"text": "good"}', b'{"text": "good too"}']
    bad = [json.loads(line) for line in result.bad.path.read_text().splitlines()]
    assert [(Path(each["file"]).name, each["line"], each["kind"]) for each in bad] == [
        ("bytes.parquet", None, "wrong_type"),
        ("cut.parquet", None, "damaged_file"),
        ("numbers.parquet", 1, "wrong_type"),
        ("numbers.parquet", 2, "wrong_type"),
        ("strings.parquet", 2, "invalid_utf8"),
    ]
    assert bad[0]["message"] == "bytes cannot be kept in JSON lines; leave out or decode the columns image"


def test_a_sample_of_the_removed_records(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a" * size} for size in (1, 9, 1, 5, 9, 1)])
    filters = {"length": {"min_characters": 2, "max_characters": 6}}
    result = _run(tmp_path, [source], filters, keep_removed=1)
    assert [record["line"] for record in removed_records(tmp_path / "out")] == [1, 2]
    assert result.report.removed.documents == 5


def test_too_many_bad_documents_leave_only_their_list(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["{broken"] + [{"text": "good"}] * 9)
    with pytest.raises(TooManyBadDocuments, match=r"1 of 10 documents are bad \(10.00%\), more than"):
        _run(tmp_path, [source], {"length": {}}, max_bad_fraction=0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["filter.yaml", "in.jsonl", "out.bad_input.jsonl"]
    _run(tmp_path, [source], {"length": {}}, max_bad_fraction=0.1)


def test_what_is_at_the_output(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "good"}])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="is not the output of a filter run"):
        _run(tmp_path, [source], {"length": {}}, force=True)
    (tmp_path / "out").rmdir()
    _run(tmp_path, [source], {"length": {}})
    with pytest.raises(DataError, match="replace it with --force"):
        _run(tmp_path, [source], {"length": {}})
    _run(tmp_path, [source], {"length": {"min_characters": 5}}, force=True)
    assert kept_lines(tmp_path / "out") == []


def _command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_command_and_building_on_what_it_kept(corpus: Path, tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "configs" / "data" / "filter.yaml"
    out = tmp_path / "out"
    filtered = _command("filter", corpus, "--config", config, "--output", out, "--workers", 1)
    assert filtered.exit_code == 0, filtered.output
    assert "few_characters" in filtered.stdout
    assert "1 × invalid_json" in filtered.stdout
    kept = len(kept_lines(out))
    built = _command("build", out / "kept", "--output", tmp_path / "d", "--tokenizer", save_tokenizer(tmp_path / "t"))
    assert built.exit_code == 0, built.output
    manifest = json.loads((tmp_path / "d" / "dataset.json").read_text())
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == kept
    # What was removed does not become a dataset by accident.
    removed = ("build", out / "removed.jsonl.zst", "--output", tmp_path / "e", "--tokenizer", tmp_path / "t")
    assert _command(*removed).exit_code == 2
