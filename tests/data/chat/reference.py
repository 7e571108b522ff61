"""Template step3p5 written down a second time, slowly: the prompt of every turn, by string formatting.

It knows nothing of samples: each assistant turn has the tokens that the model is given at inference, and those it says.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import tokenizers

from steptron.data.tokenizer import Tokenizer
from tests.data.chat.samples import Record

START, END = "\x01", "\x02"  # stand for the control tokens in strings; no test has them in its texts
_TOOLS_BEFORE = "# Tools\n\nThese functions can be called. Each line is the JSON schema of one:\n\n<tools>\n"
_TOOLS_AFTER = (
    "\n</tools>\n\nA call is written in this form, one block per call, after the reasoning and the answer if there are "
    "any:\n\n{tool_call}\n<function=name_of_function>\n<parameter=name_of_parameter>\nvalue\n</parameter>\n</function>\n"
    "</tool_call>\n\nA value is raw text without quotes or escapes and may have several lines; what is no string is "
    "written as JSON. Required parameters must be given."
)
# Characters of the private use area stand for markup, so that the same strings in a text are no markup.
_MARKUP = {"\ue000": "<think>", "\ue001": "</think>", "\ue002": "<tool_call>", START: "<|im_start|>", END: "<|im_end|>"}


@dataclass(frozen=True)
class TurnTokens:
    """Tokens before an assistant turn and of it."""

    prompt: list[int]
    said: list[int]


def trained_turns(record: Record, tokenizer: Tokenizer) -> list[TurnTokens]:
    """The assistant turns that are trained, in order."""
    messages = record["messages"]
    return [
        TurnTokens(_prompt(record, turn, tokenizer), _tokens(_said(message, keep_reasoning=True), tokenizer))
        for turn, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("loss_mask", 1)
    ]


def _prompt(record: Record, turn: int, tokenizer: Tokenizer) -> list[int]:
    messages = record["messages"]
    latest_user = max(number for number in range(turn) if messages[number]["role"] == "user")
    own = messages[0]["content"] if messages[0]["role"] == "system" else None
    ids: list[int] = []
    if record.get("tools"):
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in record["tools"])
        after = _TOOLS_AFTER.replace("{tool_call}", "\ue002")
        content = _TOOLS_BEFORE + schemas + after + (f"\n\n{own}" if own else "")
        ids += _tokens(f"{START}system\n{content}{END}\n", tokenizer)
    elif own is not None:
        ids += _tokens(f"{START}system\n{own}{END}\n", tokenizer)
    answers: list[str] = []
    for number in range(turn):
        message = messages[number]
        if message["role"] == "user":
            ids += _tokens(f"{START}user\n{message['content']}{END}\n", tokenizer)
        if message["role"] == "assistant":
            ids += _tokens(f"{START}assistant\n", tokenizer)
            ids += _tokens(_said(message, keep_reasoning=number > latest_user), tokenizer)
            ids += _tokens("\n", tokenizer)
        if message["role"] == "tool":
            answers.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            if messages[number + 1]["role"] != "tool":
                ids += _tokens(f"{START}tool_response\n" + "\n".join(answers) + f"{END}\n", tokenizer)
                answers = []
    return ids + _tokens(f"{START}assistant\n", tokenizer)


def _said(message: Record, keep_reasoning: bool) -> str:
    reasoning, content = message.get("reasoning_content"), message["content"] or ""
    text = f"\ue000\n{reasoning}\n\ue001\n\n" if reasoning and keep_reasoning else ""
    text += content
    blocks = []
    for one in message.get("tool_calls") or []:
        arguments = one["function"]["arguments"]
        lines = [f"\ue002\n<function={one['function']['name']}>\n"]
        for name, value in (json.loads(arguments) if isinstance(arguments, str) else arguments).items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={name}>\n{written}\n</parameter>\n")
        blocks.append("".join(lines) + "</function>\n</tool_call>")
    if blocks and content:
        text += "\n\n"
    return text + "\n".join(blocks) + END


def _tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a text with stand-ins for markup; the library itself, told to read no special token."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.file_bytes.decode("utf-8"))
    backend.encode_special_tokens = True
    special = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    for stand_in, markup in _MARKUP.items():
        if markup not in special:
            text = text.replace(stand_in, markup)
    ids: list[int] = []
    for part in re.split(f"([{''.join(_MARKUP)}])", text):
        ids += [special[_MARKUP[part]]] if part in _MARKUP else backend.encode(part, add_special_tokens=False).ids
    return ids
