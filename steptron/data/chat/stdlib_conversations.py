"""Conversations that every Python brings along: about its standard library's functions, and made-up arithmetic."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptron.data.errors import DataError
from steptron.platform.staging import staging_file

_LONGEST = 1_500  # characters of a function's source
_MADE_UP = 500  # conversations of a domain that is made up
_SEED = 0

Conversation = dict[str, Any]


@dataclass(frozen=True)
class _Function:
    """A documented function.

    Attributes:
        file: that it is in, such as ``python3.11/json/decoder.py``.
        name: with its class, if it has one.
        signature: its ``def``, up to the colon.
        summary: first paragraph of its docstring.
        source: all of it.
    """

    file: str
    name: str
    signature: str
    summary: str
    source: str


def write_conversations(corpus: Path, folder: Path) -> dict[str, int]:
    """Writes a JSONL file for each domain.

    ``docs`` asks what a function does, and ``code`` for the function; ``tools`` calculates by calls, and ``arithmetic``
    digit by digit in its reasoning.

    Args:
        corpus: the library's sources, as ``steptron data stdlib-corpus`` writes them.
        folder: to write to; it is made where there is none.

    Returns:
        Conversations by domain.

    Raises:
        DataError: the corpus holds no documented function.
    """
    functions = list(_functions(corpus))
    if not functions:
        raise DataError(f"{corpus}: no documented Python functions; write it with `steptron data stdlib-corpus`")
    draw = random.Random(_SEED)
    made: dict[str, Iterable[Conversation]] = {
        "docs": map(_docs, functions),
        "code": map(_code, functions),
        "tools": (_tools(draw) for _ in range(_MADE_UP)),
        "arithmetic": (_arithmetic(draw) for _ in range(_MADE_UP)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    return {domain: _write(folder / f"{domain}.jsonl", domain, conversations) for domain, conversations in made.items()}


def _write(file: Path, domain: str, conversations: Iterable[Conversation]) -> int:
    number = 0
    with staging_file(file) as partial, open(partial, "w", encoding="utf-8") as stream:
        for number, conversation in enumerate(conversations, start=1):  # noqa: B007
            stream.write(json.dumps(conversation | {"domain": domain}, ensure_ascii=False) + "\n")
    return number


def _functions(corpus: Path) -> Iterator[_Function]:
    with open(corpus, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                text, file = str(record["text"]), str(record["source"])
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{corpus}:{number}: not a line of `steptron data stdlib-corpus` ({error})") from error
            try:
                module = ast.parse(text)
            except (SyntaxError, ValueError):
                continue  # of another version of Python
            yield from _defined(module.body, text, file, "")


def _defined(body: list[ast.stmt], text: str, file: str, prefix: str) -> Iterator[_Function]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, text, file, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
            source = ast.get_source_segment(text, node, padded=True)
            if source and len(source) <= _LONGEST:
                signature = f"def {node.name}({ast.unparse(node.args)})"
                yield _Function(file, prefix + node.name, signature, documentation.split("\n\n")[0], source)


def _docs(function: _Function) -> Conversation:
    return _exchange(f"What does {function.name} in {function.file} do?\n\n{function.signature}", function.summary)


def _code(function: _Function) -> Conversation:
    return _exchange(
        f"Write {function.signature} of {function.file}: {function.summary}", f"```python\n{function.source}\n```"
    )


def _exchange(question: str, answer: str) -> Conversation:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


_CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def _tools(draw: random.Random) -> Conversation:
    a, b = draw.randrange(10**6), draw.randrange(10**6)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return {
        "messages": [
            {"role": "user", "content": f"How much is {a} and {b}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": str(a + b)},
            {"role": "assistant", "content": f"{a} and {b} are {a + b}."},
        ],
        "tools": [_CALCULATOR],
    }


def _arithmetic(draw: random.Random) -> Conversation:
    a, b = (draw.randrange(10 ** draw.randint(1, 4)) for _ in range(2))
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        one, other = a // 10**place % 10, b // 10**place % 10
        total = one + other + carry
        steps.append(f"{one} + {other} + {carry} = {total}: write {total % 10}, carry {total // 10}")
        carry = total // 10
    conversation = _exchange(f"How much is {a} + {b}?", str(a + b))
    conversation["messages"][1]["reasoning_content"] = "\n".join(steps)
    return conversation
