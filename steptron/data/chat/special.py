"""The special tokens of a tokenizer, and what a tokenizer needs for conversations."""

from __future__ import annotations

import json

from steptron.data.errors import DataError
from steptron.data.tokenizer import Tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens by their text: those that are never read from ordinary text.

    Added tokens that are not special are words of the tokenizer like any other, wherever they stand.
    """
    added = json.loads(tokenizer.file_bytes).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token["special"]}


def check_pieces_join(tokenizer: Tokenizer) -> None:
    """Checks that a text between two control tokens is tokenized like a text of its own.

    Raises:
        DataError: the tokenizer adds a space before each text (SentencePiece's dummy prefix), so that every piece would
            begin with one that is not in the conversation.
    """
    if tokenizer.encode("x") == tokenizer.encode(" x"):
        raise DataError(
            "this tokenizer adds a space before every text, so that conversations cannot be tokenized piece by piece: "
            "use one without (byte-level tokenizers with add_prefix_space false, as `steptron data tokenizer train`)"
        )
