"""A conversation: its messages and tools, and how a JSON line is read into one.

Reading checks the form of every field; whether the turns follow each other as they should is for ``checks.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NoReturn, cast, get_args

from steptron.data.chat.problems import ConversationError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
_CONVERSATION_FIELDS = frozenset({"messages", "tools", "domain"})
_FIELDS_OF_ROLE: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "loss_mask"}),
    "user": frozenset({"role", "content", "loss_mask"}),
    "assistant": frozenset({"role", "content", "loss_mask", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "loss_mask", "tool_call_id", "name"}),
}


_TYPES: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", NoneType: "null"}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments`` as an object, also where the line held it as a JSON string."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: who speaks.
        content: the text; None only beside tool calls.
        reasoning: reasoning before the answer; empty reasoning is none.
        tool_calls: the assistant's calls.
        trained: whether the model learns to say this.
        tool_call_id: the call that a tool answers, where the line says so.
        name: the tool that answers, where the line says so.
    """

    role: Role
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    trained: bool = False
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools' schemas in OpenAI's form (``{"type": "function", "function": {...}}``), and a domain."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    domain: str | None = None


def parse_conversation(line: str) -> Conversation:
    """Reads a JSON line.

    Raises:
        ConversationError: not JSON, or a field that is missing, unknown or of a wrong form.
    """
    record = _load_json(line)
    if not isinstance(record, dict):
        raise ConversationError("wrong_type", f"the line is {_a(record)}, not an object with `messages`")
    _refuse_unknown(record, _CONVERSATION_FIELDS, None)
    if record.get("messages") is None:
        raise ConversationError("missing_field", "there are no `messages`: a list of turns is needed")
    messages = _typed(record, "messages", list, None)
    if not messages:
        raise ConversationError(
            "missing_field", "`messages` is empty: a user and an assistant turn at least are needed"
        )
    return Conversation(
        tuple(_message(message, turn) for turn, message in enumerate(messages)),
        tuple(_tools(_optional(record, "tools", list, None) or [])),
        _optional(record, "domain", str, None),
    )


def read_messages(records: Sequence[Mapping[str, Any]], first: int = 0) -> tuple[Message, ...]:
    """Reads turns that are no line of a file.

    Args:
        records: as in ``messages`` of a line.
        first: number of the first of them, for errors.

    Raises:
        ConversationError: a field is missing, unknown or of a wrong form.
    """
    return tuple(_message(record, turn) for turn, record in enumerate(records, start=first))


def read_tools(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Checks schemas of tools, in OpenAI's form.

    Raises:
        ConversationError: one is of another form, or a name is declared twice.
    """
    return tuple(_tools(list(records)))


def strings_of(message: Message) -> Iterator[str]:
    """Every string of a message that a template may write, names and arguments of calls included."""
    yield from (text for text in (message.content, message.reasoning, message.tool_call_id, message.name) if text)
    for call in message.tool_calls:
        yield call.name
        yield call.id or ""
        yield from strings_in(call.arguments)


def strings_in(value: object) -> Iterator[str]:
    """Every string of a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)


def _message(record: object, turn: int) -> Message:
    if not isinstance(record, dict):
        raise ConversationError("wrong_type", f"{_a(record)}, not an object with `role` and `content`", turn)
    if record.get("role") is None:
        raise ConversationError("missing_field", f"no `role`: it is one of {', '.join(ROLES)}", turn)
    role = _typed(record, "role", str, turn)
    if role not in ROLES:
        raise ConversationError("unknown_role", f"role {role!r} is none of {', '.join(ROLES)}", turn)
    _refuse_unknown(record, _FIELDS_OF_ROLE[role], turn, f" of a message of role {role}")
    calls = _optional(record, "tool_calls", list, turn) or []
    content = _optional(record, "content", str, turn)
    if content is None and not calls:
        raise ConversationError("missing_field", "no `content`: it may be null beside `tool_calls` only", turn)
    return Message(
        role=cast(Role, role),
        content=content,
        reasoning=_optional(record, "reasoning_content", str, turn) or None,
        tool_calls=tuple(_tool_call(call, turn) for call in calls),
        trained=_trained(record, role, turn),
        tool_call_id=_optional(record, "tool_call_id", str, turn),
        name=_optional(record, "name", str, turn),
    )


