"""Documents and configurations for the tests of filters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

from steptron.data.filters import Document, Passage


def document(*texts: str) -> Document:
    """A document of one text, or a conversation of several messages."""
    if len(texts) == 1:
        return Document("corpus.jsonl", 1, {"text": texts[0]}, (Passage("text", texts[0]),))
    passages = tuple(Passage(f"messages.{number}.content", text) for number, text in enumerate(texts))
    return Document("corpus.jsonl", 1, {}, passages)


def write_config(path: Path, **sections: Any) -> Path:
    """Writes a YAML file (of which JSON is a part)."""
    path.write_text(json.dumps(sections), "utf-8")
    return path


def zst_lines(path: Path) -> list[bytes]:
    """The lines of a .zst file."""
    with open(path, "rb") as stream:
        return zstandard.ZstdDecompressor().stream_reader(stream).read().splitlines()


def kept_lines(output: Path) -> list[bytes]:
    """The lines of all kept shards."""
    return [line for path in sorted((output / "kept").iterdir()) for line in zst_lines(path)]


def removed_records(output: Path) -> list[dict[str, Any]]:
    """What was removed, with the reasons."""
    return [json.loads(line) for line in zst_lines(output / "removed.jsonl.zst")]
