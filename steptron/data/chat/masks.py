"""From rendered samples to tokens and token-exact loss masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptron.data.chat.pieces import Run, Sample
from steptron.data.loss_mask import COUNTS
from steptron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizedSample:
    """Tokens, int64 [T], with the end-of-document token, and a mask, uint8 [T]: ``COUNTS`` where they are trained."""

    tokens_T: np.ndarray
    loss_mask_T: np.ndarray


@dataclass(frozen=True)
class SampleTokenizer:
    """Tokenizes samples.

    A special token is one piece of markup; what lies between two of them in a run is tokenized as one text, in which no
    special token is read. So the tokens of a prompt do not depend on what follows it, those of a completion not on what
    is before, and a token that is trained is one that the model says at inference.

    Attributes:
        tokenizer: what the texts are tokenized with.
        special_tokens: ids of its special tokens by their text.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, int]

    def tokenize(self, samples: Sequence[Sample]) -> list[TokenizedSample]:
        """Tokenizes samples; the end-of-document token of each is not trained, for no model has to say it in a chat."""
        parts = [[(list(self._parts(run)), run.trained) for run in sample] for sample in samples]
        # Headers of turns are the same thousands of times: each text is tokenized once.
        texts = dict.fromkeys(text for sample in parts for run, _ in sample for text in run if isinstance(text, str))
        ids = dict(zip(texts, self.tokenizer.encode_batch(list(texts)), strict=True))
        return [
            self._joined(
                [([part] if isinstance(part, int) else ids[part], trained) for run, trained in sample for part in run]
            )
            for sample in parts
        ]

    def ids(self, runs: Sequence[Run]) -> list[int]:
        """Token ids of runs, without an end-of-document token."""
        parts = [part for run in runs for part in self._parts(run)]
        ids = iter(self.tokenizer.encode_batch([part for part in parts if isinstance(part, str)]))
        return [token for part in parts for token in ([part] if isinstance(part, int) else next(ids))]

    def _parts(self, run: Run) -> Iterator[int | str]:
        """The special tokens of a run, and the texts between them."""
        text: list[str] = []
        for piece in run.pieces:
            if piece.is_markup and piece.text in self.special_tokens:
                if text:
                    yield "".join(text)
                    text = []
                yield self.special_tokens[piece.text]
            elif piece.text:
                text.append(piece.text)
        if text:
            yield "".join(text)

    def _joined(self, parts: Sequence[tuple[list[int], bool]]) -> TokenizedSample:
        tokens = [token for ids, _ in parts for token in ids]
        tokens.append(self.tokenizer.eod_id)
        lengths = [len(ids) for ids, _ in parts]
        mask = np.repeat([trained for _, trained in parts] + [False], [*lengths, 1])
        return TokenizedSample(np.array(tokens, np.int64), np.where(mask, COUNTS, 0).astype(np.uint8))
