"""Chat templates: what turns a conversation into samples.

The interface that every template has, and the one that is described by a data file (``templates/*.yaml``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr

from steptron.data.chat.conversation import Conversation, Message, ToolCall
from steptron.data.chat.jinja import jinja_template
from steptron.data.chat.pieces import Piece, Run, Sample
from steptron.data.chat.problems import ConversationError
from steptron.data.errors import DataError

BUILT_IN = ("step3p5",)


class ChatTemplate(Protocol):
    """What turns conversations into samples: a pure function of the template, which can be pickled.

    Attributes:
        label: name and SHA-256 of the template, as datasets record it.
    """

    @property
    def label(self) -> str: ...

    def check_tokenizer(self, special_tokens: Collection[str]) -> None:
        """Whether the template can be written with a tokenizer's special tokens.

        Raises:
            DataError: a token is missing.
        """

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Renders a conversation that ``check_trainable`` accepts.

        Every trained turn is trained in exactly one sample, after the context that the model sees at inference.

        Raises:
            ConversationError: the conversation cannot be written in this template.
        """


class _Refused(BaseModel):
    """Strings that must not stand in a text, by the place of the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    reasoning: list[str]
    answer: list[str]
    value: list[str]
    name: list[str]
    tool_answer: list[str]


class MarkupTemplate(BaseModel):
    """A template of fixed forms with slots, read from a data file; ``templates/step3p5.yaml`` explains the fields.

    Reasoning is retained selectively: an assistant turn's reasoning is part of the context until the next user turn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    controls: list[str]
    markup: list[str]
    system: str
    user: str
    tool_turn: str
    tool_answer: str
    between_answers: str
    generation_prompt: str
    completion: str
    after_completion: str
    reasoning: str
    call: str
    parameter: str
    between_content_and_calls: str
    between_calls: str
    tools: str
    system_with_tools: str
    refused: _Refused
    _sha256: str = PrivateAttr(default="")

    @classmethod
    def load(cls, content: bytes) -> MarkupTemplate:
        """Reads the content of a data file."""
        template = cls.model_validate(yaml.safe_load(content))
        template._sha256 = hashlib.sha256(content).hexdigest()
        return template

    @property
    def label(self) -> str:
        return f"{self.name} sha256:{self._sha256}"

    def check_tokenizer(self, special_tokens: Collection[str]) -> None:
        if missing := [token for token in self.controls if token not in special_tokens]:
            raise DataError(
                f"chat template {self.name} writes {missing[0]}, which is no special token of this tokenizer: use a "
                "tokenizer that has it, or a template of its own (--template hf)"
            )

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Renders a conversation.

        A user turn that drops reasoning from the context starts a new sample, whose context are the turns before it
        without their reasoning. Its turns are trained; those before it were trained where they were said.
        """
        messages = conversation.messages
        users = [turn for turn, message in enumerate(messages) if message.role == "user"]
        samples: list[Sample] = []
        begin = 0
        for user, end in zip(users, [*users[1:], len(messages)], strict=True):
            has_reasoning = any(message.reasoning for message in messages[user:end])
            if not has_reasoning and end < len(messages):
                continue  # nothing is dropped at the next user turn: the sample goes on
            # Of the turns since `begin`, only those after the latest user turn can have reasoning.
            if any(message.trained for message in messages[begin:end]):
                samples.append(self._runs(messages[:end], conversation.tools, trained_from=begin))
            begin = end
        return samples

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Sample:
        """What the model is given before its next turn; the completion follows as a run of its own.

        What the model has said before is written as it is, also where it could not be told from the form.
        """
        runs = self._runs(messages, tools, trained_from=len(messages), refuses=False)
        return (*runs, Run(self._fill(self.generation_prompt)))

    def after_answer(self) -> Sample:
        """What stands between a turn that the model has said and the next one."""
        return (Run(self._fill(self.after_completion)),)

    @property
    def end_of_turn(self) -> str:
        """The special token that ends what the model says."""
        parts = reversed(self._parts(self.completion))
        return next(part.text for part in parts if isinstance(part, Piece) and part.is_markup)

    def _runs(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], trained_from: int, refuses: bool = True
    ) -> Sample:
        latest_user = max((turn for turn, message in enumerate(messages) if message.role == "user"), default=-1)
        runs: list[Run] = []
        system = messages[0].content if messages and messages[0].role == "system" else None
        if tools or system is not None:
            runs.append(Run(self._system_turn(system, tools)))
        answers: list[Piece] = []
        for turn, message in enumerate(messages):
            if message.role == "user":
                runs.append(Run(self._fill(self.user, content=[Piece(message.content or "")])))
            elif message.role == "assistant":
                runs.append(Run(self._fill(self.generation_prompt)))
                if refuses:
                    self._refuse_ambiguous(message, turn)
                completion = self._completion(message, keep_reasoning=turn > latest_user)
                runs.append(Run(completion, message.trained and turn >= trained_from))
                runs.append(Run(self._fill(self.after_completion)))
            elif message.role == "tool":
                self._refuse(message.content, self.refused.tool_answer, turn, "a tool's answer")
                answers += self._fill(self.between_answers) if answers else ()
                answers += self._fill(self.tool_answer, content=[Piece(message.content or "")])
                if turn + 1 == len(messages) or messages[turn + 1].role != "tool":
                    runs.append(Run(self._fill(self.tool_turn, answers=answers)))
                    answers = []
        return tuple(runs)

    def _system_turn(self, system: str | None, tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        content = [Piece(system or "")]
        if tools:
            own = self._fill(self.system_with_tools, content=content) if system else ()
            schemas = "\n".join(_json(tool) for tool in tools)
            return self._fill(self.system, content=(*self._fill(self.tools, tools=[Piece(schemas)]), *own))
        return self._fill(self.system, content=content)

    def _refuse_ambiguous(self, message: Message, turn: int) -> None:
        self._refuse(message.content, self.refused.answer, turn, "an answer")
        self._refuse(message.reasoning, self.refused.reasoning, turn, "reasoning")
        for call in message.tool_calls:
            self._refuse(call.name, self.refused.name, turn, "the name of a function")
            for name, value in call.arguments.items():
                self._refuse(name, self.refused.name, turn, "the name of a parameter")
                self._refuse(_written(value), self.refused.value, turn, f"the value of parameter {name!r}")

    def _completion(self, message: Message, keep_reasoning: bool) -> tuple[Piece, ...]:
        reasoning: Sequence[Piece] = ()
        if message.reasoning and keep_reasoning:
            reasoning = self._fill(self.reasoning, reasoning=[Piece(message.reasoning)])
        calls: list[Piece] = []
        for number, call in enumerate(message.tool_calls):
            between = self.between_calls if number else self.between_content_and_calls if message.content else ""
            calls += [*self._fill(between), *self._call(call)]
        return self._fill(self.completion, reasoning=reasoning, content=[Piece(message.content or "")], calls=calls)

    def _call(self, call: ToolCall) -> tuple[Piece, ...]:
        parameters: list[Piece] = []
        for name, value in call.arguments.items():
            parameters += self._fill(self.parameter, name=[Piece(name)], value=[Piece(_written(value))])
        return self._fill(self.call, name=[Piece(call.name)], parameters=parameters)

    def _refuse(self, text: str | None, strings: Sequence[str], turn: int, where: str) -> None:
        for string in strings:
            if text and string in text:
                raise ConversationError(
                    "control_text",
                    f"{where} holds {string!r}, which there cannot be told from what template {self.name} writes: it "
                    "has no escapes, so rewrite the text",
                    turn,
                )

    def _fill(self, form: str, **slots: Sequence[Piece]) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        for part in self._parts(form):
            if isinstance(part, Piece):
                pieces.append(part)
            else:
                pieces += [piece for piece in slots[part] if piece.text]
        return tuple(pieces)

    def _parts(self, form: str) -> list[Piece | str]:
        """The pieces that a form writes, and the names of its slots."""
        parts = self._parts_of_form.get(form)
        if parts is None:
            parts = self._parts_of_form[form] = list(_split(form, self._pattern))
        return parts

    @cached_property
    def _parts_of_form(self) -> dict[str, list[Piece | str]]:
        return {}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        markup = sorted([*self.controls, *self.markup], key=len, reverse=True)
        return re.compile(r"\{(?P<slot>\w+)\}|(?P<markup>" + "|".join(map(re.escape, markup)) + ")")


@cache
def built_in(name: str) -> MarkupTemplate:
    """A template that comes with Steptron."""
    return MarkupTemplate.load((resources.files(__package__) / "templates" / f"{name}.yaml").read_bytes())


def open_template(
    choice: str, tokenizer: Path, special_tokens: Collection[str], date: str | None = None
) -> ChatTemplate:
    """Opens a template and checks that it can be written with a tokenizer.

    Args:
        choice: name of a built-in template; ``hf`` for the one beside the tokenizer; or a file of Jinja.
        tokenizer: ``tokenizer.json`` or the folder that holds it.
        special_tokens: its special tokens.
        date: YYYY-MM-DD, what a Jinja template takes for today.

    Raises:
        DataError: no such template, or one that cannot be used.
    """
    template: ChatTemplate
    if choice in BUILT_IN:
        template = built_in(choice)
        if date is not None:
            raise DataError(f"--date {date}: template {choice} writes no date; leave it out")
    else:
        template = jinja_template(choice, tokenizer, special_tokens, date)
    template.check_tokenizer(special_tokens)
    return template


def _split(form: str, pattern: re.Pattern[str]) -> Iterator[Piece | str]:
    """Cuts a form into pieces of text and markup, and the names of its slots."""
    position = 0
    for match in pattern.finditer(form):
        if match.start() > position:
            yield Piece(form[position : match.start()])
        yield match["slot"] or Piece(match["markup"], is_markup=True)
        position = match.end()
    if position < len(form):
        yield Piece(form[position:])


def _written(value: object) -> str:
    """The value of a parameter: strings raw, all else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
