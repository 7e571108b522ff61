"""What can be wrong with a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    # the line
    "invalid_json",
    "invalid_utf8",
    "duplicate_field",
    "missing_field",
    "unknown_field",
    "wrong_type",
    # the messages
    "unknown_role",
    "role_order",
    "empty_turn",
    "last_turn",
    "bad_mask",
    "nothing_trained",
    # tools
    "bad_tools",
    "bad_tool_call",
    "undeclared_tool",
    "stray_answer",
    "unanswered_call",
    # the rendering
    "control_text",
    "template_refusal",
    "not_a_prefix",
    "too_long",
]
KINDS: tuple[str, ...] = get_args(Kind)


class ConversationError(Exception):
    """A conversation that must not be trained on.

    Attributes:
        kind: what sort of mistake.
        message: which turn, what is wrong, and what would be right.
        turn: number of the message that is wrong, from 0; None where it is no single one.
    """

    def __init__(self, kind: Kind, message: str, turn: int | None = None) -> None:
        self.kind = kind
        self.message = message if turn is None else f"message {turn}: {message}"
        super().__init__(self.message)
        self.turn = turn


@dataclass(frozen=True)
class BadConversation:
    """A refused conversation and where it stands; ``message`` names the number of the wrong turn, if it is one."""

    file: str
    line: int | None
    turn: int | None
    kind: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.kind}: {self.message}"
