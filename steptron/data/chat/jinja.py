"""Hugging Face chat templates (Jinja), and which part of what they write is trained.

A template is a program of others: it runs in Jinja's sandbox, sees the conversation only, and cannot change it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steptron.data.chat.conversation import Conversation, Message, strings_in, strings_of
from steptron.data.chat.pieces import Piece, Run, Sample
from steptron.data.chat.problems import ConversationError
from steptron.data.errors import DataError
from steptron.data.tokenizer import TOKENIZER_CONFIG_FILE

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

TEMPLATE_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Unicode's noncharacters: no text has them, so they can mark where generation blocks begin and end.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class _Rendering:
    """A rendered text and the characters [start, end) of its generation blocks."""

    text: str
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class JinjaTemplate:
    """A Hugging Face chat template.

    Attributes:
        name: ``hf``, or the name of the file.
        source: the template.
        named_tokens: ``bos_token`` and others that templates write by name.
        special: special tokens of the tokenizer; where the template writes one, it becomes that token.
        date: what ``strftime_now`` takes for today, as YYYY-MM-DD; without it templates that ask are refused.
    """

    name: str
    source: str
    named_tokens: tuple[tuple[str, str], ...] = ()
    special: tuple[str, ...] = ()
    date: str | None = None

    @property
    def label(self) -> str:
        date = "" if self.date is None else f" date:{self.date}"
        return f"{self.name} sha256:{hashlib.sha256(self.source.encode()).hexdigest()}{date}"

    def check_tokenizer(self, special_tokens: Collection[str]) -> None:
        for name, token in self.named_tokens:
            if re.search(rf"\b{name}\b", self.source) and token not in special_tokens:
                raise DataError(f"chat template {self.name} writes {name} {token!r}, which is no special token here")

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Renders a conversation.

        Where the template writes earlier turns otherwise once a later user turn is there, without their reasoning say,
        that user turn starts a new sample, as in :meth:`MarkupTemplate.samples`.
        """
        self._refuse_special_tokens(conversation)
        messages = conversation.messages
        users = [turn for turn, message in enumerate(messages) if message.role == "user"]
        ends = [*users[1:], len(messages)]
        renderings = [self._render(messages[:end], conversation.tools) for end in ends]
        samples: list[Sample] = []
        begin = 0
        for number, (end, rendering) in enumerate(zip(ends, renderings, strict=True)):
            if end < len(messages) and renderings[number + 1].text.startswith(rendering.text):
                continue
            turns = [turn for turn in range(begin, end) if messages[turn].trained]
            if turns:
                spans = self._spans(rendering, messages[:end], conversation.tools, begin)
                samples.append(self._sample(rendering.text, spans, turns))
            begin = end
        return samples

    def _spans(
        self, rendering: _Rendering, messages: Sequence[Message], tools: Sequence[dict[str, Any]], begin: int
    ) -> dict[int, tuple[int, int]]:
        """Characters [start, end) of each assistant turn from message ``begin`` on."""
        turns = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
        if _GENERATION.search(self.source):
            if len(rendering.blocks) != len(turns):
                raise ConversationError(
                    "template_refusal",
                    f"template {self.name} wrote {len(rendering.blocks)} generation blocks for {len(turns)} assistant "
                    "turns: it must have one block around what the assistant says in a turn",
                )
            blocks = zip(turns, rendering.blocks, strict=True)
            return {turn: block for turn, block in blocks if turn >= begin}
        # Earlier turns were trained in other samples, and may be written otherwise here.
        return {turn: self._span_by_prefix(rendering.text, messages, turn, tools) for turn in turns if turn >= begin}

    def _span_by_prefix(
        self, text: str, messages: Sequence[Message], turn: int, tools: Sequence[dict[str, Any]]
    ) -> tuple[int, int]:
        """What a turn adds to its prompt, where both are beginnings of the whole text."""
        prompt = self._render(messages[:turn], tools, add_generation_prompt=True).text
        through = self._render(messages[: turn + 1], tools).text
        for shorter, longer, what in (
            (prompt, through, "the prompt for this turn is no beginning of the text with the turn"),
            (through, text, "the text up to this turn is no beginning of the text with the turns that follow"),
        ):
            if not longer.startswith(shorter):
                raise ConversationError(
                    "not_a_prefix",
                    f"template {self.name}: {what} (they differ at character {_first_difference(shorter, longer)}), so "
                    "that the model would be trained on what it is never asked to say. A template that drops reasoning "
                    "between tool calls, or whose generation prompt is not how it begins the turn, needs "
                    "{% generation %} blocks around what the assistant says; or use --template step3p5",
                    turn,
                )
        return len(prompt), len(prompt) + _said(through[len(prompt) :], self.special)

    def _sample(self, text: str, spans: Mapping[int, tuple[int, int]], turns: Sequence[int]) -> Sample:
        """Runs of a text: every turn with a span is one, trained or not, so that tokens do not depend on the mask."""
        runs: list[Run] = []
        position = 0
        for turn, (start, end) in spans.items():
            runs.append(Run(self._pieces(text[position:start])))
            if start == end and turn in turns:
                raise ConversationError("template_refusal", f"template {self.name} writes nothing for this turn", turn)
            runs.append(Run(self._pieces(text[start:end]), turn in turns))
            position = end
        runs.append(Run(self._pieces(text[position:])))
        return tuple(run for run in runs if run.pieces)

    def _pieces(self, text: str) -> tuple[Piece, ...]:
        if not self.special:
            return (Piece(text),) if text else ()
        longest_first = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        # Captured separators stand at odd places.
        parts = re.split(f"({longest_first})", text)
        return tuple(Piece(part, number % 2 == 1) for number, part in enumerate(parts) if part)

    def _refuse_special_tokens(self, conversation: Conversation) -> None:
        texts: list[tuple[int | None, str]] = [(None, text) for tool in conversation.tools for text in strings_in(tool)]
        texts += [(turn, text) for turn, message in enumerate(conversation.messages) for text in strings_of(message)]
        for turn, text in texts:
            for token in (*self.special, _BEGIN, _END):
                if token in text:
                    raise ConversationError(
                        "control_text",
                        f"a text holds {token!r}, which in what a Jinja template writes cannot be told from the "
                        "template's own: rewrite the text, or use --template step3p5, where it is ordinary characters",
                        turn,
                    )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> _Rendering:
        try:
            marked = _compile(self.source, self.date).render(
                messages=[_as_hugging_face(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **dict(self.named_tokens),
            )
        except TemplateError as error:
            raise ConversationError("template_refusal", f"template {self.name} refuses it: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # What a template does to values of another kind than it was written for.
            what = f"template {self.name} fails on it: {type(error).__name__}: {error}"
            raise ConversationError("template_refusal", what) from None
        return _without_marks(marked, self.name)


def jinja_template(choice: str, tokenizer: Path, special: Collection[str], date: str | None = None) -> JinjaTemplate:
    """Opens the template beside a tokenizer (``hf``) or a file; see :func:`steptron.data.chat.template.open_template`.

    Raises:
        DataError: there is none, or it is no valid Jinja; or ``date`` is no date.
    """
    if date is not None and not _is_date(date):
        raise DataError(f"--date {date}: must be a date as YYYY-MM-DD")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = _tokenizer_config(folder / TOKENIZER_CONFIG_FILE)
    source = _beside_tokenizer(folder, config) if choice == "hf" else _from_file(choice)
    name = "hf" if choice == "hf" else Path(choice).name
    tokens = ((key, _token_text(config.get(key))) for key in _NAMED_TOKENS)
    try:
        _compile(source, date)
    except TemplateError as error:
        raise DataError(f"chat template {name} is no valid Jinja: {error}") from error
    named = tuple((key, token) for key, token in tokens if token)
    return JinjaTemplate(name, source, named, tuple(sorted(special)), date)


def _from_file(choice: str) -> str:
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--template {choice}: not `step3p5`, not `hf`, and not a file that can be read ({error})"
        ) from error


def _beside_tokenizer(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if set(named) != {"default"}:
            raise DataError(
                f"{folder / TOKENIZER_CONFIG_FILE}: holds several chat templates ({', '.join(map(str, named))}): write "
                "the one that is meant to a file, and name that with --template"
            )
        source = named["default"]
    if not isinstance(source, str):
        raise DataError(
            f"{folder}: no chat template beside the tokenizer ({TEMPLATE_FILE}, or `chat_template` in "
            f"{TOKENIZER_CONFIG_FILE}); name a file, or use --template step3p5"
        )
    return source


def _tokenizer_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    return config if isinstance(config, dict) else {}


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _as_hugging_face(message: Message) -> dict[str, Any]:
    """A message as templates expect it: fields that are not given are not there."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        record |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({"id": call.id} if call.id is not None else {})
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return record | {key: value for key, value in optional.items() if value is not None}


def _said(text: str, special: Sequence[str]) -> int:
    """How much of what a turn adds the model says: to the last special token, where only white space follows it."""
    stripped = text.rstrip()
    return len(stripped) if any(stripped.endswith(token) for token in special) else len(text)


def _first_difference(first: str, second: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _without_marks(marked: str, name: str) -> _Rendering:
    """Takes the marks of generation blocks out of a text."""
    text: list[str] = []
    blocks: list[tuple[int, int]] = []
    length, start = 0, None
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN and start is None:
            start = length
        elif part == _END and start is not None:
            blocks.append((start, length))
            start = None
        elif part in (_BEGIN, _END):
            raise ConversationError("template_refusal", f"template {name} nests or cuts generation blocks")
        else:
            text.append(part)
            length += len(part)
    return _Rendering("".join(text), tuple(blocks))


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: what the assistant says, between two marks."""

    tags = {"generation"}  # noqa: RUF012 - the library's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@functools.lru_cache(maxsize=8)
def _compile(source: str, date: str | None) -> Template:
    """Compiles a template as Hugging Face does: the same settings, filters and functions, but for today's date."""

    def strftime_now(pattern: str) -> str:
        if date is None:
            raise TemplateError(
                "it writes today's date (strftime_now), and a dataset must not depend on the day it is built; give the "
                "day with --date"
            )
        return datetime.fromisoformat(date).strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _is_date(text: str) -> bool:
    try:
        return datetime.strptime(text, "%Y-%m-%d").strftime("%Y-%m-%d") == text
    except ValueError:
        return False
