"""Which conversations may be trained on: the order of turns, calls and their answers, something to learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steptron.data.chat.conversation import Conversation, Message, ToolCall
from steptron.data.chat.problems import ConversationError


def check_trainable(conversation: Conversation) -> None:
    """Checks the turns of a conversation against each other.

    Raises:
        ConversationError: the first mistake.
    """
    declared = {tool["function"]["name"] for tool in conversation.tools}
    for turn, _ in _in_order(conversation.messages):
        message = conversation.messages[turn]
        if message.role == "assistant":
            _check_assistant(message, declared, turn)
    last = conversation.messages[-1:]
    if not last or last[0].role != "assistant":
        role = f"of role {last[0].role}" if last else "missing"
        raise ConversationError(
            "last_turn", f"the last turn is {role}: it must be the assistant's", len(conversation.messages) - 1
        )
    if not any(message.trained for message in conversation.messages):
        raise ConversationError("nothing_trained", "`loss_mask` is 0 on every assistant turn: nothing would be trained")


def check_prompt(messages: Sequence[Message]) -> None:
    """Checks the turns that a model is given to answer. What the model has said before is taken as it is.

    Raises:
        ConversationError: the first mistake.
    """
    open_calls = next((calls for _, calls in reversed(list(_in_order(messages)))), [])
    if not messages or messages[-1].role not in ("user", "tool"):
        role = f"of role {messages[-1].role}" if messages else "missing"
        raise ConversationError(
            "last_turn", f"the last turn is {role}: a model answers a user or a tool", len(messages) - 1
        )
    if open_calls:
        raise ConversationError(
            "unanswered_call",
            f"the call of {open_calls[0].name!r} has no answer: a turn of role tool must answer each call first",
            len(messages) - 1,
        )


def _in_order(messages: Sequence[Message]) -> Iterator[tuple[int, list[ToolCall]]]:
    """Goes through turns that follow each other as they should, with the calls that are open after each."""
    previous: Message | None = None
    open_calls: list[ToolCall] = []  # calls of the last assistant turn that no tool has answered yet
    for turn, message in enumerate(messages):
        _check_order(previous, message, turn)
        if message.role == "tool":
            _check_answer(message, open_calls, turn)
            del open_calls[0]
        elif open_calls:
            raise ConversationError(
                "unanswered_call",
                f"role {message.role} while the call of {open_calls[0].name!r} has no answer: a turn of role tool must "
                "answer each call first",
                turn,
            )
        if message.role == "assistant":
            open_calls = list(message.tool_calls)
        yield turn, open_calls
        previous = message


def _check_order(previous: Message | None, message: Message, turn: int) -> None:
    """Whether a role may follow another: [system] (user (assistant [tool...])...)..."""
    before = "nothing" if previous is None else previous.role
    allowed = {
        "system": ("nothing",),
        "user": ("nothing", "system", "assistant", "tool"),
        "assistant": ("user", "tool", "assistant"),
        "tool": ("assistant", "tool"),
    }[message.role]
    # What follows a turn with calls, or an answer too many, is judged by the calls: the message is clearer.
    if message.role == "tool" and before not in allowed:
        raise ConversationError("stray_answer", f"a tool's answer after {before}: no call stands before it", turn)
    if message.role == "assistant" and previous is not None and before == "assistant" and previous.tool_calls:
        return
    if before not in allowed or (message.role == before == "assistant"):
        hint = {
            "system": "a system turn can only be the first",
            "user": "an assistant turn must stand between two user turns: join them",
            "assistant": "a user turn (or a tool's answer) must come before",
            "tool": "",
        }[message.role]
        raise ConversationError("role_order", f"role {message.role} after {before}: {hint}", turn)


def _check_answer(answer: Message, open_calls: Sequence[ToolCall], turn: int) -> None:
    if not open_calls:
        raise ConversationError(
            "stray_answer", "an answer of a tool that was not called: every call before it is answered", turn
        )
    call = open_calls[0]
    if answer.tool_call_id is not None and answer.tool_call_id != call.id:
        raise ConversationError(
            "stray_answer",
            f"answers call {answer.tool_call_id!r}, but call {call.id!r} ({call.name}) is next: answers must stand in "
            "the order of the calls",
            turn,
        )
    if answer.name is not None and answer.name != call.name:
        raise ConversationError("stray_answer", f"tool {answer.name!r} answers the call of {call.name!r}", turn)


def _check_assistant(message: Message, declared: set[str], turn: int) -> None:
    if not message.tool_calls and not (message.content or "").strip():
        raise ConversationError(
            "empty_turn", "an assistant turn without content and tool calls: nothing could be learned but silence", turn
        )
    for call in message.tool_calls:
        if call.name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise ConversationError(
                "undeclared_tool", f"calls {call.name!r}, which `tools` does not declare (declared: {known})", turn
            )
