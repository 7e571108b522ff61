"""Building datasets: round trips, broken input, atomicity, independence of the number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from steptron.data.build import BAD_INPUT_FILE, BuildOptions, Progress, TooManyBadDocuments, build_dataset
from steptron.data.dataset import Split, TokenDataset
from steptron.data.encoding import is_validation
from steptron.data.errors import DataError
from steptron.data.inspection import check_files
from steptron.data.manifest import read_manifest
from steptron.data.tokenizer import Tokenizer
from tests.data.corpora import TEXTS, build_small, save_tokenizer, small_tokenizer, varied_texts, write_jsonl


def _texts(folder: Path, split: Split = "train") -> list[str]:
    """Decoded documents, each checked to end with the end-of-document token and to hold no other."""
    dataset, tokenizer = TokenDataset.open(folder, split), Tokenizer.load(folder)
    texts = []
    for number in range(dataset.num_documents):
        tokens_T, _ = dataset.document(number)
        assert tokens_T[-1] == 0 and 0 not in tokens_T[:-1]
        texts.append(tokenizer.decode(tokens_T[:-1].tolist()))
    return texts


def _options(tmp_path: Path, *inputs: Path, **settings: object) -> BuildOptions:
    defaults = {"tokenizer": save_tokenizer(tmp_path / "tokenizer"), "validation_fraction": 0.0}
    return BuildOptions(list(inputs), tmp_path / "out", **{**defaults, **settings})  # type: ignore[arg-type]


def _write_in_every_format(folder: Path) -> list[Path]:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "texts").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_bytes(text.encode())
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    pq.write_table(pa.table({"text": TEXTS}), folder / "d.parquet")
    (folder / "e.txt").write_bytes(TEXTS[2].encode())
    return [folder / name for name in ("texts", "a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt")]


def test_every_format_survives_a_round_trip_in_input_order(tmp_path: Path) -> None:
    inputs = _write_in_every_format(tmp_path / "in")
    result = build_dataset(_options(tmp_path, *inputs))
    assert _texts(tmp_path / "out") == TEXTS * 5 + [TEXTS[2]]
    manifest = read_manifest(tmp_path / "out")
    assert manifest == result.manifest
    assert [source.documents for source in manifest.sources] == [10, 10, 10, 10, 10, 1]
    assert [source.files for source in manifest.sources] == [10, 1, 1, 1, 1, 1]
    assert manifest.train.bytes == sum(len(text.encode()) for text in TEXTS * 5 + [TEXTS[2]])
    assert manifest.train.bytes == sum(source.bytes for source in manifest.sources)
    assert not manifest.train.loss_mask
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dataset.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.bin",
        "train.idx",
    ]
    assert check_files(tmp_path / "out") == []


def test_megatron_reads_the_dataset(tmp_path: Path) -> None:
    folder = build_small(tmp_path, "d", [{"text": text} for text in TEXTS])
    theirs = IndexedDataset(str(folder / "train"))
    tokenizer = small_tokenizer()
    assert [theirs[number].tolist() for number in range(len(theirs))] == [
        [*tokenizer.encode(text), 0] for text in TEXTS
    ]


def test_output_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    # Several batches (512 documents each), both splits, masks that begin late, bad documents.
    texts = varied_texts(3000)
    records: list[dict[str, object] | str] = [{"text": text} for text in texts]
    records[2000] = {"text": texts[2000], "masked_spans": [[0, 3]]}
    records[2500] = "not json"
    source = write_jsonl(tmp_path / "in.jsonl", records)
    folders = []
    for workers in (1, 3):
        output = tmp_path / f"out{workers}"
        build_dataset(
            BuildOptions([source], output, train_vocab_size=400, workers=workers, validation_fraction=0.2, seed=3)
        )
        folders.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert folders[0].keys() >= {"train.bin", "validation.idx", BAD_INPUT_FILE, "dataset.json", "tokenizer.json"}
    assert folders[0] == folders[1]


def test_splits_are_disjoint_complete_and_decided_by_the_text(tmp_path: Path) -> None:
    texts = varied_texts(500)
    folder = build_small(tmp_path, "d", [{"text": text} for text in texts], validation_fraction=0.1, seed=5)
    expected = [is_validation(text.encode(), 5, 0.1) for text in texts]
    assert 20 < sum(expected) < 80
    assert _texts(folder, "validation") == [text for text, chosen in zip(texts, expected, strict=True) if chosen]
    assert _texts(folder) == [text for text, chosen in zip(texts, expected, strict=True) if not chosen]


def test_masks_are_stored_token_by_token_with_ones_before_the_first_span(tmp_path: Path) -> None:
    texts = varied_texts(1500)
    records: list[dict[str, object]] = [{"text": text} for text in texts]
    records[700]["masked_spans"] = [[0, len(texts[700])]]
    records[1400] = {"text": "secret 漢 word", "masked_spans": [[7, 8]]}
    folder = build_small(tmp_path, "d", records)
    dataset = TokenDataset.open(folder, "train")
    for number in range(len(records)):
        tokens_T, counts_T = dataset.document(number)
        if number == 700:
            assert not counts_T[:-1].any() and counts_T[-1]
        elif number == 1400:
            masked = tokens_T[~counts_T].tolist()
            assert Tokenizer.load(folder).decode(masked).strip() == "漢"
        else:
            assert counts_T.all()
    record = dataset.manifest.train
    assert record.loss_mask
    assert record.masked_tokens == sum(int((~dataset.document(number)[1]).sum()) for number in (700, 1400))
    theirs = IndexedDataset(str(folder / "train.loss_mask"))
    assert len(theirs) == len(records)
    assert theirs[3].dtype == np.uint8 and theirs[3].tolist() == [1] * theirs[3].size
    assert check_files(folder) == []


def test_entropies_equal_a_direct_count(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"text": text} for text in varied_texts(300)]
    for record in records[::7]:
        record["masked_spans"] = [[0, 2]]
    folder = build_small(tmp_path, "d", records, validation_fraction=0.3)
    manifest = read_manifest(folder)
    counts: dict[str, Counter[int]] = {}
    for split in ("train", "validation"):
        dataset = TokenDataset.open(folder, split)
        counts[split] = Counter()
        for number in range(dataset.num_documents):
            tokens_T, counts_T = dataset.document(number)
            counts[split].update(tokens_T[counts_T].tolist())
    smoothed_total = counts["train"].total() + manifest.vocabulary_size
    for split in ("train", "validation"):
        total = counts[split].total()
        plain = -math.fsum(count / total * math.log(count / total) for count in counts[split].values())
        cross = -math.fsum(
            count / total * math.log((counts["train"][token] + 1) / smoothed_total)
            for token, count in counts[split].items()
        )
        assert manifest.split(split).unigram_entropy == pytest.approx(plain, rel=1e-12)
        assert manifest.split(split).unigram_cross_entropy == pytest.approx(cross, rel=1e-12)
    assert manifest.validation.unigram_cross_entropy > manifest.validation.unigram_entropy


def _bad_corpus(folder: Path, good: int) -> list[Path]:
    folder.mkdir()
    lines: list[dict[str, object] | str] = [{"text": text} for text in varied_texts(good)]
    lines[3:3] = ["{broken", '{"body": "x"}']
    write_jsonl(folder / "a.jsonl", lines)
    (folder / "b.txt").write_bytes(b"first\nsecond \xff\n")
    (folder / "c.txt").write_bytes(b"")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "kept"}\n' * 3)[:-4])
    return [folder]


BAD_PLACES = [
    ("a.jsonl", 4, "invalid_json"),
    ("a.jsonl", 5, "missing_field"),
    ("b.txt", 2, "invalid_utf8"),
    ("c.txt", None, "empty_file"),
    ("d.jsonl.gz", 4, "damaged_file"),
]


def _reported(path: Path) -> list[tuple[str, int | None, str]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(record["message"] for record in records)
    return [(Path(record["file"]).name, record["line"], record["kind"]) for record in records]


def test_bad_documents_within_the_share_are_left_out_and_reported(tmp_path: Path) -> None:
    inputs = _bad_corpus(tmp_path / "in", good=92)
    result = build_dataset(_options(tmp_path, *inputs, max_bad_fraction=0.05))  # 5 of 100 documents
    assert result.bad.total == result.manifest.bad_documents == 5
    assert _reported(result.bad.path) == BAD_PLACES
    assert result.bad.path == tmp_path / "out" / BAD_INPUT_FILE
    assert len(_texts(tmp_path / "out")) == 92 + 3
    assert check_files(tmp_path / "out") == []


def test_one_bad_document_more_stops_the_build_and_leaves_only_the_report(tmp_path: Path) -> None:
    inputs = _bad_corpus(tmp_path / "in", good=91)  # 5 of 99 documents
    before = set(tmp_path.iterdir())
    with pytest.raises(TooManyBadDocuments, match=r"5 of 99 documents are bad \(5\.05%\)") as caught:
        build_dataset(_options(tmp_path, *inputs, max_bad_fraction=0.05))
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out", tmp_path / "tokenizer"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == [BAD_INPUT_FILE]
    assert _reported(caught.value.bad.path) == BAD_PLACES
    assert {kind: len(examples) for kind, examples in caught.value.bad.examples.items()} == {
        kind: 1 for _, _, kind in BAD_PLACES
    }
    with pytest.raises(DataError, match="not a dataset"):
        TokenDataset.open(tmp_path / "out", "train")
    # The report does not stand in the way of the next attempt.
    build_dataset(_options(tmp_path, *inputs, max_bad_fraction=0.06))
    assert _reported(tmp_path / "out" / BAD_INPUT_FILE) == BAD_PLACES


def test_a_hopeless_build_stops_early(tmp_path: Path) -> None:
    lines = ["{broken"] * 3000 + [json.dumps({"text": "x" * 20})] * 30_000
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    seen: list[Progress] = []
    with pytest.raises(TooManyBadDocuments, match=r"stopped after \d+% of the input"):
        build_dataset(_options(tmp_path, source), seen.append)
    assert seen[-1].file_bytes < seen[-1].total_file_bytes / 2


def test_examples_of_bad_input_are_few_but_the_report_is_complete(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["{broken"] * 20 + ['{"text": "x"}'])
    with pytest.raises(TooManyBadDocuments) as caught:
        build_dataset(_options(tmp_path, source))
    assert len(caught.value.bad.examples["invalid_json"]) == 3
    assert len(_reported(caught.value.bad.path)) == 20


def test_nothing_is_overwritten_without_being_told_to(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    build_dataset(_options(tmp_path, source))
    write_jsonl(source, [{"text": "two"}])
    with pytest.raises(DataError, match=r"holds a dataset; .*--force"):
        build_dataset(_options(tmp_path, source))
    assert _texts(tmp_path / "out") == ["one"]
    build_dataset(_options(tmp_path, source, force=True))
    assert _texts(tmp_path / "out") == ["two"]
    # A forced build that fails keeps what was there, and its report stands beside.
    write_jsonl(source, ["{broken"])
    with pytest.raises(TooManyBadDocuments) as caught:
        build_dataset(_options(tmp_path, source, force=True))
    assert _texts(tmp_path / "out") == ["two"]
    assert check_files(tmp_path / "out") == []
    assert caught.value.bad.path == tmp_path / f"out.{BAD_INPUT_FILE}"


def test_a_folder_that_is_no_dataset_is_never_replaced(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and is not a dataset"):
        build_dataset(_options(tmp_path, source, force=True))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_wrong_options_are_refused_before_work(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    for settings, message in (
        ({"train_vocab_size": 400}, "either --tokenizer .* or --train-tokenizer"),
        ({"tokenizer": None}, "either --tokenizer .* or --train-tokenizer"),
        ({"tokenizer": None, "train_vocab_size": 100}, "--train-tokenizer 100: at least 272"),
        ({"tokenizer": None, "train_vocab_size": 10**9}, "--train-tokenizer 1000000000: at most 1000000"),
        ({"tokenizer": None, "train_vocab_size": 300, "tokenizer_bytes": 0}, "--tokenizer-bytes 0: at least 10000"),
        ({"tokenizer": None, "train_vocab_size": 300, "eod_token": "x"}, "--eod-token belongs to a loaded"),
        ({"workers": 0}, "--workers 0"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"max_bad_fraction": -0.1}, "--max-bad-fraction -0.1"),
        ({"seed": -1}, "--seed -1"),
    ):
        with pytest.raises(DataError, match=message):
            build_dataset(_options(tmp_path, source, **settings))
    assert not (tmp_path / "out").exists()


def test_small_corpora_may_have_no_validation_split_but_need_a_train_split(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    build_dataset(_options(tmp_path, source, validation_fraction=1e-9))
    assert not (tmp_path / "out" / "validation.bin").exists()
    with pytest.raises(DataError, match="validation split has no documents"):
        TokenDataset.open(tmp_path / "out", "validation")
    with pytest.raises(DataError, match="all 1 documents fell into the validation split"):
        build_dataset(_options(tmp_path, source, validation_fraction=1 - 1e-9, force=True))
    assert _texts(tmp_path / "out") == ["one"]


def test_a_tokenizer_is_trained_on_a_sample_of_a_large_corpus(tmp_path: Path) -> None:
    texts = varied_texts(2000)
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    seen: list[Progress] = []
    options = _options(tmp_path, source, tokenizer=None, train_vocab_size=300, tokenizer_bytes=10_000)
    build_dataset(options, seen.append)
    trained_on = max(progress.documents for progress in seen if progress.phase == "tokenizer")
    size = source.stat().st_size
    assert 0.5 < trained_on / (2000 * 10_000 / size) < 2
    assert _texts(tmp_path / "out") == texts


def test_a_sample_without_a_document_trains_no_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("word " * 2_000_000)  # one document; it is kept with a probability of 1 in 1,000
    with pytest.raises(DataError, match=r"no document fell into the tokenizer's sample .*10000; raise it"):
        build_dataset(_options(tmp_path, source, tokenizer=None, train_vocab_size=300, tokenizer_bytes=10_000))
    assert not (tmp_path / "out").exists()


def test_the_current_folder_can_be_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}])
    options = dataclasses.replace(_options(tmp_path, source), output=Path("."))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    build_dataset(options)
    assert _texts(tmp_path / "here") == ["one"]


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    inputs = _write_in_every_format(tmp_path / "in")
    seen: list[Progress] = []
    build_dataset(_options(tmp_path, *inputs), seen.append)
    assert (seen[-1].file_bytes, seen[-1].documents) == (seen[-1].total_file_bytes, 51)


def test_content_hash_tells_datasets_apart_that_train_differently(tmp_path: Path) -> None:
    def content(name: str, records: list[dict[str, object]], **settings: object) -> str:
        return read_manifest(build_small(tmp_path, name, records, **settings)).content_hash

    one: list[dict[str, object]] = [{"text": "one"}, {"text": "two"}]
    assert content("a", one) == content("b", one)
    assert content("a2", one) != content("c", one[::-1])
    assert content("a3", one) != content("d", [{"text": "one", "masked_spans": [[0, 1]]}, {"text": "two"}])
    assert content("a4", one) != content("e", one, eod_token="<|im_end|>")


def _partial_folders(folder: Path) -> list[Path]:
    return list(folder.glob(".out.building-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_build_leaves_no_dataset_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    line = json.dumps({"text": "some words that take a while to tokenize " * 20}) + "\n"
    source = tmp_path / "in.jsonl"
    source.write_text(line * 40_000)  # 33 MB: far longer than the test waits
    save_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-c", "from steptron.cli.data import app; app()", "build", str(source), "--workers", "2"]
    arguments = ["--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer")]
    process = subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: any((path / "train.bin").stat().st_size for path in _partial_folders(tmp_path)), process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert not (tmp_path / "out").exists()
    for partial in _partial_folders(tmp_path):
        assert number == signal.SIGKILL  # the others clean up
        with pytest.raises(DataError, match="not a dataset"):
            TokenDataset.open(partial, "train")
    # The next build removes what a killed one left.
    small = write_jsonl(tmp_path / "small.jsonl", [{"text": "one"}])
    build_dataset(_options(tmp_path, small))
    assert _partial_folders(tmp_path) == []
    assert _texts(tmp_path / "out") == ["one"]


def _wait_until(condition: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the build ended before it could be stopped"
        with contextlib.suppress(OSError):
            if condition():  # type: ignore[operator]
                return
        time.sleep(0.02)
    raise AssertionError("the build did not start to write within 120 s")
