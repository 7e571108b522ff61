"""Tokens and masks of template step3p5, token by token against a slow reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptron.data.chat.checks import check_trainable
from steptron.data.chat.conversation import parse_conversation
from steptron.data.chat.masks import SampleTokenizer, TokenizedSample
from steptron.data.chat.special import special_tokens
from steptron.data.chat.template import built_in
from steptron.data.tokenizer import Tokenizer
from tests.data.chat.reference import TurnTokens, trained_turns
from tests.data.chat.samples import ADVERSARIAL, TOKENIZERS, TOOLS, Record, answer, call, chat, line, says, system, user


def tokenize(record: Record, tokenizer: Tokenizer) -> list[TokenizedSample]:
    conversation = parse_conversation(line(record))
    check_trainable(conversation)
    return SampleTokenizer(tokenizer, special_tokens(tokenizer)).tokenize(built_in("step3p5").samples(conversation))


def turns_of(sample: TokenizedSample) -> list[TurnTokens]:
    """What a sample trains, with everything before each trained stretch."""
    tokens, mask = sample.tokens_T.tolist(), sample.loss_mask_T.astype(np.int8)
    borders = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    return [
        TurnTokens(tokens[:start], tokens[start:end]) for start, end in zip(borders[::2], borders[1::2], strict=True)
    ]


def check_against_reference(record: Record, tokenizer: Tokenizer) -> None:
    samples = tokenize(record, tokenizer)
    expected = trained_turns(record, tokenizer)
    assert [turn for sample in samples for turn in turns_of(sample)] == expected
    line_break = tokenizer.encode("\n")
    for sample in samples:
        last = turns_of(sample)[-1]
        tail = sample.tokens_T.tolist()[len(last.prompt) + len(last.said) :]
        assert tail[: len(line_break)] == line_break
        assert tail[-1] == tokenizer.eod_id
    for first, second in pairwise(samples):
        # Two samples that could be one would train the same tokens in more memory.
        assert second.tokens_T.tolist()[: first.tokens_T.size - 1] != first.tokens_T.tolist()[:-1]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_tokens_and_masks_are_those_of_the_reference(name: str, tokenizer: str) -> None:
    check_against_reference(ADVERSARIAL[name], TOKENIZERS[tokenizer]())


def test_the_greedy_tokenizer_merges_across_the_borders() -> None:
    """Otherwise the tests above could not tell one text from two."""
    tokenizer = TOKENIZERS["greedy"]()
    for left, right in (("assistant\n", "\n\nthe"), ("assistant\n", "Hello"), ("=", "\u0338")):
        assert tokenizer.encode(left + right) != tokenizer.encode(left) + tokenizer.encode(right)


@pytest.mark.parametrize(
    ("name", "samples"),
    [("plain", 1), ("retention", 3), ("masked_turns", 1), ("tools", 1), ("only_the_first_is_trained", 1)],
)
def test_a_user_turn_that_drops_reasoning_starts_a_sample(name: str, samples: int) -> None:
    assert len(tokenize(ADVERSARIAL[name], TOKENIZERS["plain"]())) == samples


def test_names_of_special_tokens_in_text_are_no_special_tokens() -> None:
    tokenizer = TOKENIZERS["plain"]()
    (sample,) = tokenize(ADVERSARIAL["special_tokens_in_text"], tokenizer)
    ids = special_tokens(tokenizer)
    counts = np.bincount(sample.tokens_T, minlength=tokenizer.vocab_size)
    assert (counts[ids["<|im_start|>"]], counts[ids["<|im_end|>"]], counts[tokenizer.eod_id]) == (3, 3, 1)


def test_the_prompt_for_inference_is_what_comes_before_the_completion() -> None:
    tokenizer = TOKENIZERS["greedy"]()
    conversation = parse_conversation(line(ADVERSARIAL["retention"]))
    prompt = built_in("step3p5").prompt(conversation.messages[:-1], conversation.tools)
    (tokens,) = SampleTokenizer(tokenizer, special_tokens(tokenizer)).tokenize([prompt])
    assert tokens.tokens_T[:-1].tolist() == trained_turns(ADVERSARIAL["retention"], tokenizer)[-1].prompt
    assert not tokens.loss_mask_T.any()


_WORDS = ["a", "the", " ", "\n", "\u0301", "\u0338", "é", "漢", "<|im_end|>", "=", "{content}"]
_TEXT = st.lists(st.sampled_from(_WORDS), max_size=6).map("".join)
_SAID = _TEXT.filter(str.strip)
_VALUE = st.one_of(_TEXT, st.integers(), st.booleans(), st.none(), st.lists(_TEXT, max_size=2))
_CALLS = st.lists(st.dictionaries(st.sampled_from(["q", "n", "ü"]), _VALUE, max_size=2), min_size=1, max_size=2)


@st.composite
def _trajectory(draw: st.DrawFn) -> list[Record]:
    def fields() -> dict[str, Any]:
        return {"loss_mask": draw(st.sampled_from([0, 1]))} if draw(st.booleans()) else {}

    reasoning = st.none() | _TEXT
    messages = [user(draw(_TEXT))]
    for arguments in draw(st.lists(_CALLS, max_size=2)):
        calls = [call("search", one) for one in arguments]
        messages.append(says(draw(st.none() | _TEXT), draw(reasoning), tool_calls=calls, **fields()))
        messages += [answer(draw(_TEXT)) for _ in calls]
    return [*messages, says(draw(_SAID), draw(reasoning), **fields())]


@st.composite
def _conversations(draw: st.DrawFn) -> Record:
    trajectories = draw(st.lists(_trajectory(), min_size=1, max_size=4))
    first = [system(draw(_TEXT))] if draw(st.booleans()) else []
    messages = [*first, *(message for trajectory in trajectories for message in trajectory)]
    messages[draw(st.sampled_from([turn for turn, one in enumerate(messages) if one["role"] == "assistant"]))].pop(
        "loss_mask", None
    )
    return chat(*messages, tools=TOOLS)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_conversations())
def test_random_conversations_have_the_tokens_and_masks_of_the_reference(record: Record) -> None:
    check_against_reference(record, TOKENIZERS["greedy"]())
