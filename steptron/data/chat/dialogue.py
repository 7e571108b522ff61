"""A conversation with a model as token ids: what it is given, and what it says, exactly as it said it.

Within a trajectory ids only grow: a turn of the model stays the ids that it generated, whatever its text would be
tokenized to, and new turns are put behind them. A new user turn that drops reasoning from the context starts a new
sample, as in training (:meth:`steptron.data.chat.template.MarkupTemplate.samples`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steptron.data.chat.answers import Answer, parse_answer
from steptron.data.chat.checks import check_prompt
from steptron.data.chat.conversation import Message, read_messages, read_tools
from steptron.data.chat.masks import SampleTokenizer
from steptron.data.chat.pieces import Run
from steptron.data.chat.special import special_tokens
from steptron.data.chat.template import MarkupTemplate, built_in
from steptron.data.tokenizer import Tokenizer


class ChatFormat:
    """A template and a tokenizer: what turns messages into token ids, and ids back into messages.

    Args:
        tokenizer: of the model.
        template: how conversations are written.

    Attributes:
        end_token: id of the token that ends a turn of the model.

    Raises:
        DataError: the tokenizer lacks a token that the template writes.
    """

    def __init__(self, tokenizer: Tokenizer, template: MarkupTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = built_in("step3p5") if template is None else template
        special = special_tokens(tokenizer)
        self.template.check_tokenizer(special)
        self._samples = SampleTokenizer(tokenizer, special)
        self.end_token: int = special[self.template.end_of_turn]

    def prompt_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """What a model is given to answer a conversation that is known as text alone.

        Args:
            messages: as in a conversation of a dataset, the last one a user's or a tool's.
            tools: schemas in OpenAI's form.

        Raises:
            ConversationError: a field or the order of turns is wrong, or a text cannot be written in the template.
        """
        turns = read_messages(messages)
        check_prompt(turns)
        return self.tokens(self.template.prompt(turns, read_tools(tools or ())))

    def parse_completion(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Answer:
        """Reads what a model has said; see :func:`steptron.data.chat.answers.parse_answer`."""
        return parse_answer(text, tools or ())

    def tokens(self, runs: Sequence[Run]) -> list[int]:
        """Token ids of runs, each tokenized by itself."""
        return self._samples.ids(runs)


@dataclass
class Trajectory:
    """Token ids that only grow.

    Attributes:
        tokens: what the model was given and said.
        said: for each whether the model said it.
    """

    tokens: list[int] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], said: bool) -> None:
        """Puts tokens behind the others."""
        self.tokens += tokens
        self.said += [said] * len(tokens)


class Dialogue:
    """A conversation that goes on.

    Args:
        form: template and tokenizer.
        tools: schemas in OpenAI's form.

    Attributes:
        messages: all turns so far, those of the model as they were understood.
        trajectories: token ids; the last one grows, those before it were ended by a user turn that drops reasoning.
    """

    def __init__(self, form: ChatFormat, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._form = form
        self._tools = read_tools(tools)
        self.messages: list[Message] = []
        self.trajectories = [Trajectory()]

    def give(self, *messages: Mapping[str, Any]) -> list[int]:
        """Adds turns of others, all that come before the model speaks again (answers to all of its calls, together).

        Returns:
            The ids that the model continues: all of the trajectory.

        Raises:
            ConversationError: a field or the order of turns is wrong, or a text cannot be written in the template;
                nothing has been added then.
        """
        added = read_messages(messages, len(self.messages))
        together = (*self.messages, *added)
        check_prompt(together)
        template = self._form.template
        latest_user = max((turn for turn, one in enumerate(self.messages) if one.role == "user"), default=-1)
        drops = any(one.role == "user" for one in added) and any(
            one.reasoning for one in self.messages[latest_user + 1 :]
        )
        if drops or not self.messages:
            tokens = self._form.tokens(template.prompt(together, self._tools))
        else:  # turns before are written already, by the model itself or as they were given
            tokens = self._form.tokens((*template.after_answer(), *template.prompt(added)))
        if drops:
            self.trajectories.append(Trajectory())
        self.trajectories[-1].extend(tokens, said=False)
        self.messages += added
        return self.trajectories[-1].tokens

    def answered(self, tokens: Sequence[int]) -> Answer:
        """Adds a turn of the model.

        Args:
            tokens: as it generated them, the one that ends the turn included if it came to it.

        Returns:
            What it says; its calls have ids. A turn without its end (too long) is a turn too, but nothing should be put
            behind it.
        """
        self.trajectories[-1].extend(tokens, said=True)
        ended = bool(tokens) and tokens[-1] == self._form.end_token
        text = self._form.tokenizer.decode(tokens[:-1] if ended else tokens)
        answer = self._form.parse_completion(text, self._tools)
        earlier = sum(len(one.tool_calls) for one in self.messages)
        named = [replace(call, id=f"call_{number}") for number, call in enumerate(answer.tool_calls, start=earlier)]
        answer = replace(answer, tool_calls=tuple(named))
        self.messages.append(answer.message())
        return answer
