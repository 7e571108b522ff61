"""Conversations that go on: token ids that only grow, and are those of training."""

from __future__ import annotations

from typing import Any

import pytest

from steptron.data.chat.checks import check_trainable
from steptron.data.chat.conversation import ToolCall, parse_conversation
from steptron.data.chat.dialogue import ChatFormat, Dialogue
from steptron.data.chat.problems import ConversationError
from steptron.data.chat.template import built_in
from tests.data.chat.samples import ADVERSARIAL, TOOLS, Record, answer, call, chat, line, says, system, user
from tests.data.corpora import small_tokenizer

FORM = ChatFormat(small_tokenizer())
END = small_tokenizer().encode("<|im_end|>", parse_special=True)


def turns(record: Record) -> list[tuple[list[Record], Record]]:
    """What is given before each turn of the assistant, and that turn."""
    found, given = [], []
    for message in record["messages"]:
        if message["role"] == "assistant":
            found.append((given, message))
            given = []
        else:
            # Ids of calls are given by the dialogue.
            given.append({key: value for key, value in message.items() if key != "tool_call_id"})
    return found


MULTI_TURN: dict[str, Record] = {
    name: record
    for name, record in ADVERSARIAL.items()
    if all(given for given, _ in turns(record)) and all("loss_mask" not in turn for turn in record["messages"])
} | {
    "tools then user": chat(
        system("s"),
        user("1"),
        says(None, "first", tool_calls=[call(arguments={"q": "a"}), call("add")]),
        answer("A"),
        answer("B"),
        says("done", "second"),
        user("2"),
        says("x"),
        user("3"),
        says("y", "third"),
        tools=TOOLS,
    ),
    "no reasoning": chat(user("1"), says("a"), user("2"), says("b"), user("3"), says("c")),
}


@pytest.mark.parametrize("name", MULTI_TURN)
def test_token_ids_are_those_of_training(name: str) -> None:
    """What the model would be given and say at inference is, sample by sample, what it was trained on."""
    record = MULTI_TURN[name]
    conversation = parse_conversation(line(record))
    check_trainable(conversation)
    dialogue = Dialogue(FORM, record.get("tools", ()))
    said_turns = [run for sample in built_in("step3p5").samples(conversation) for run in sample if run.trained]
    seen: list[list[int]] = []
    for (given, message), run in zip(turns(record), said_turns, strict=True):
        prompt = list(dialogue.give(*given))
        if seen and len(dialogue.trajectories) == len(seen):
            assert prompt[: len(seen[-1])] == seen[-1], "earlier ids have changed"
        tokens = FORM.tokens([run])
        assert tokens[-1:] == END
        understood = dialogue.answered(tokens)
        if understood.problems == ():
            assert understood.content == (message["content"] or "")
            assert understood.reasoning == (message.get("reasoning_content") or None)
        seen = [list(one.tokens) for one in dialogue.trajectories]
    samples = [
        ([token for run in sample for token in FORM.tokens([run])], sample)
        for sample in built_in("step3p5").samples(conversation)
    ]
    after = FORM.tokens(built_in("step3p5").after_answer())
    assert [one.tokens + after for one in dialogue.trajectories] == [tokens for tokens, _ in samples]
    for trajectory, (_, sample) in zip(dialogue.trajectories, samples, strict=True):
        trained = [run.trained for run in sample for _ in FORM.tokens([run])]
        assert trajectory.said == trained[: len(trajectory.said)]


def test_what_the_model_generated_stays_whatever_its_text_would_be() -> None:
    """Ids that no tokenizer would make of their text."""
    tokenizer = small_tokenizer()
    letters = [token for letter in "the fox" for token in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("the fox")
    dialogue = Dialogue(FORM)
    first = list(dialogue.give(user("Hi")))
    assert dialogue.answered([*letters, *END]).content == "the fox"
    second = dialogue.give(user("And?"))
    assert second[: len(first) + len(letters) + 1] == [*first, *letters, *END]
    assert dialogue.trajectories[0].said.count(True) == len(letters) + 1
    # Known as text alone, it is tokenized.
    known = FORM.prompt_tokens([user("Hi"), {"role": "assistant", "content": "the fox"}, user("And?")])
    assert known != second and tokenizer.decode(known) == tokenizer.decode(second)


def test_a_malformed_turn_is_context_like_any_other() -> None:
    tokenizer, dialogue = small_tokenizer(), Dialogue(FORM, TOOLS)
    dialogue.give(user("Hi"))
    said = dialogue.answered([*tokenizer.encode("<think>\nHm <tool_call>oops"), *END])
    assert said.reasoning == "Hm <tool_call>oops" and said.problems
    dialogue.give(user("What?"))
    assert len(dialogue.trajectories) == 2, "reasoning was dropped: a new sample"
    said = dialogue.answered([*tokenizer.encode("<tool_call>no</tool_call></think>x"), *END])
    assert said.problems and len(dialogue.give(user("Again"))) > 0
    cut = dialogue.answered(tokenizer.encode("it never e"))
    assert cut.content == "it never e"


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([], "last_turn"),
        ([says("x")], "role_order"),
        ([user(), says("x")], "last_turn"),
        ([user(), user()], "role_order"),
        ([system("s")], "last_turn"),
        ([answer()], "stray_answer"),
        ([user(), says(None, tool_calls=[call(), call()]), answer()], "unanswered_call"),
        ([{"role": "user"}], "missing_field"),
        ([{"role": "user", "content": "x", "extra": 1}], "unknown_field"),
    ],
)
def test_prompts_that_nobody_can_answer(messages: list[dict[str, Any]], kind: str) -> None:
    with pytest.raises(ConversationError) as error:
        FORM.prompt_tokens(messages, TOOLS)
    assert error.value.kind == kind
    dialogue = Dialogue(FORM, TOOLS)
    with pytest.raises(ConversationError):
        dialogue.give(*messages)
    assert dialogue.messages == [] and dialogue.trajectories[0].tokens == []


def test_answers_to_calls_are_needed() -> None:
    dialogue = Dialogue(FORM, TOOLS)
    dialogue.give(user("x"))
    text = "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    assert dialogue.answered([*small_tokenizer().encode(text), *END]).tool_calls == (ToolCall("add", {}, "call_0"),)
    with pytest.raises(ConversationError, match="has no answer"):
        dialogue.give(user("never mind"))
    before = len(dialogue.trajectories[0].tokens)
    with pytest.raises(ConversationError, match=r"call 'call_0' .add. is next"):
        dialogue.give(answer("3", tool_call_id="call_1"))
    assert len(dialogue.give(answer("3", tool_call_id="call_0"))) > before
    assert dialogue.answered([*small_tokenizer().encode(text), *END]).tool_calls[0].id == "call_1"
