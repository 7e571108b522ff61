"""A request on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from steptron.data.tokenizer import StreamDecoder
from steptron.engine.blocks import Key
from steptron.engine.cache import Blocks
from steptron.engine.request import GeneratedToken, Request
from steptron.engine.sampling import Draft


@dataclass(eq=False)
class Sequence:
    """A request, its answer so far, and what is cached of both.

    Attributes:
        id: of the request.
        request: what was asked.
        expires: when its time is over, on the engine's clock; None: never.
        text: of the answer, where there is a tokenizer.
        tokens: prompt and answer.
        generated: tokens of the answer.
        computed: tokens whose keys and values are cached.
        blocks: what it holds in each group of layers.
        version: of the weights that computed all that is cached; None where several did.
        keys: of its blocks that are whole and can be found by others.
        hidden_NH: hidden states of the last computed places, which the MTP layers have not seen as they are.
        drafts: tokens that may follow.
        follows: a request with the same prompt that computes it first.
    """

    id: int
    request: Request
    expires: float | None
    text: TextEnd | None
    tokens: list[int]
    blocks: list[Blocks]
    version: int | None
    generated: list[GeneratedToken] = field(default_factory=list)
    computed: int = 0
    keys: list[Key] = field(default_factory=list)
    hidden_NH: Tensor | None = None
    drafts: list[Draft] = field(default_factory=list)
    follows: Sequence | None = None

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.tokens) - self.computed

    def forget(self) -> None:
        """What was cached is gone: all of it is to be computed again."""
        self.computed, self.keys, self.hidden_NH, self.drafts = 0, [], None, []


class TextEnd:
    """The text of an answer, token by token, up to a stop string.

    Args:
        decoder: of the tokenizer.
        stop: strings that end the text; the one found first is left out.
    """

    def __init__(self, decoder: StreamDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain after a token, and whether a stop string has ended it."""
        return self._certain(self._decoder.push(token))

    def finish(self) -> str:
        """What is still held back when the answer has ended otherwise."""
        text, stopped = self._certain(self._decoder.finish())
        return text if stopped else text + self._held

    def _certain(self, more: str) -> tuple[str, bool]:
        self._held += more
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
