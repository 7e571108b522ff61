"""Metadata before documents: token by token against a slow reference, and what does not change without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from steptron.cli.main import app
from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.build import BAD_INPUT_FILE, BuildOptions, build_dataset
from steptron.data.dataset import TokenDataset
from steptron.data.encoding import metadata_text
from steptron.data.errors import DataError
from steptron.data.readers import BadDocument, Fields, find_files, read_file
from steptron.data.sources import open_source
from steptron.data.tokenizer import Tokenizer
from tests.data.corpora import build_small, varied_texts

NAMES = ("content_type", "language", "source")
FIELDS = Fields(metadata=NAMES)
MODES: tuple[Literal["in_loss", "context_only"], ...] = ("in_loss", "context_only")
Record = dict[str, Any]


def records(count: int = 40) -> list[Record]:
    """Documents with all, some, blank or no metadata, with spans and without."""
    found: list[Record] = []
    for number, text in enumerate(varied_texts(count)):
        record: Record = {"text": text}
        if number % 2:
            record |= {"content_type": ["code", "prose"][number % 4 // 2], "language": ["Grüße", None, " "][number % 3]}
        if number % 5 == 1:
            record["source"] = f"shelf {number}\nrow  2"
        if number % 3 == 0:
            record["masked_spans"] = [[0, 2]]
        found.append(record)
    return found


def expected_document(tokenizer: Tokenizer, record: Record) -> tuple[list[int], list[bool], int]:
    """Tokens, whether each is outside of masked spans, and how many are metadata, one by one."""
    lines = ""
    for name in NAMES:
        words = (record.get(name) or "").split()
        if words:
            lines += name + ": " + " ".join(words) + "\n"
    head = tokenizer.encode_batch([lines + "\n"])[0] if lines else []
    ids, offsets = tokenizer.encode_with_offsets(record["text"])
    hidden = {character for start, end in record.get("masked_spans", []) for character in range(start, end)}
    outside = [not hidden & set(range(start, end)) for start, end in offsets]
    return [*head, *ids, tokenizer.eod_id], [*[True] * len(head), *outside, True], len(head)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("metadata"), "d", records(), fields=FIELDS)


@pytest.mark.parametrize("mode", MODES)
def test_every_token_equals_the_slow_reference(folder: Path, mode: str) -> None:
    dataset = TokenDataset.open(folder, "train", metadata_counts=mode == "in_loss")
    tokenizer = Tokenizer.load(folder)
    heads = 0
    for number, record in enumerate(records()):
        tokens_T, counts_T = dataset.document(number)
        tokens, counts, head = expected_document(tokenizer, record)
        assert tokens_T.tolist() == tokens
        assert counts_T.tolist() == ([False] * head if mode == "context_only" else counts[:head]) + counts[head:]
        assert dataset.metadata_tokens(number) == head
        heads += head
    assert dataset.manifest.train.metadata_tokens == heads > 0
    assert dataset.manifest.metadata_fields == list(NAMES)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_modes_differ_in_the_targets_of_metadata_alone(folder: Path, packing: Any) -> None:
    datasets = [DatasetConfig(path=folder)]
    batches = []
    for mode in MODES:
        data = DataConfig(train=datasets, sequence_length=200, packing=packing, metadata=mode)
        batches.append(open_source(datasets, "train", data).micro_batch(0, 9))
    in_loss, context_only = batches
    assert in_loss.tokens_BS.equal(context_only.tokens_BS) and in_loss.labels_BS.equal(context_only.labels_BS)
    lost_BS = in_loss.loss_mask_BS & ~context_only.loss_mask_BS
    assert not (context_only.loss_mask_BS & ~in_loss.loss_mask_BS).any()
    heads = {}
    for record in records():
        tokens, _, head = expected_document(Tokenizer.load(folder), record)
        heads[tuple(tokens)] = head
    if packing == "best_fit":  # whole documents, whose metadata can be counted
        expected = 0
        for labels, documents in zip(in_loss.labels_BS.tolist(), in_loss.documents_BS.tolist(), strict=True):
            for number in range(max(documents) + 1):
                rest = tuple(label for label, own in zip(labels, documents, strict=True) if own == number)
                expected += next(max(head - 1, 0) for tokens, head in heads.items() if tokens[1:] == rest)
        assert int(lost_BS.sum()) == expected
    assert lost_BS.any()


@pytest.mark.parametrize("tokens", [1, 200, 201, 800, 10**9])
def test_metadata_leave_the_loss_after_so_many_tokens(folder: Path, tokens: int) -> None:
    datasets = [DatasetConfig(path=folder)]

    def masks(**options: Any) -> list[list[bool]]:
        data = DataConfig(train=datasets, sequence_length=200, **options)
        source = open_source(datasets, "train", data)
        # In two micro-batches: what counts depends on the sample, not on how samples are cut into batches.
        return [row for first in (0, 3) for row in source.micro_batch(first, 3).loss_mask_BS.tolist()]

    in_loss, context_only = masks(metadata="in_loss"), masks(metadata="context_only")
    before = -(-tokens // 200)
    assert masks(metadata_in_loss_tokens=tokens) == in_loss[:before] + context_only[before:]
    assert in_loss != context_only


def test_parquet_says_the_same_as_jsonl(folder: Path, tmp_path: Path) -> None:
    names = ("text", "masked_spans", *NAMES)
    columns = {name: [record.get(name) for record in records()] for name in names}
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    table = table.set_column(2, "content_type", table["content_type"].dictionary_encode())
    pq.write_table(table, tmp_path / "d.parquet")
    options = BuildOptions(
        [tmp_path / "d.parquet"], tmp_path / "d", tokenizer=folder, validation_fraction=0.0, fields=FIELDS
    )
    result = build_dataset(options)
    assert result.bad.total == 0
    for name in ("train.bin", "train.idx", "train.loss_mask.bin", "train.loss_mask.idx"):
        assert (tmp_path / "d" / name).read_bytes() == (folder / name).read_bytes()


def test_nothing_changes_where_the_option_is_not_used(tmp_path: Path) -> None:
    """Also what a manifest says, so that those of datasets without metadata are as they always were."""
    plain = [{key: record[key] for key in ("text", "masked_spans") if key in record} for record in records()]
    build_small(tmp_path, "without", plain)
    build_small(tmp_path, "ignored", records())
    build_small(tmp_path, "absent", plain, fields=FIELDS)
    files = sorted(path.name for path in (tmp_path / "without").iterdir())
    for name in ("ignored", "absent"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == files
        for file in set(files) - {"dataset.json"}:
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    manifest = json.loads((tmp_path / "without" / "dataset.json").read_text())
    assert "metadata" not in json.dumps(manifest)
    assert json.loads((tmp_path / "absent" / "dataset.json").read_text())["train"] == manifest["train"]
    assert set(np.fromfile(tmp_path / "without" / "train.loss_mask.bin", np.uint8)) == {0, 1}


def test_the_split_is_decided_by_the_text_alone(tmp_path: Path) -> None:
    with_metadata = build_small(tmp_path, "with", records(200), fields=FIELDS, validation_fraction=0.3)
    without = build_small(tmp_path, "without", records(200), validation_fraction=0.3)
    opened = [TokenDataset.open(path, "validation") for path in (with_metadata, without)]
    assert opened[0].num_documents == opened[1].num_documents > 20
    for number in range(opened[0].num_documents):
        (tokens_T, _), (text_T, _) = (dataset.document(number) for dataset in opened)
        np.testing.assert_array_equal(tokens_T[opened[0].metadata_tokens(number) :], text_T)


def test_bytes_per_token_counts_what_the_loss_counts(folder: Path) -> None:
    heads = [metadata_text((name, record[name]) for name in NAMES if record.get(name)) for record in records()]
    text = tokens = hidden_bytes = 0
    for record in records():
        _, counts, head = expected_document(Tokenizer.load(folder), record)
        _, offsets = Tokenizer.load(folder).encode_with_offsets(record["text"])
        tokens += sum(counts)
        carried = {
            character
            for (start, end), is_counted in zip(offsets, counts[head:], strict=False)
            if not is_counted
            for character in range(start, end)
        }
        hidden_bytes += sum(len(record["text"][character].encode()) for character in carried)
        text += len(record["text"].encode())
    assert 0 < hidden_bytes < text == TokenDataset.open(folder, "train").manifest.train.bytes
    text -= hidden_bytes
    datasets = [DatasetConfig(path=folder)]
    metadata_tokens = TokenDataset.open(folder, "train").manifest.train.metadata_tokens
    assert metadata_tokens is not None
    for mode, expected in (
        ("in_loss", (text + sum(len(head.encode()) for head in heads)) / tokens),
        ("context_only", text / (tokens - metadata_tokens)),
    ):
        data = DataConfig(train=datasets, sequence_length=64, metadata=mode)  # type: ignore[arg-type]
        assert open_source(datasets, "train", data).bytes_per_token == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "about, text",
    [
        ([], ""),
        ([("source", " \n ")], ""),
        ([("language", "de"), ("source", "a\n\nb: c")], "language: de\nsource: a b: c\n\n"),
    ],
)
def test_a_value_cannot_end_its_line(about: list[tuple[str, str]], text: str) -> None:
    assert metadata_text(about) == text


def test_special_tokens_in_values_are_ordinary_text(tmp_path: Path) -> None:
    folder = build_small(tmp_path, "d", [{"text": "x", "source": "<|endoftext|>"}], fields=FIELDS)
    tokens_T, _ = TokenDataset.open(folder, "train").document(0)
    assert tokens_T.tolist().count(0) == 1


@pytest.mark.parametrize(
    "value, message",
    [
        ("3", "field 'source': a JSON number, not a string"),
        ('["a"]', "field 'source': a JSON array, not a string"),
        ('"\\ud800"', "field 'source': a lone surrogate at character 0"),
    ],
)
def test_values_of_other_types_are_bad_documents(tmp_path: Path, value: str, message: str) -> None:
    lines = ['{"text": "fine"}', f'{{"text": "not", "source": {value}}}']
    folder = build_small(tmp_path, "d", lines, fields=FIELDS, max_bad_fraction=0.6)  # type: ignore[arg-type]
    report = json.loads((folder / BAD_INPUT_FILE).read_text())
    assert (report["line"], report["kind"], report["message"]) == (2, "wrong_type", message)


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "source": [1]}), tmp_path / "d.parquet")
    files, _ = find_files([tmp_path / "d.parquet"])
    (item,) = read_file(files[0], FIELDS)
    assert item.document == BadDocument(files[0].name, None, "wrong_type", "column 'source' is int64, not string")


@pytest.mark.parametrize("names", ["a,,b", "a,a", "text", "masked_spans,a"])
def test_names_must_be_names(tmp_path: Path, names: str) -> None:
    with pytest.raises(DataError, match=f"--metadata-fields {names}: names that are separated by commas"):
        build_small(tmp_path, "d", [{"text": "x"}], fields=Fields(metadata=tuple(names.split(","))))


def test_leaving_metadata_out_of_the_loss_needs_metadata(folder: Path, tmp_path: Path) -> None:
    plain = build_small(tmp_path, "d", [{"text": text} for text in varied_texts(20)])
    datasets = [DatasetConfig(path=plain)]
    data = DataConfig(train=datasets, sequence_length=16, metadata="context_only")
    with pytest.raises(DataError, match=r"data\.metadata is context_only, but no training dataset has metadata"):
        open_source(datasets, "train", data)
    # Some of a blend may have none.
    tokenizer_of_both = build_small(tmp_path, "e", records(), fields=FIELDS)
    open_source([*datasets, DatasetConfig(path=tokenizer_of_both)], "train", data).micro_batch(0, 4)


def test_inspect_shows_metadata_apart(folder: Path) -> None:
    result = CliRunner().invoke(app, ["data", "inspect", str(folder), "--documents", "2"])
    assert result.exit_code == 0, result.output
    assert "⟪content_type: code\nsource: shelf 1 row 2\n\n⟫1: " in result.output
    assert "⟦0:⟧ " in result.output


def test_build_takes_names_from_the_command_line(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "x", "language": "de", "source": "s"}\n')
    arguments = ["--output", str(tmp_path / "d"), "--tokenizer", str(folder), "--validation-fraction", "0"]
    result = CliRunner().invoke(
        app, ["data", "build", str(tmp_path / "in.jsonl"), *arguments, "--metadata-fields", "source,language"]
    )
    assert result.exit_code == 0, result.output
    tokens_T, _ = TokenDataset.open(tmp_path / "d", "train").document(0)
    assert Tokenizer.load(folder).decode(tokens_T[:-1].tolist()) == "source: s\nlanguage: de\n\nx"
