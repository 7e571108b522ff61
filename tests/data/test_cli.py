"""`steptron data`: what is printed, exit codes, and the corpus of the standard library."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from steptron.data import stdlib_corpus
from steptron.data.errors import DataError
from steptron.data.inspection import check_files, length_histogram
from steptron.data.manifest import read_manifest
from steptron.data.tokenizer import Tokenizer
from tests.data.corpora import build_small, save_tokenizer, varied_texts, write_jsonl


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *(str(argument) for argument in arguments)], env={"COLUMNS": "160"})


def test_a_build_that_fails_shows_examples_of_every_kind(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"content": text} for text in varied_texts(200)])
    built = _run("build", source, "--output", tmp_path / "out", "--train-tokenizer", 300, "--workers", 1)
    assert built.exit_code == 2  # the field has another name
    assert f"{source}:1: field 'text' is missing" in built.stdout
    assert "200 × missing_field" in built.stdout
    assert "... and 197 more" in built.stdout
    assert str(tmp_path / "out" / "bad_input.jsonl") in built.stderr


def test_build_with_options(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"content": text, "hide": [[0, 2]]} for text in varied_texts(200)] + ["{broken"]
    )
    arguments = ["build", source, "--output", tmp_path / "out", "--tokenizer", save_tokenizer(tmp_path / "tokenizer")]
    options = ["--text-field", "content", "--spans-field", "hide", "--validation-fraction", 0.2, "--workers", 1]
    built = _run(*arguments, *options)
    assert built.exit_code == 0, built.output
    assert "1 × invalid_json" in built.stdout
    manifest = read_manifest(tmp_path / "out")
    for value in (manifest.train.tokens, manifest.validation.documents, manifest.train.masked_tokens):
        assert f"{value:,}" in built.stdout
    again = _run(*arguments, *options)
    assert again.exit_code == 2
    assert "holds a dataset" in again.stderr
    assert _run(*arguments, *options, "--force").exit_code == 0


SEVERAL = [{"text": text} for text in varied_texts(300)]


def test_a_build_says_when_the_text_offers_fewer_tokens(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", SEVERAL)
    options = ("--workers", 1, "--train-tokenizer")
    assert "were asked for" not in _run("build", source, "--output", tmp_path / "exact", *options, 300).stdout
    built = _run("build", source, "--output", tmp_path / "out", *options, 30_000)
    size = read_manifest(tmp_path / "out").vocabulary_size
    assert f"The text offers no more than {size:,} tokens; 30,000 were asked for." in built.stdout


def test_sizes_that_train_no_tokenizer_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", SEVERAL)
    build = ("build", source, "--output", tmp_path / "out")
    train = ("tokenizer", "train", source, "--output", tmp_path / "tokenizer.json", "--vocab-size")
    for command in ((*build, "--train-tokenizer"), train):
        for limit, options in (
            ("10000", (512, "--tokenizer-bytes", 0)),
            ("10000", (512, "--tokenizer-bytes", -5)),
            ("1000000", (999_999_999,)),
        ):
            refused = _run(*command, *options)
            assert refused.exit_code == 2
            assert "Invalid value for" in refused.stderr and limit in refused.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_a_tokenizer_is_not_trained_on_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["{broken"])
    output = tmp_path / "tokenizer.json"
    failed = _run("tokenizer", "train", source, "--vocab-size", 300, "--output", output)
    assert failed.exit_code == 2
    assert f"{source}:1: invalid_json" in failed.stderr
    assert "no document to train on" in failed.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_a_build_without_a_readable_document_says_why(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"content": "x"}])
    options = ("--train-tokenizer", 300, "--workers", 1, "--max-bad-fraction", 1)
    failed = _run("build", source, "--output", tmp_path / "out", *options)
    assert failed.exit_code == 2
    assert "1 × missing_field" in failed.stdout
    assert "none of the 1 documents could be read" in failed.stderr
    assert (tmp_path / "out" / "bad_input.jsonl").exists()


@pytest.mark.parametrize("place", ["FILE/x", "FILE/x/y", "/proc/x", "x" * 300])
def test_places_that_cannot_be_written_are_named_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "FILE").write_text("x")
    source = write_jsonl(tmp_path / "in.jsonl", SEVERAL)
    output = tmp_path / place
    for command in (
        ("build", source, "--output", output, "--train-tokenizer", 300, "--workers", 1),
        ("tokenizer", "train", source, "--vocab-size", 300, "--output", output),
        ("stdlib-corpus", output),
    ):
        failed = _run(*command)
        assert failed.exit_code == 2, command
        assert len(failed.stderr.splitlines()) == 1
        assert failed.stderr.startswith(str(tmp_path / "FILE" if "FILE" in place else output.parent))
        assert "tokens" not in failed.stdout  # found before the work


def test_a_full_disk_is_reported_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("steptron.data.indexed._flush_to_disk", full)
    source = write_jsonl(tmp_path / "in.jsonl", SEVERAL)
    output = tmp_path / "out"
    failed = _run("build", source, "--output", output, "--train-tokenizer", 300, "--workers", 1)
    assert (failed.exit_code, failed.stderr) == (2, f"{output}: No space left on device\n")
    assert list(tmp_path.iterdir()) == [source]


def test_names_that_are_no_utf8_or_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"[/x] :smile: \xff")
    folder.mkdir(parents=True)
    write_jsonl(folder / "in.jsonl", [*SEVERAL, '{"\\ud800": 1}'])
    shown_name = str(tmp_path / "[/x] :smile: \\xff")
    options = ("--train-tokenizer", 300, "--workers", 1)
    built = _run("build", folder, "--output", folder / "out", *options)
    assert built.exit_code == 0, built.output
    assert f"all of them: {shown_name}/out/bad_input.jsonl" in built.stdout
    assert f"  {shown_name}/in.jsonl:301: field 'text' is missing; there are: \\ud800" in built.stdout
    assert read_manifest(folder / "out").sources[0].path == shown_name
    reported = json.loads((folder / "out" / "bad_input.jsonl").read_text())
    assert reported["file"] == f"{shown_name}/in.jsonl"
    assert _run("inspect", folder / "out").exit_code == 0


def test_an_empty_validation_split_is_pointed_out_unless_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", SEVERAL[1:4])
    build = ("build", source, "--train-tokenizer", 300, "--workers", 1, "--output")
    built = _run(*build, tmp_path / "out")
    assert built.exit_code == 0, built.output
    assert "the validation split is empty" in built.stdout and "raise --validation-fraction" in built.stdout
    assert "is empty" not in _run(*build, tmp_path / "without", "--validation-fraction", 0).stdout


def test_inspect_shows_counts_histogram_documents_and_masks(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"text": "say nothing of this", "masked_spans": [[4, 11]]}]
    folder = build_small(tmp_path, "d", [*records, *({"text": text} for text in varied_texts(50))])
    shown = _run("inspect", folder, "--documents", 1)
    assert shown.exit_code == 0, shown.output
    manifest = read_manifest(folder)
    for part in (
        f"{manifest.train.tokens:,}",
        f"{manifest.train.unigram_entropy:.4f}",
        manifest.content_hash,
        "Files are sound",
        "train: tokens per document",
    ):
        assert part in shown.stdout
    assert "⟦" in shown.stdout
    decoded = shown.stdout.split("train document 0")[1]
    inside = decoded.split("⟦")[1].split("⟧")[0]
    assert inside.strip() == "nothing"
    assert decoded.replace("⟦", "").replace("⟧", "").split("\n")[1].strip() == "say nothing of this<|endoftext|>"


def test_inspect_shows_a_sample(tmp_path: Path) -> None:
    folder = build_small(tmp_path, "d", [{"text": text} for text in varied_texts(50)])
    shown = _run("inspect", folder, "--sample", 3, "--sequence-length", 48)
    assert shown.exit_code == 0, shown.output
    assert "train sample 3: 48 targets" in shown.stdout
    assert "targets of document 0 of the row" in shown.stdout
    alone = _run("inspect", folder, "--sample", 3)
    assert alone.exit_code == 2
    assert "--sample and --sequence-length belong together" in alone.stderr


def test_inspect_refuses_what_is_no_dataset(tmp_path: Path) -> None:
    shown = _run("inspect", tmp_path)
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"{tmp_path}: not a dataset")


def test_histogram_counts_every_document_once() -> None:
    import numpy as np

    bins = length_histogram(np.array([1, 2, 3, 4, 7, 8, 100], np.int32))
    assert [(item.low, item.documents, item.tokens) for item in bins if item.documents] == [
        (1, 1, 1),
        (2, 2, 5),
        (4, 2, 11),
        (8, 1, 8),
        (64, 1, 100),
    ]


def _damage(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


def test_inspect_finds_damage_of_every_kind(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return build_small(tmp_path, name, [{"text": "say nothing", "masked_spans": [[4, 11]]}, {"text": "more"}])

    folder = fresh("ids")
    _damage(folder / "train.bin", 0, b"\xff\xff")
    problems = check_files(folder)
    assert any("SHA-256 differs" in problem for problem in problems)
    assert any("token ids up to 65535" in problem and "vocabulary has 420" in problem for problem in problems)
    shown = _run("inspect", folder)
    assert shown.exit_code == 2
    assert "token ids up to 65535" in shown.stderr

    folder = fresh("ends")
    size = (folder / "train.bin").stat().st_size
    _damage(folder / "train.bin", size - 2, b"\x20\x00")
    assert any("1 documents do not end with the end-of-document token" in problem for problem in check_files(folder))

    folder = fresh("pointers")
    _damage(folder / "train.idx", 34 + 2 * 4 + 8, b"\x02")
    assert any("not laid end to end" in problem for problem in check_files(folder))

    folder = fresh("other_tokenizer")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert any("not the tokenizer that the manifest describes" in problem for problem in check_files(folder))

    folder = fresh("missing")
    (folder / "train.loss_mask.bin").unlink()
    assert any("train.loss_mask.bin: missing" in problem for problem in check_files(folder))

    folder = fresh("cut")
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])
    assert any("train.bin: " in problem and "the manifest says" in problem for problem in check_files(folder))


def test_tokenizer_train(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in varied_texts(300)])
    output = tmp_path / "new" / "tokenizer.json"
    trained = _run("tokenizer", "train", source, "--vocab-size", 300, "--output", output)
    assert trained.exit_code == 0, trained.output
    assert Tokenizer.load(output).vocab_size == 300
    again = _run("tokenizer", "train", source, "--vocab-size", 300, "--output", output)
    assert again.exit_code == 2
    assert "use --force" in again.stderr
    write_jsonl(source, [{"text": text} for text in varied_texts(300)] + ["{broken"])
    larger = _run("tokenizer", "train", source, "--vocab-size", 30_000, "--output", output, "--force")
    assert "30,000 were asked for" in larger.stdout
    assert f"{source}:301: invalid_json" in larger.stderr
    assert "1 bad documents were passed over" in larger.stderr


def test_stdlib_corpus_is_real_text_without_tests(tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    shown = _run("stdlib-corpus", output)
    assert shown.exit_code == 0, shown.output
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    size = sum(len(record["text"].encode()) for record in records)
    assert f"{len(records):,} files, {size / 1e6:.1f} MB" in shown.stdout
    assert size >= 5_000_000
    sources = [record["source"] for record in records]
    assert len(set(sources)) == len(sources)
    assert any(source.endswith("/argparse.py") for source in sources)
    folders = {part for source in sources for part in source.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "__pycache__", "site-packages"}
    stdlib = Path(sysconfig.get_path("stdlib"))
    argparse = next(record for record in records if record["source"] == f"{stdlib.name}/argparse.py")
    assert argparse["text"] == (stdlib / "argparse.py").read_text(encoding="utf-8")


def test_a_reduced_standard_library_is_filled_up_from_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdlib, packages = tmp_path / "python", tmp_path / "site-packages"
    for path, content in (
        (stdlib / "a.py", b"a = 1\n"),
        (stdlib / "latin.py", b"# coding: latin-1\nname = '\xe9'\n"),
        (stdlib / "broken.py", b"\xff\xfe\n"),
        (stdlib / "empty.py", b""),
        (stdlib / "test" / "t.py", b"t = 1\n"),
        (stdlib / "json" / "tests" / "t.py", b"t = 1\n"),
        (stdlib / "site-packages" / "s.py", b"s = 1\n"),
        (packages / "beta" / "tests" / "t.py", b"t = 1\n"),
        (packages / "beta" / "b.py", b"b = 1\n" * 100),
        (packages / "alpha.py", b"alpha = 1\n"),
        (packages / "gamma" / "g.py", b"g = 1\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    paths = {"stdlib": stdlib, "purelib": packages, "platlib": packages}
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_path", lambda name: str(paths[name]))

    def sources(minimum: int) -> list[str]:
        report = stdlib_corpus.collect(tmp_path / "corpus.jsonl", minimum)
        records = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
        assert report.documents == len(records)
        assert report.bytes == sum(len(record["text"].encode()) for record in records)
        assert report.skipped == 2
        assert report.package_documents == sum(record["source"].startswith("site-packages/") for record in records)
        return [record["source"] for record in records]

    own = ["python/a.py", "python/latin.py"]
    assert sources(10) == own
    assert sources(100) == [*own, "site-packages/alpha.py", "site-packages/beta/b.py"]
    assert sources(10**6) == [*own, "site-packages/alpha.py", "site-packages/beta/b.py", "site-packages/gamma/g.py"]
    for file in (stdlib / "a.py", stdlib / "latin.py"):
        file.unlink()
    paths["purelib"] = paths["platlib"] = tmp_path / "none"
    with pytest.raises(DataError, match="no sources of the standard library"):
        stdlib_corpus.collect(tmp_path / "other.jsonl")
    assert not list(tmp_path.glob("*other*"))


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; import steptron.cli.data; "
        "assert not {'torch', 'megatron', 'numpy', 'tokenizers', 'pyarrow'} & set(sys.modules); "
        "import steptron.data.build, steptron.data.dataset, steptron.data.inspection; "
        "assert not {'torch', 'megatron', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
