"""`build` and `preview`: what is printed, and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.cli.sft import app
from steptron.data.manifest import read_manifest
from tests.data.chat.samples import chat, says, user
from tests.data.corpora import save_tokenizer, write_jsonl

RECORDS = [
    chat(
        user("What is <|im_end|>?"), says("A [bold]token[/bold].", "Hm."), user("Thanks"), says("Welcome"), domain="qa"
    ),
    chat(user("x"), says("")),
    chat(user("Hi"), says("Hello"), domain="[talk]"),
]


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "tokenizer")
    return write_jsonl(tmp_path / "in.jsonl", RECORDS)


def test_build_prints_a_summary(source: Path, tmp_path: Path) -> None:
    options = ["--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--workers", 1]
    stopped = _run("build", source, *options)
    assert stopped.exit_code != 0
    assert f"{source}:2: empty_turn: message 1:" in str(stopped.exception)
    built = _run("build", source, *options, "--on-bad", "skip")
    assert built.exit_code == 0, built.output
    assert "1 × empty_turn" in built.stdout
    rows = {line.split("│")[1].strip(): line for line in built.stdout.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["qa"].split("│")[2:4]] == ["1", "2"]
    assert [cell.strip() for cell in rows["all"].split("│")[2:4]] == ["2", "3"]
    assert "[talk]" in rows
    assert "chat template: step3p5 sha256:" in built.stdout
    assert "tokens per sample: 10 %:" in built.stdout


def test_one_domain(source: Path, tmp_path: Path) -> None:
    options = ["--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--on-bad", "skip"]
    for workers in (1, 2):
        built = _run("build", source, *options, "--domain", "qa", "--workers", workers, "--force")
        assert built.exit_code == 0, built.output
        assert "1 conversations of 1 other domains were passed over" in built.stdout
        rows = {line.split("│")[1].strip(): line for line in built.stdout.splitlines() if line.startswith("│")}
        assert rows.keys() == {"qa", "all"} and read_manifest(tmp_path / "out").train.documents == 2
    wrong = _run("build", source, *options, "--domain", "maths", "--force")
    assert "--domain maths: no conversation of this domain can be trained on; there are: [talk], qa" in str(
        wrong.exception
    )


def test_preview_marks_what_is_trained(source: Path, tmp_path: Path) -> None:
    shown = _run("preview", source, "--tokenizer", tmp_path / "tokenizer")
    assert shown.exit_code == 0, shown.output
    assert f"{source}:1, sample 1 of 2, domain qa" in shown.stdout
    first = "<|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nA [bold]token[/bold].<|im_end|>⟧\n<|endoftext|>"
    assert first in shown.stdout
    second = "<|im_start|>assistant\nA [bold]token[/bold].<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
    assert second + "<|im_start|>assistant\n⟦Welcome<|im_end|>⟧" in shown.stdout
    assert f"{source}:2: empty_turn: message 1:" in shown.stdout
    assert shown.stdout.count("⟦") == 3
    assert " tokens, " in shown.stdout


def test_preview_of_a_number_or_a_line(source: Path, tmp_path: Path) -> None:
    tokenizer = ["--tokenizer", tmp_path / "tokenizer"]
    assert "Hello" not in _run("preview", source, *tokenizer, "--number", 2).stdout
    third = _run("preview", source, *tokenizer, "--line", 3).stdout
    assert "⟦Hello<|im_end|>⟧" in third
    assert "Welcome" not in third
    assert "no conversation on line 4" in str(_run("preview", source, *tokenizer, "--line", 4).exception)


def test_preview_of_a_dataset(source: Path, tmp_path: Path) -> None:
    options = ["--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--workers", 1]
    _run("build", source, *options, "--on-bad", "skip", "--validation-fraction", 0)
    shown = _run("preview", tmp_path / "out", "--number", 2)
    assert "train document 1" in shown.stdout
    assert "⟦Welcome<|im_end|>⟧" in shown.stdout
    assert "train document 2" not in shown.stdout
    assert "--line" in str(_run("preview", tmp_path / "out", "--line", 1).exception)


def test_colours_tell_special_tokens_from_text(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    console = Console(markup=False, force_terminal=True, color_system="standard", width=160)
    monkeypatch.setattr("steptron.cli.sft.terminal", lambda: console)
    with console.capture() as captured:
        assert _run("preview", source, "--tokenizer", tmp_path / "tokenizer", "--number", 1).exit_code == 0
    text = captured.get()
    assert "⟦" not in text
    assert "\x1b[1;7;32m<|im_end|>" in text  # said by the model: bold, reversed, green
    assert "What is <|im_end|>?" in text  # characters of a text: in one style with what is around them


def test_what_preview_cannot_show(source: Path, tmp_path: Path) -> None:
    assert "give --tokenizer" in str(_run("preview", source).exception)
    missing = _run("preview", tmp_path / "none.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert "no such file" in str(missing.exception)
