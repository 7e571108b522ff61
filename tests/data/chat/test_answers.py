"""What models write, well-formed and not, read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steptron.data.chat.answers import parse_answer
from steptron.data.chat.conversation import ToolCall, parse_conversation
from steptron.data.chat.pieces import text_of
from steptron.data.chat.template import built_in

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                    "any": {"type": ["number", "null"]},
                    "free": {},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
PARIS = ToolCall("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("Sunny.", "Sunny.", None, ()),
        ("", "", None, ()),
        ("<think>\nHm.\n</think>\n\nSunny.", "Sunny.", "Hm.", ()),
        ("<think>\nTwo\n\nparagraphs\n</think>\n\n" + CALL, "", "Two\n\nparagraphs", (PARIS,)),
        ("Let me see.\n\n" + CALL, "Let me see.", None, (PARIS,)),
        (CALL + "\n" + CALL, "", None, (PARIS, PARIS)),
        ("1 < 2 and a </b>", "1 < 2 and a </b>", None, ()),
    ],
)
def test_what_is_well_formed(text: str, content: str, reasoning: str | None, calls: tuple[ToolCall, ...]) -> None:
    answer = parse_answer(text, TOOLS)
    assert (answer.content, answer.reasoning, answer.tool_calls) == (content, reasoning, calls)
    assert answer.problems == ()


def test_types_come_from_the_schema() -> None:
    values = {"city": "7", "days": 3, "exact": True, "where": {"lat": [1.5, None]}, "any": None, "free": "{raw"}
    written = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in values.items()
    )
    answer = parse_answer(f"<tool_call>\n<function=get_weather>\n{written}</function>\n</tool_call>", TOOLS)
    assert answer.tool_calls == (ToolCall("get_weather", values),) and answer.problems == ()


@pytest.mark.parametrize("value", ["", "\n", " two\nlines \n", "<b>&amp;</b>", '"quoted"', "</function", "ünï 漢"])
def test_strings_come_back_as_they_were_written(value: str) -> None:
    line = {
        "messages": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "So:",
                "reasoning_content": "r",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": value, "days": 2}}}],
            },
        ],
        "tools": TOOLS,
    }
    (sample,) = built_in("step3p5").samples(parse_conversation(json.dumps(line)))
    said = text_of([run for run in sample if run.trained]).removesuffix("<|im_end|>")
    answer = parse_answer(said, TOOLS)
    assert answer.tool_calls == (ToolCall("get_weather", {"city": value, "days": 2}),)
    assert (answer.content, answer.reasoning, answer.problems) == ("So:", "r", ())


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "problem"),
    [
        ("<think>\nI never st", "", "I never st", (), "does not end with </think>"),
        ("Hm.\n</think>\n\nYes.", "Yes.", "Hm.", (), "does not begin with <think>"),
        (CALL.removesuffix("\n</tool_call>"), "", None, (PARIS,), "does not end with </tool_call>"),
        (CALL.replace("</function>\n", ""), "", None, (PARIS,), "does not end with </function>"),
        (CALL.replace("</parameter>\n", ""), "", None, (PARIS,), "does not end with </parameter>"),
        (CALL.replace("\n", ""), "", None, (PARIS,), None),
        (CALL.replace("get_weather>", "get_weather"), "", None, (PARIS,), None),
        (
            CALL.replace("get_weather", "get_wether"),
            "",
            None,
            (ToolCall("get_wether", {"city": "Paris"}),),
            "get_wether is no declared function: get_weather",
        ),
        (
            CALL.replace("=city", "=town"),
            "",
            None,
            (ToolCall("get_weather", {"town": "Paris"}),),
            "parameter city of get_weather is missing",
        ),
        (
            CALL.replace("</function>", "<parameter=days>\ntwo\n</parameter>\n</function>"),
            "",
            None,
            (ToolCall("get_weather", {"city": "Paris", "days": "two"}),),
            "parameter days of get_weather is no JSON of type integer",
        ),
        (
            CALL.replace("</function>", "<parameter=days>\n1.5\n</parameter>\n</function>"),
            "",
            None,
            (ToolCall("get_weather", {"city": "Paris", "days": 1.5}),),
            "parameter days of get_weather is not of type integer",
        ),
        (
            CALL.replace("</function>", "<parameter=city>\nRome\n</parameter>\n</function>"),
            "",
            None,
            (ToolCall("get_weather", {"city": "Rome"}),),
            "parameter city of get_weather is given twice",
        ),
        ("<tool_call>\nsunny?\n</tool_call>", "<tool_call>\nsunny?\n</tool_call>", None, (), "calls no function"),
        (CALL.removesuffix("</tool_call>") + CALL, "", None, (PARIS, PARIS), "does not end with </tool_call>"),
        (CALL + " and more", " and more", None, (PARIS,), None),
        ("<tool_call>" * 3, "<tool_call>" * 3, None, (), "calls no function"),
    ],
)
def test_mistakes_are_understood_and_named(
    text: str, content: str, reasoning: str | None, calls: tuple[ToolCall, ...], problem: str | None
) -> None:
    answer = parse_answer(text, TOOLS)
    assert (answer.content, answer.reasoning, answer.tool_calls) == (content, reasoning, calls)
    if problem is None:
        assert answer.problems == ()
    else:
        assert any(problem in one for one in answer.problems), answer.problems


def test_long_nonsense_takes_no_time() -> None:
    for text in ("<tool_call>" * 20_000, "<parameter=" * 20_000, "<tool_call><function=f>" + "<parameter=a>" * 20_000):
        parse_answer(text, TOOLS)
