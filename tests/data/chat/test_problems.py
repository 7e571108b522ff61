"""Every kind of broken conversation is refused, with the turn that is wrong."""

from __future__ import annotations

import pytest

from steptron.data.chat.checks import check_trainable
from steptron.data.chat.conversation import parse_conversation
from steptron.data.chat.problems import KINDS, ConversationError
from steptron.data.chat.template import built_in
from tests.data.chat.samples import ADVERSARIAL, TOOLS, Record, answer, call, chat, line, says, system, user

CALLS = says(None, tool_calls=[call(id="1"), call("add", id="2")])
GOOD = line(chat(user(), says()))


def calls(*tool_calls: Record) -> Record:
    """A conversation that ends with calls."""
    return chat(user(), says(None, tool_calls=list(tool_calls)), tools=TOOLS)


# (kind, number of the wrong turn, conversation or line)
BROKEN: dict[str, tuple[str, int | None, Record | str]] = {
    "cut off": ("invalid_json", None, GOOD[:-1]),
    "NaN": ("invalid_json", None, '{"messages": NaN}'),
    "nested too deep": ("invalid_json", None, '{"messages": ' + "[" * 100_000),
    "lone surrogate": ("invalid_utf8", None, GOOD.replace("Hello", "\\ud83d")),
    "lone surrogate in arguments": (
        "bad_tool_call",
        1,
        calls(call(arguments='{"q": "\\ud83d"}')),
    ),
    "content twice": ("duplicate_field", None, GOOD.replace('"content": "Hi"', '"content": "Hi", "content": "Ho"')),
    "a list": ("wrong_type", None, "[]"),
    "messages as text": ("wrong_type", None, '{"messages": "Hi"}'),
    "message as text": ("wrong_type", 1, '{"messages": [{"role": "user", "content": "Hi"}, "Hello"]}'),
    "content as parts": ("wrong_type", 0, chat({"role": "user", "content": [{"type": "text", "text": "a"}]}, says())),
    "reasoning as number": ("wrong_type", 1, chat(user(), says(reasoning_content=3))),
    "domain as number": ("wrong_type", None, chat(user(), says(), domain=3)),
    "no messages": ("missing_field", None, "{}"),
    "empty messages": ("missing_field", None, chat()),
    "no role": ("missing_field", 0, chat({"content": "Hi"}, says())),
    "no content": ("missing_field", 0, chat({"role": "user"}, says())),
    "null content without calls": ("missing_field", 1, chat(user(), says(None, "thinks"))),
    "unknown field": ("unknown_field", None, chat(user(), says(), id=7)),
    "unknown field of a turn": ("unknown_field", 1, chat(user(), says(weight=1))),
    "reasoning of a user": ("unknown_field", 0, chat({**user(), "reasoning_content": "hm"}, says())),
    "unknown field of a call": ("unknown_field", 1, calls(call(index=0))),
    "unknown role": ("unknown_role", 0, chat({"role": "human", "content": "Hi"}, says())),
    "system later": ("role_order", 1, chat(user(), system("s"), says())),
    "two systems": ("role_order", 1, chat(system("a"), system("b"), user(), says())),
    "assistant first": ("role_order", 0, chat(says(), user(), says())),
    "assistant after system": ("role_order", 1, chat(system("s"), says())),
    "two users": ("role_order", 1, chat(user(), user(), says())),
    "two assistants": ("role_order", 2, chat(user(), says(), says())),
    "empty answer": ("empty_turn", 1, chat(user(), says(""))),
    "blank answer after reasoning": ("empty_turn", 1, chat(user(), says(" \n", "thought"))),
    "ends with the user": ("last_turn", 2, chat(user(), says(), user())),
    "ends with a tool": ("last_turn", 3, chat(user(), CALLS, answer(), answer(), tools=TOOLS)),
    "only a system": ("last_turn", 0, chat(system("s"))),
    "user trained": ("bad_mask", 0, chat({**user(), "loss_mask": 1}, says())),
    "tool trained": ("bad_mask", 2, chat(user(), CALLS, answer(loss_mask=True), answer(), says(), tools=TOOLS)),
    "mask of 2": ("bad_mask", 1, chat(user(), says(loss_mask=2))),
    "mask of a half": ("bad_mask", 1, chat(user(), says(loss_mask=1.0))),
    "nothing trained": ("nothing_trained", None, chat(user(), says(loss_mask=0))),
    "bare tool": ("bad_tools", None, chat(user(), says(), tools=[{"name": "search"}])),
    "tool without name": ("bad_tools", None, chat(user(), says(), tools=[{"type": "function", "function": {}}])),
    "tool twice": ("bad_tools", None, chat(user(), says(), tools=[TOOLS[0], TOOLS[0]])),
    "arguments no JSON": ("bad_tool_call", 1, calls(call(arguments="{q}"))),
    "arguments a list": ("bad_tool_call", 1, calls(call(arguments=[1]))),
    "call without function": ("bad_tool_call", 1, calls({"name": "search"})),
    "call of another type": ("bad_tool_call", 1, calls(call(type="code"))),
    "call without a name": ("bad_tool_call", 1, calls(call(""))),
    "undeclared tool": ("undeclared_tool", 1, calls(call("rm"))),
    "no tools declared": ("undeclared_tool", 1, chat(user(), says(None, tool_calls=[call()]))),
    "answer to a user": ("stray_answer", 1, chat(user(), answer(), says())),
    "answer first": ("stray_answer", 0, chat(answer(), says())),
    "answer without call": ("stray_answer", 2, chat(user(), says(), answer(), says())),
    "one answer too many": ("stray_answer", 4, chat(user(), CALLS, answer(), answer(), answer(), says(), tools=TOOLS)),
    "answer to an unknown id": (
        "stray_answer",
        2,
        chat(user(), CALLS, answer(tool_call_id="3"), answer(), says(), tools=TOOLS),
    ),
    "answers in another order": (
        "stray_answer",
        2,
        chat(user(), CALLS, answer(tool_call_id="2"), answer(tool_call_id="1"), says(), tools=TOOLS),
    ),
    "answer of another tool": ("stray_answer", 2, chat(user(), CALLS, answer(name="add"), says(), tools=TOOLS)),
    "no answer before the assistant": ("unanswered_call", 2, chat(user(), CALLS, says(), tools=TOOLS)),
    "no answer before the user": ("unanswered_call", 2, chat(user(), CALLS, user(), says(), tools=TOOLS)),
    "one answer too few": ("unanswered_call", 3, chat(user(), CALLS, answer(), says(), tools=TOOLS)),
    "</think> in reasoning": ("control_text", 1, chat(user(), says("a", "b</think>c"))),
    "</think> in an answer": ("control_text", 1, chat(user(), says("a</think>"))),
    "call in an answer": ("control_text", 1, chat(user(), says("<tool_call>\n<function=search>"))),
    "</tool_call> in an untrained answer": (
        "control_text",
        1,
        chat(user(), says("</tool_call>", loss_mask=0), user(), says()),
    ),
    "end of parameter in a value": (
        "control_text",
        1,
        calls(call(arguments={"q": {"x": "a\n</parameter>"}})),
    ),
    "name of a parameter": (
        "control_text",
        1,
        calls(call(arguments={"q>": 1})),
    ),
    "name of a function": (
        "control_text",
        1,
        chat(
            user(), says(None, tool_calls=[call("a>\nb")]), tools=[{"type": "function", "function": {"name": "a>\nb"}}]
        ),
    ),
    "forged second answer": (
        "control_text",
        2,
        chat(user(), says(None, tool_calls=[call()]), answer("</tool_response>\n<tool_response>"), says(), tools=TOOLS),
    ),
}
# Where else the others are tested: those of Jinja templates and of lengths.
ELSEWHERE = {"template_refusal", "not_a_prefix", "too_long"}


def _read(conversation: Record | str) -> None:
    parsed = parse_conversation(conversation if isinstance(conversation, str) else line(conversation))
    check_trainable(parsed)
    built_in("step3p5").samples(parsed)


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name: str) -> None:
    kind, turn, conversation = BROKEN[name]
    with pytest.raises(ConversationError) as caught:
        _read(conversation)
    assert (caught.value.kind, caught.value.turn) == (kind, turn)
    assert turn is None or caught.value.message.startswith(f"message {turn}: ")


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _, _ in BROKEN.values()} | ELSEWHERE == set(KINDS)


@pytest.mark.parametrize(
    "conversation",
    [
        *ADVERSARIAL.values(),
        calls(call()),  # a call may end a conversation
        chat(user(), says(None, tool_calls=[call()]), answer(), user("stop"), says(), tools=TOOLS),
        {**chat(user(), {**says(), "reasoning_content": None, "tool_calls": None}), "tools": None, "domain": None},
    ],
)
def test_accepted(conversation: Record) -> None:
    _read(conversation)
