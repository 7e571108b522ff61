"""`steptron data`: what is printed, exit codes, and the corpus of the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.cli.data import app
from steptron.data import stdlib_corpus
from steptron.data.errors import DataError
from steptron.data.inspection import check_files, length_histogram
from steptron.data.manifest import read_manifest
from steptron.data.tokenizer import Tokenizer
from tests.data.corpora import build_small, save_tokenizer, varied_texts, write_jsonl


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_a_build_that_fails_shows_examples_of_every_kind(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"content": text} for text in varied_texts(200)])
    built = _run("build", source, "--output", tmp_path / "out", "--train-tokenizer", 300, "--workers", 1)
    assert built.exit_code == 1  # the field has another name
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
    assert again.exit_code == 1
    assert "holds a dataset" in again.stderr
    assert _run(*arguments, *options, "--force").exit_code == 0


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
    assert alone.exit_code == 1
    assert "--sample and --sequence-length belong together" in alone.stderr


def test_inspect_refuses_what_is_no_dataset(tmp_path: Path) -> None:
    shown = _run("inspect", tmp_path)
    assert shown.exit_code == 1
    assert shown.stderr.startswith(f"error: {tmp_path}: not a dataset")


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
    assert shown.exit_code == 1
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
    assert again.exit_code == 1
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
