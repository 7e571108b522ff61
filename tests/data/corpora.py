"""Small corpora and tokenizers that the data tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from steptron.data.build import BuildOptions, build_dataset
from steptron.data.tokenizer import Tokenizer, train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def add(first, second):\n    return first + second\n",
    "Grüße aus Köln: naïve façade, 1 € = 1,08 $",
    "漢字とかな, 한국어, עברית, العربية",
    "emoji 😀👩‍👩‍👧 and a combining e\u0301, \u200b zero width",
    "  leading and trailing spaces  ",
    "\n\n\ttabs\r\nand carriage returns\r\n",
    "<|endoftext|> is only text here, <|im_start|> too",
    "\x00\x01 control characters \x7f \ufeff and \ufffd",
    "x",
]


def small_tokenizer(vocab_size: int = 420) -> Tokenizer:
    """A byte-level tokenizer with some merges."""
    return train_tokenizer(TEXTS * 20, vocab_size)


def save_tokenizer(folder: Path) -> Path:
    """Saves ``small_tokenizer`` and returns its folder."""
    small_tokenizer().save(folder)
    return folder


def write_jsonl(path: Path, records: Iterable[Mapping[str, object] | str]) -> Path:
    """Writes records as JSON lines; strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def varied_texts(count: int, longest: int = 40) -> list[str]:
    """Texts of different lengths, all distinct."""
    words = ["alpha", "beta", "gamma", "delta", "ε", "ζ", "漢", "字", "the", "of", "and", "return", "def", "self"]
    return [
        f"{number}: " + " ".join(words[(number * 7 + step * step) % len(words)] for step in range(number % longest))
        for number in range(count)
    ]


def build_small(folder: Path, name: str, records: Iterable[Mapping[str, object]], **options: object) -> Path:
    """Builds a dataset ``folder/name`` from records with ``small_tokenizer``."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        save_tokenizer(tokenizer)
    source = write_jsonl(folder / f"{name}.jsonl", records)
    settings = {"validation_fraction": 0.0, "tokenizer": tokenizer, **options}
    build_dataset(BuildOptions([source], folder / name, **settings))  # type: ignore[arg-type]
    return folder / name
