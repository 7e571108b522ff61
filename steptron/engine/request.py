"""What is asked of the engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from steptron.engine.sampling import Sampling

StopReason = Literal["eos", "stop", "length", "aborted", "deadline", "error"]
"""Why an answer ended: the model's end-of-sequence token; a stop string or token of the request; its own limit or the
longest sequence; somebody's wish; its time; a failure of the engine."""


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        max_tokens: most tokens to generate.
        stop: strings that end the answer; the engine needs a tokenizer for them.
        stop_tokens: ids that do.
        ignore_eos: go on after the model's end-of-sequence token.
        alternatives: likeliest tokens to report beside each that is chosen.
        deadline_seconds: time for the whole answer, from when it was asked for; None: any.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    alternatives: int = 0
    deadline_seconds: float | None = None


@dataclass(frozen=True)
class GeneratedToken:
    """A token of an answer.

    Attributes:
        token: its id.
        log_probability: natural log of the probability that it was sampled with: after temperature and truncation.
        raw_log_probability: of the model's own distribution.
        version: of the weights that computed it.
        alternatives: the likeliest tokens with their raw log-probabilities, the likeliest first.
    """

    token: int
    log_probability: float
    raw_log_probability: float
    version: int
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Update:
    """What is new of an answer.

    Attributes:
        id: of the request.
        tokens: in their order.
        text: that they make complete; empty without a tokenizer. What may turn out to be a stop string comes later.
        stop_reason: why it has ended; None while it goes on.
        detail: more about that, in words.
    """

    id: int
    tokens: tuple[GeneratedToken, ...]
    text: str = ""
    stop_reason: StopReason | None = None
    detail: str = ""
