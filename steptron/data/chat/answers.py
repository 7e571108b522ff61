"""What a model has written, read back: reasoning, answer and calls of tools. Tolerant, for models do make mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steptron.data.chat.conversation import Message, ToolCall

_THINK, _UNTHINK = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(?P<body>.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]*)>?(?P<body>.*)", re.DOTALL)
# A value ends with its tag; where that is missing, with the next parameter or the function.
_PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\n]*)>?(?P<value>.*?)(?P<end></parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


@dataclass(frozen=True)
class Answer:
    """A turn of the assistant.

    Attributes:
        content: what it says to the user; empty where it only calls.
        reasoning: what it has thought before; None without any.
        tool_calls: its calls; ``id`` is None.
        problems: what was not as it should be, in words; nothing of the text is lost for it.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    problems: tuple[str, ...] = ()

    def message(self) -> Message:
        """The turn as a message, which is trained."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls, trained=True)


def parse_answer(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
    """Reads a turn in the form of ``step3p5``: reasoning in ``<think>``, calls as XML with raw values.

    What is not well-formed is taken for what it was most likely meant to be, and said: reasoning that does not end, or
    does not begin; tags that are missing; values that are not of their type; functions that nobody has declared. A
    block in which no function is called stays part of the content.

    Args:
        text: up to the token that ends the turn.
        tools: schemas in OpenAI's form, which say what type a value has.
    """
    problems: list[str] = []
    reasoning, rest = _reasoning(text, problems)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls: list[ToolCall] = []
    content: list[str] = []
    position = 0
    for match in _CALL.finditer(rest):
        call = _call(match["body"], schemas, problems)
        if call is None:
            continue
        if not match[0].endswith("</tool_call>"):
            problems.append(f"the call of {call.name} does not end with </tool_call>")
        content.append(rest[position : match.start()])
        calls.append(call)
        position = match.end()
    content.append(rest[position:])
    # What the form puts between an answer and its calls, and between calls, belongs to neither.
    said = (
        "".join([content[0].removesuffix("\n\n"), *(part for part in content[1:] if part.strip())]) if calls else rest
    )
    return Answer(said, reasoning, tuple(calls), tuple(problems))


def _reasoning(text: str, problems: list[str]) -> tuple[str | None, str]:
    """Reasoning, and the text after it."""
    opened = text.lstrip().startswith(_THINK)
    before, closing, after = text.partition(_UNTHINK)
    if not opened and not closing:
        return None, text
    if not closing:
        problems.append(f"the reasoning does not end with {_UNTHINK}")
        before, after = text, ""
    if not opened:
        problems.append(f"the reasoning does not begin with {_THINK}")
    thought = before.lstrip().removeprefix(_THINK) if opened else before
    return thought.removeprefix("\n").removesuffix("\n"), after.removeprefix("\n\n")


def _call(body: str, schemas: Mapping[str, Mapping[str, Any]], problems: list[str]) -> ToolCall | None:
    function = _FUNCTION.match(body)
    if function is None or not function["name"].strip():
        problems.append("a <tool_call> calls no function")
        return None
    name = function["name"].strip()
    if name not in schemas:
        problems.append(f"{name} is no declared function: {', '.join(schemas) or 'there are none'}")
    if "</function>" not in function["body"]:
        problems.append(f"the call of {name} does not end with </function>")
    properties = schemas.get(name, {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(function["body"]):
        key, where = parameter["name"].strip(), f"parameter {parameter['name'].strip()} of {name}"
        if not parameter["end"]:
            problems.append(f"{where} does not end with </parameter>")
        if key in arguments:
            problems.append(f"{where} is given twice: the last one counts")
        arguments[key] = _value(parameter["value"], properties.get(key), where, problems)
    for required in schemas.get(name, {}).get("required") or ():
        if required not in arguments:
            problems.append(f"parameter {required} of {name} is missing")
    return ToolCall(name, arguments)


def _value(raw: str, schema: Any, where: str, problems: list[str]) -> Any:
    """Strings are written raw, and all else as JSON; the schema says which is which."""
    text = raw.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or "string" in kinds:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        problems.append(f"{where} is no JSON of type {kind}: it is taken as a string")
        return text
    if not any(_is_of_type(value, one) for one in kinds):
        problems.append(f"{where} is not of type {kind}")
    return value


def _is_of_type(value: object, kind: object) -> bool:
    types: dict[object, type | tuple[type, ...]] = {
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
        "null": type(None),
    }
    if kind not in types:
        return True  # no type that JSON Schema knows: nothing to be said
    return isinstance(value, types[kind]) and (kind == "boolean" or not isinstance(value, bool))
