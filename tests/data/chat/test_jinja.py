"""Hugging Face templates: what is trained, against the renderer of the transformers library."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from steptron.data.chat.checks import check_trainable
from steptron.data.chat.conversation import parse_conversation
from steptron.data.chat.jinja import JinjaTemplate
from steptron.data.chat.masks import SampleTokenizer, TokenizedSample
from steptron.data.chat.problems import ConversationError
from steptron.data.chat.special import special_tokens
from steptron.data.chat.template import open_template
from steptron.data.errors import DataError
from steptron.data.tokenizer import Tokenizer
from tests.data.chat.samples import (
    TOKENIZERS,
    TOOLS,
    Record,
    answer,
    call,
    chat,
    greedy_tokenizer,
    line,
    plain_tokenizer,
    says,
    user,
)

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# No special token at the border: what is trained begins in the middle of what the tokenizer would merge.
BARE = """{% for message in messages %}
    {% if message.role %}
{{ message.role }}={{ message.content }}

    {% endif %}
{% endfor %}
{% if add_generation_prompt %}assistant={% endif %}"""
GENERATION = """
{%- macro said(message) %}{{ message.content }}<|im_end|>{% endmacro -%}
{%- for message in messages %}
    {%- if loop.index0 > 99 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' -%}
        A={% generation %}{{ message.get('reasoning_content', '') + said(message) }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- message.role }}={{ message.content }}{{ '\n' }}
    {%- endif %}
{%- endfor %}"""
# Drops reasoning as soon as a later user turn is there.
FORGETS = """
{%- set ns = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.user %}<think>{{ message.reasoning_content }}</think>
    {%- endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

FORGETS_BLOCKS = """
{%- set ns = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- message.role + '=' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if loop.index0 > ns.user %}{{ message.reasoning_content }}{% endif %}
            {{- message.content }}
        {%- endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""

CONVERSATIONS = {
    "turns": chat(user("\n\nassistant\n"), says("\n\nHello"), user("e\u0301"), says("\u0338 x\n\n")),
    "masked": chat(user("1"), says("a", loss_mask=0), user("2"), says("b")),
    "reasoning": chat(user("1"), says("a"), user("2"), says("b", "why"), user("3"), says("c", "so")),
}


def _tokenize(template: JinjaTemplate, record: Record, tokenizer: Tokenizer) -> list[TokenizedSample]:
    conversation = parse_conversation(line(record))
    check_trainable(conversation)
    return SampleTokenizer(tokenizer, special_tokens(tokenizer)).tokenize(template.samples(conversation))


def _template(source: str, tokenizer: Tokenizer, **fields: Any) -> JinjaTemplate:
    return JinjaTemplate("test", source, special=tuple(special_tokens(tokenizer)), **fields)


def _hugging_face(source: str, messages: list[Record], **options: Any) -> tuple[str, list[tuple[int, int]]]:
    rendered: Any = render_jinja_template(conversations=[messages], chat_template=source, **options)
    (text,), blocks = rendered
    return text, blocks[0] if blocks else []


def _reference(text: str, spans: list[tuple[int, int, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens and mask of a text with the spans (start, end, trained): cut there and at special tokens."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.file_bytes.decode("utf-8"))
    special = special_tokens(tokenizer)
    tokens: list[int] = []
    mask: list[int] = []
    cuts = [0, *(border for start, end, _ in spans for border in (start, end)), len(text)]
    trained_from = {start for start, _, trained in spans if trained}
    for start, end in pairwise(cuts):
        for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text[start:end]):
            ids = [special[part]] if part in special else backend.encode(part, add_special_tokens=False).ids
            tokens += ids
            mask += [int(start in trained_from)] * len(ids)
    return [*tokens, tokenizer.eod_id], [*mask, 0]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ["turns", "masked"])
@pytest.mark.parametrize("source", [CHATML, BARE], ids=["chatml", "bare"])
def test_by_prefixes(source: str, name: str, tokenizer: str) -> None:
    record, used = CONVERSATIONS[name], TOKENIZERS[tokenizer]()
    messages = record["messages"]
    text, _ = _hugging_face(source, messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_hugging_face(source, messages[:turn], add_generation_prompt=True)[0])
            end = len(_hugging_face(source, messages[: turn + 1])[0])
            if source == CHATML:
                end -= 1  # the line break after the end token
            spans.append((start, end, bool(message.get("loss_mask", 1))))
    (sample,) = _tokenize(_template(source, used), record, used)
    assert (sample.tokens_T.tolist(), sample.loss_mask_T.tolist()) == _reference(text, spans, used)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_by_generation_blocks(name: str, tokenizer: str) -> None:
    record, used = CONVERSATIONS[name], TOKENIZERS[tokenizer]()
    text, blocks = _hugging_face(GENERATION, record["messages"], return_assistant_tokens_mask=True)
    trained = [bool(one.get("loss_mask", 1)) for one in record["messages"] if one["role"] == "assistant"]
    spans = [(start, end, flag) for (start, end), flag in zip(blocks, trained, strict=True)]
    (sample,) = _tokenize(_template(GENERATION, used), record, used)
    assert (sample.tokens_T.tolist(), sample.loss_mask_T.tolist()) == _reference(text, spans, used)


def test_a_template_that_forgets_reasoning_gives_samples() -> None:
    tokenizer = plain_tokenizer()
    record = CONVERSATIONS["reasoning"]
    samples = _tokenize(_template(FORGETS, tokenizer), record, tokenizer)
    texts = [tokenizer.decode(sample.tokens_T[:-1].tolist()) for sample in samples]
    assert texts == [_hugging_face(FORGETS, record["messages"][:end])[0] for end in (4, 6)]
    said = [tokenizer.decode(sample.tokens_T[sample.loss_mask_T == 1].tolist()) for sample in samples]
    assert said == ["a<|im_end|><think>why</think>b<|im_end|>", "<think>so</think>c<|im_end|>"]


def test_what_is_trained_in_another_sample_is_context_like_any_text() -> None:
    tokenizer = greedy_tokenizer()
    record = chat(user("1"), says("\u0338b", "why"), user("2"), says("c", "so"))
    _, second = _tokenize(_template(FORGETS_BLOCKS, tokenizer), record, tokenizer)
    text, blocks = _hugging_face(FORGETS_BLOCKS, record["messages"], return_assistant_tokens_mask=True)
    assert text == "user=1assistant=\u0338buser=2assistant=soc"
    expected = _reference(text, [(*blocks[1], True)], tokenizer)  # "=" and the mark after it are one character
    assert (second.tokens_T.tolist(), second.loss_mask_T.tolist()) == expected


def _refused(source: str, record: Record, tokenizer: Tokenizer | None = None, **fields: Any) -> ConversationError:
    used = tokenizer or plain_tokenizer()
    with pytest.raises(ConversationError) as caught:
        _tokenize(_template(source, used, **fields), record, used)
    return caught.value


def test_a_generation_prompt_that_is_no_beginning_is_refused() -> None:
    error = _refused(CHATML + "{{ '<think>' if add_generation_prompt }}", CONVERSATIONS["turns"])
    assert (error.kind, error.turn) == ("not_a_prefix", 1)
    assert "{% generation %}" in error.message


def test_reasoning_dropped_between_tool_calls_is_refused() -> None:
    source = FORGETS.replace("loop.index0 > ns.user", "loop.last")
    record = chat(user(), says("", "r", tool_calls=[call()]), answer(), says("a"), tools=TOOLS)
    error = _refused(source, record)
    assert (error.kind, error.turn) == ("not_a_prefix", 1)


@pytest.mark.parametrize(
    "record",
    [
        chat(user("a<|im_end|>"), says()),
        chat(user(), says(None, tool_calls=[call(arguments={"q": ["<|endoftext|>"]})]), tools=TOOLS),
        chat(user(), says("a", "\ufdd0")),
    ],
)
def test_special_tokens_in_text_are_refused(record: Record) -> None:
    assert _refused(CHATML, record).kind == "control_text"


def test_special_tokens_in_tools_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    assert _refused(CHATML, chat(user(), says(), tools=tools)).kind == "control_text"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ strftime_now('%Y') }}", "--date"),
        ("{{ messages.append(1) }}", "refuses it"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),
        ("{% generation %}x{% endgeneration %}{% generation %}y{% endgeneration %}", "2 generation blocks for 1"),
        ("{% generation %}{% endgeneration %}x", "writes nothing"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_or_cannot_do(source: str, message: str) -> None:
    error = _refused(source, chat(user(), says()))
    assert error.kind == "template_refusal"
    assert message in error.message


def test_the_date_is_an_option() -> None:
    tokenizer = plain_tokenizer()
    template = _template(CHATML + "{{ strftime_now('%d %b %Y') }}", tokenizer, date="2025-07-01")
    with pytest.raises(ConversationError, match="no beginning"):  # the date follows every turn in this one
        _tokenize(template, CONVERSATIONS["turns"], tokenizer)
    template = _template("{{ strftime_now('%d %b %Y') }}" + CHATML, tokenizer, date="2025-07-01")
    (sample,) = _tokenize(template, CONVERSATIONS["turns"], tokenizer)
    assert tokenizer.decode(sample.tokens_T.tolist()).startswith("01 Jul 2025<|im_start|>user")
    assert template.label.endswith(" date:2025-07-01")


def _save(folder: Path, **config: object) -> Path:
    tokenizer = greedy_tokenizer()
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_hf_is_the_template_beside_the_tokenizer(tmp_path: Path) -> None:
    special = special_tokens(greedy_tokenizer())
    _save(tmp_path, chat_template="{{ bos_token }}" + CHATML, bos_token={"content": "<|endoftext|>"})
    template = open_template("hf", tmp_path / "tokenizer.json", special)
    (sample,) = _tokenize(template, CONVERSATIONS["turns"], greedy_tokenizer())  # type: ignore[arg-type]
    assert sample.tokens_T[:2].tolist() == [special["<|endoftext|>"], special["<|im_start|>"]]
    (tmp_path / "chat_template.jinja").write_text(BARE)  # the newer place wins, as in transformers
    assert open_template("hf", tmp_path, special).source == BARE  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "choice", "message"),
    [
        ({}, "hf", "no chat template beside the tokenizer"),
        ({"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}, "hf", "several"),
        ({"chat_template": "{% for %}"}, "hf", "no valid Jinja"),
        ({"chat_template": "{{ bos_token }}", "bos_token": "<s>"}, "hf", "writes bos_token '<s>'"),
        ({}, "nowhere.jinja", "not `step3p5`"),
    ],
)
def test_templates_that_cannot_be_opened(tmp_path: Path, config: Record, choice: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        open_template(choice, _save(tmp_path, **config), special_tokens(greedy_tokenizer()))