def _trained(record: Mapping[str, Any], role: str, turn: int) -> bool:
    mask = record.get("loss_mask")
    if mask is None:
        return role == "assistant"
    if mask not in (0, 1) or isinstance(mask, float):
        raise ConversationError("bad_mask", f"`loss_mask` is {json.dumps(mask)}: it must be 0 or 1", turn)
    if mask and role != "assistant":
        raise ConversationError(
            "bad_mask", f"`loss_mask` is 1 on role {role}: only assistant turns are trained, so 0 or nothing", turn
        )
    return bool(mask)


def _tool_call(record: object, turn: int) -> ToolCall:
    def refuse(what: str) -> NoReturn:
        raise ConversationError("bad_tool_call", what, turn)

    if not isinstance(record, dict) or not isinstance(record.get("function"), dict):
        refuse('a tool call must be {"function": {"name": ..., "arguments": {...}}}')
    function = record["function"]
    if unknown := sorted(set(record) - {"id", "type", "function"}) + sorted(set(function) - {"name", "arguments"}):
        raise ConversationError("unknown_field", f"a tool call has no field {unknown[0]!r}", turn)
    if record.get("type", "function") != "function":
        refuse(f"type {record['type']!r} of a tool call is not known: it must be 'function'")
    call_id, name, arguments = record.get("id"), function.get("name"), function.get("arguments")
    if call_id is not None and not isinstance(call_id, str):
        refuse(f"`id` of a tool call is {_a(call_id)}, not a string")
    if not isinstance(name, str) or not name:
        refuse("a tool call needs a `name`: a string that is not empty")
    if isinstance(arguments, str):
        try:
            arguments = _load_json(arguments)
        except ConversationError as error:
            refuse(f"`arguments` of the call of {name!r} are no JSON: {error.message}")
    if not isinstance(arguments, dict):
        refuse(f"`arguments` of the call of {name!r} are {_a(arguments)}, not an object of values by parameter")
    return ToolCall(name, arguments, call_id)


def _tools(records: list[Any]) -> Iterator[dict[str, Any]]:
    names: set[str] = set()
    for number, record in enumerate(records):
        function = record.get("function") if isinstance(record, dict) else None
        if not isinstance(function, dict) or record.get("type") != "function":
            form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise ConversationError("bad_tools", f"tool {number} must be {form}")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ConversationError("bad_tools", f"tool {number} needs a `name`: a string that is not empty")
        if name in names:
            raise ConversationError("bad_tools", f"tool {number}: {name!r} is declared twice")
        names.add(name)
        yield record


def _typed(record: Mapping[str, Any], field: str, wanted: type, turn: int | None) -> Any:
    if not isinstance(record[field], wanted):
        raise ConversationError("wrong_type", f"`{field}` is {_a(record[field])}, not {_TYPES[wanted]}", turn)
    return record[field]


def _optional(record: Mapping[str, Any], field: str, wanted: type, turn: int | None) -> Any:
    return None if record.get(field) is None else _typed(record, field, wanted, turn)


def _refuse_unknown(record: Mapping[str, Any], known: frozenset[str], turn: int | None, where: str = "") -> None:
    if unknown := sorted(set(record) - known):
        raise ConversationError("unknown_field", f"unknown field {unknown[0]!r}; fields{where}: {_listed(known)}", turn)


def _load_json(text: str) -> Any:
    """JSON without what Python lets through: fields given twice, NaN, lone surrogates."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConversationError("invalid_json", str(error)) from None
    if "\\ud" in text or "\\uD" in text:  # a surrogate can come from an escape only: the line itself was UTF-8
        for string in strings_in(value):
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise ConversationError("invalid_utf8", "a string holds a lone surrogate, which no text can")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConversationError("duplicate_field", f"field {twice!r} is given twice in one object")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _a(value: object) -> str:
    """A JSON value's type, with its article."""
    return _TYPES.get(type(value), "a number")


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
