"""Datasets of conversations: what is in the folder, whatever the number of workers, and what stops a build."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from steptron.data.chat.build import ChatBuildOptions, ChatBuildResult, build_chat_dataset
from steptron.data.chat.encoder import ReadConversation, read_conversation
from steptron.data.chat.jinja import JinjaTemplate
from steptron.data.chat.special import special_tokens
from steptron.data.chat.template import built_in
from steptron.data.dataset import TokenDataset
from steptron.data.errors import DataError
from steptron.data.inspection import check_files
from steptron.data.manifest import MANIFEST_FILE, read_manifest
from steptron.data.readers import RawDocument
from tests.data.chat.samples import ADVERSARIAL, TOOLS, Record, call, chat, greedy_tokenizer, line, says, user
from tests.data.chat.test_masks import tokenize
from tests.data.corpora import save_tokenizer, small_tokenizer, varied_texts, write_jsonl

BAD = chat(user(), says(""), domain="bad")


def _conversations(count: int) -> list[Record]:
    return [
        chat(user(text), says(text[::-1], "so" * (number % 3)), domain=f"d{number % 2}")
        for number, text in enumerate(varied_texts(count))
    ]


def _build(tmp_path: Path, name: str = "out", inputs: list[Path] | None = None, **options: Any) -> ChatBuildResult:
    if not (tmp_path / "tokenizer").exists():
        save_tokenizer(tmp_path / "tokenizer")
    settings = {"tokenizer": tmp_path / "tokenizer", "validation_fraction": 0.0, **options}
    return build_chat_dataset(ChatBuildOptions(inputs or [tmp_path / "in.jsonl"], tmp_path / name, **settings))


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_reader_finds_every_sample_with_its_mask(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ADVERSARIAL.values())
    result = _build(tmp_path)
    expected = [sample for record in ADVERSARIAL.values() for sample in tokenize(record, small_tokenizer())]
    dataset = TokenDataset.open(tmp_path / "out", "train")
    assert dataset.num_documents == len(expected)
    for number, sample in enumerate(expected):
        tokens_T, counts_T = dataset.document(number)
        np.testing.assert_array_equal(tokens_T, sample.tokens_T)
        np.testing.assert_array_equal(counts_T, sample.loss_mask_T == 1)
    assert check_files(tmp_path / "out") == []
    total = result.summary.total
    assert (total.conversations, total.samples) == (len(ADVERSARIAL), len(expected))
    assert total.tokens == dataset.num_tokens == result.summary.lengths_D.sum()
    assert total.trained_tokens == sum(int(sample.loss_mask_T.sum()) for sample in expected)
    assert result.manifest.train.masked_tokens == total.tokens - total.trained_tokens


def test_the_manifest_names_the_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user(), says())])
    _build(tmp_path)
    assert read_manifest(tmp_path / "out").chat_template == built_in("step3p5").label
    # Manifests of texts, and of all datasets built before there were conversations, have no such field.
    file = tmp_path / "out" / MANIFEST_FILE
    record = json.loads(file.read_text())
    del record["chat_template"]
    file.write_text(json.dumps(record))
    assert read_manifest(tmp_path / "out").chat_template is None


def test_bytes_per_token_are_those_of_what_is_trained(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user("漢字?"), says("Grüße")), chat(user("x"), says("ok", "Hm"))])
    manifest = _build(tmp_path).manifest
    trained = "Grüße<|im_end|>" + "<think>\nHm\n</think>\n\nok<|im_end|>"
    assert manifest.train.bytes - (manifest.train.masked_bytes or 0) == len(trained.encode())
    tokens = manifest.train.tokens - manifest.train.masked_tokens
    assert TokenDataset.open(tmp_path / "out", "train").bytes_per_token == pytest.approx(len(trained.encode()) / tokens)
    # Of a dataset that does not say it, it is not known.
    file = tmp_path / "out" / MANIFEST_FILE
    record = json.loads(file.read_text())
    del record["train"]["masked_bytes"]
    file.write_text(json.dumps(record))
    assert TokenDataset.open(tmp_path / "out", "train").bytes_per_token is None


def test_files_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    records = _conversations(1300)  # several batches
    records[700] = BAD
    write_jsonl(tmp_path / "in.jsonl", records)
    options: dict[str, Any] = {"validation_fraction": 0.2, "on_bad": "skip", "max_tokens": 300, "on_long": "skip"}
    one = _build(tmp_path, "one", workers=1, **options)
    two = _build(tmp_path, "two", workers=2, **options)
    assert _content(tmp_path / "one") == _content(tmp_path / "two")
    assert one.summary.domains == two.summary.domains
    assert one.manifest.validation.documents > 0


def test_all_samples_of_a_conversation_and_its_copies_are_in_one_split(tmp_path: Path) -> None:
    records = [chat(user(text), says("a", "r"), user("2"), says(text)) for text in varied_texts(60)]
    copies = [json.dumps(record, ensure_ascii=True, indent=None, separators=(" ,", ": ")) for record in records]
    write_jsonl(tmp_path / "in.jsonl", [*records, *copies])
    manifest = _build(tmp_path, validation_fraction=0.4).manifest
    assert manifest.validation.documents % 4 == 0
    assert 0 < manifest.validation.documents < manifest.train.documents + manifest.validation.documents == 240


def test_compressed_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    plain = write_jsonl(folder / "a.jsonl", _conversations(3)).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    (folder / "c.ndjson.zst").write_bytes(zstandard.compress(plain))
    (folder / "README.md").write_text("no conversation")
    (tmp_path / "named.txt").write_bytes(plain)
    result = _build(tmp_path, inputs=[folder, tmp_path / "named.txt"])
    assert result.summary.total.conversations == 12
    assert result.files_left_out == 1
    assert [source.documents for source in result.manifest.sources] == [9, 3]
    assert {name: counts.conversations for name, counts in result.summary.domains.items()} == {"d0": 8, "d1": 4}


def test_a_broken_conversation_stops_the_build(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*_conversations(3), "", BAD, "{"])
    with pytest.raises(DataError) as caught:
        _build(tmp_path)
    assert str(caught.value).startswith(f"{source}:5: empty_turn: message 1: an assistant turn without content")
    assert "--on-bad skip" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_broken_conversations_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [BAD, *_conversations(3), "{", BAD])
    result = _build(tmp_path, on_bad="skip")
    assert result.bad.counts == {"empty_turn": 2, "invalid_json": 1}
    assert result.manifest.bad_documents == 3
    assert result.summary.total.conversations == 3
    assert "bad" not in result.summary.domains
    report = [json.loads(entry) for entry in (tmp_path / "out" / "bad_input.jsonl").read_text().splitlines()]
    places = [(entry["file"], entry["line"], entry["turn"], entry["kind"]) for entry in report]
    assert places == [
        (str(source), 1, 1, "empty_turn"),
        (str(source), 5, None, "invalid_json"),
        (str(source), 6, 1, "empty_turn"),
    ]


@pytest.mark.parametrize("depth", [100, 900, 975, 990])
def test_deep_values_are_written_or_refused(depth: int) -> None:
    special = special_tokens(small_tokenizer())
    deep = json.loads(line(chat(user(), says(None, tool_calls=[call(arguments={"q": 0})]), tools=TOOLS)))
    payload = json.dumps(deep).replace('"q": 0', f'"q": {"[" * depth}{"]" * depth}').encode()
    jinja = JinjaTemplate("test", "{{ messages[1].tool_calls | tojson }}", special=tuple(special))
    for template in (built_in("step3p5"), jinja):
        read = read_conversation(RawDocument("f", 1, 0, True, payload), template)
        assert depth > 100 or isinstance(read, ReadConversation) or template is jinja


def test_a_damaged_file_is_no_shorter_one(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", _conversations(300)).read_bytes()
    damaged = tmp_path / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress(plain)[:-200])
    with pytest.raises(DataError, match="damaged_file"):
        _build(tmp_path, inputs=[damaged])


def test_only_broken_conversations_make_no_dataset(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [BAD, BAD])
    with pytest.raises(DataError, match="none of the 2 conversations can be trained on: 2 × empty_turn"):
        _build(tmp_path, on_bad="skip")
    assert not (tmp_path / "out").exists()


def test_what_is_too_long_is_never_cut(tmp_path: Path) -> None:
    short, long = chat(user(), says()), chat(user(), says("Hello " * 50))
    write_jsonl(tmp_path / "in.jsonl", [short, long])
    (fits,), (longer,) = (tokenize(record, small_tokenizer()) for record in (short, long))
    _build(tmp_path, max_tokens=longer.tokens_T.size)
    with pytest.raises(DataError, match=r"in.jsonl:2: too_long: .* never cut; .* --on-long skip"):
        _build(tmp_path, "other", max_tokens=longer.tokens_T.size - 1, on_bad="skip")
    result = _build(tmp_path, "third", max_tokens=fits.tokens_T.size, on_long="skip")
    assert result.bad.counts == {"too_long": 1}
    assert result.summary.lengths_D.tolist() == [fits.tokens_T.size]


def test_the_policy_for_long_ones_is_not_that_for_broken_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user(), says()), BAD])
    with pytest.raises(DataError, match="empty_turn"):
        _build(tmp_path, max_tokens=100, on_long="skip")


def test_a_dataset_is_replaced_with_force_only(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user(), says())])
    _build(tmp_path)
    with pytest.raises(DataError, match="holds a dataset"):
        _build(tmp_path)
    _build(tmp_path, force=True)


def test_percentiles_are_lengths_that_occur(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", _conversations(50))
    summary = _build(tmp_path).summary
    ordered = sorted(summary.lengths_D.tolist())
    assert [summary.percentile(share) for share in (10, 50, 100)] == [ordered[4], ordered[24], ordered[-1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"seed": -1}, "--seed -1"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"on_long": "skip"}, "nothing is too long without --max-tokens"),
        ({"on_bad": "ignore"}, "--on-bad ignore"),
        ({"date": "2025-07-01"}, "writes no date"),
        ({"template": "hf"}, "no chat template beside"),
        ({"template": "none.jinja"}, "not `step3p5`"),
        ({"validation_fraction": 0.999999}, "fell into the validation split"),
    ],
)
def test_options_that_cannot_be_honoured(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user(), says())])
    with pytest.raises(DataError, match=message):
        _build(tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="not from Parquet"):
        _build(tmp_path, inputs=[tmp_path / "a.parquet"])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x")
    with pytest.raises(DataError, match="no JSONL file"):
        _build(tmp_path, inputs=[tmp_path / "texts"])


def _edited_tokenizer(folder: Path, edit: Any) -> Path:
    record = json.loads(greedy_tokenizer().file_bytes)
    edit(record)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(record))
    return folder


def test_tokenizers_that_cannot_write_the_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [chat(user(), says())])

    def readable_from_text(record: dict[str, Any]) -> None:
        next(token for token in record["added_tokens"] if token["content"] == "<|im_end|>")["special"] = False

    def dummy_prefix(record: dict[str, Any]) -> None:
        record["pre_tokenizer"]["add_prefix_space"] = True

    with pytest.raises(DataError, match=r"im_end.*no special token of this tokenizer"):
        _build(tmp_path, tokenizer=_edited_tokenizer(tmp_path / "a", readable_from_text))
    with pytest.raises(DataError, match="adds a space before every text"):
        _build(tmp_path, tokenizer=_edited_tokenizer(tmp_path / "b", dummy_prefix))
