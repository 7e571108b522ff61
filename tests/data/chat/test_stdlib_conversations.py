"""Conversations made of Python sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptron.data.chat.build import ChatBuildOptions, build_chat_dataset
from steptron.data.chat.stdlib_conversations import write_conversations
from steptron.data.errors import DataError
from tests.data.corpora import save_tokenizer, write_jsonl

SOURCE = '''
def bare(x):
    return x

class Thing:
    def double(self, x: int = 1) -> int:
        """Returns twice x.

        Never more.
        """
        return 2 * x
'''


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    records = [{"text": SOURCE, "source": "lib/thing.py"}, {"text": "print 'of Python 2'", "source": "lib/old.py"}]
    return write_jsonl(tmp_path / "corpus.jsonl", records)


def test_functions_and_arithmetic(corpus: Path, tmp_path: Path) -> None:
    written = write_conversations(corpus, tmp_path / "out")
    assert written == {"docs": 1, "code": 1, "tools": 500, "arithmetic": 500}
    domains = {
        name: [json.loads(line) for line in (tmp_path / f"out/{name}.jsonl").read_text().splitlines()]
        for name in written
    }
    assert all(record["domain"] == name for name, records in domains.items() for record in records)
    asked, answered = domains["docs"][0]["messages"]
    assert asked["content"].startswith("What does Thing.double in lib/thing.py do?")
    assert answered["content"] == "Returns twice x."
    asked, answered = domains["code"][0]["messages"]
    assert asked["content"] == "Write def double(self, x: int=1) of lib/thing.py: Returns twice x."
    assert "        return 2 * x" in answered["content"] and "bare" not in answered["content"]
    for record in domains["tools"]:
        asked, called, told, answered = record["messages"]
        numbers = called["tool_calls"][0]["function"]["arguments"]
        assert answered["content"].endswith(f" are {numbers['a'] + numbers['b']}.")
        assert told["content"] == str(numbers["a"] + numbers["b"])
    for record in domains["arithmetic"]:
        asked, answered = record["messages"]
        a, b = asked["content"].removeprefix("How much is ").removesuffix("?").split(" + ")
        assert answered["content"] == str(int(a) + int(b))
        written_digits = [step.split("write ")[1][0] for step in answered["reasoning_content"].splitlines()]
        assert int("".join(reversed(written_digits))) == (int(a) + int(b)) % 10 ** len(written_digits)


def test_every_one_is_accepted(corpus: Path, tmp_path: Path) -> None:
    written = write_conversations(corpus, tmp_path / "out")
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    result = build_chat_dataset(ChatBuildOptions([tmp_path / "out"], tmp_path / "data", tokenizer))
    assert {name: counts.conversations for name, counts in result.summary.domains.items()} == written


def test_a_corpus_without_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no documented Python functions"):
        write_conversations(write_jsonl(tmp_path / "c.jsonl", [{"text": "x = 1", "source": "x"}]), tmp_path / "out")
    with pytest.raises(DataError, match=r"c\.jsonl:1: not a line of"):
        write_conversations(write_jsonl(tmp_path / "c.jsonl", [{"text": "x = 1"}]), tmp_path / "out")
