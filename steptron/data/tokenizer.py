"""Tokenizers: trained here (byte-level BPE) or loaded from a ``tokenizer.json`` file or a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from steptron.data.errors import DataError
from steptron.data.limits import LARGEST_VOCABULARY

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
END_OF_DOCUMENT = "<|endoftext|>"
# Ids 0..15 of a tokenizer trained here. The chat markers and the reserved names cost nothing during
# pre-training and spare later stages a change of the vocabulary.
SPECIAL_TOKENS = (
    END_OF_DOCUMENT,
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|reserved_{index}|>" for index in range(3, 16)),
)
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


class Tokenizer:
    """A Hugging Face ``tokenizers`` tokenizer with a known end-of-document token.

    Text is never read for special tokens unless asked to: the string ``<|endoftext|>`` inside a
    document is encoded as ordinary characters, so no document can end itself.

    Attributes:
        eod_id: id of the end-of-document token.
        eod_token: its text.
        vocab_size: largest id plus one, added tokens included.
        file_bytes: content of the ``tokenizer.json`` it was made from.
        hash: SHA-256 of ``file_bytes``, hexadecimal; equal for tokenizers that encode alike.
    """

    def __init__(self, file_bytes: bytes, eod_token: str, origin: str = "tokenizer") -> None:
        """Reads the content of a ``tokenizer.json``; ``origin`` is named in errors.

        Raises:
            DataError: the content is no tokenizer, or has no token ``eod_token``.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(file_bytes.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{origin}: not a tokenizer.json that the tokenizers library can read ({error})") from error
        eod_id = backend.token_to_id(eod_token)
        if eod_id is None:
            raise DataError(f"{origin}: has no token {eod_token!r} to end documents with; name one with --eod-token")
        # What a tokenizer.json may carry for inference would corrupt training data: truncation drops
        # text, padding adds tokens, and a post-processor may trim spaces out of the offsets.
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None
        self._backend = backend
        self._set_special_parsing(False)
        self.eod_token = eod_token
        self.eod_id: int = eod_id
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.file_bytes = file_bytes
        self.hash = hashlib.sha256(file_bytes).hexdigest()

    @classmethod
    def load(cls, path: str | Path, eod_token: str | None = None) -> Tokenizer:
        """Loads a ``tokenizer.json`` file, a Hugging Face folder or a dataset folder.

        Args:
            path: the file, or a folder that holds ``tokenizer.json``.
            eod_token: end-of-document token; by default ``eos_token`` of the ``tokenizer_config.json``
                beside the file, else ``<|endoftext|>``.

        Raises:
            DataError: no such file, not a tokenizer, or no end-of-document token.
        """
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            wanted = f"folder without {TOKENIZER_FILE}" if path.is_dir() else "no such file or folder"
            raise DataError(f"{path}: {wanted}; give a {TOKENIZER_FILE} or a folder that holds one")
        if eod_token is None:
            eod_token = _configured_eos(file.parent / TOKENIZER_CONFIG_FILE) or END_OF_DOCUMENT
        return cls(file.read_bytes(), eod_token, origin=str(file))

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json``, byte for byte the original, and ``tokenizer_config.json`` with the end token."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_bytes(self.file_bytes)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eod_token}
        (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text, without an end-of-document token.

        Args:
            text: the text.
            parse_special: turn the names of special tokens in the text into those tokens.
        """
        if not parse_special:
            return self._backend.encode(text, add_special_tokens=False).ids
        self._set_special_parsing(True)
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._set_special_parsing(False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and for each the characters [start, end) of the text that it covers, in part or whole."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self._backend, skip_special)

    def _set_special_parsing(self, parse: bool) -> None:
        self._backend.encode_special_tokens = not parse


class StreamDecoder:
    """Decodes tokens one by one; text is handed out only when no character is cut in half."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._stream = decoders.DecodeStream(skip_special_tokens=skip_special)
        self._held_ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; empty while a character is unfinished."""
        text = self._stream.step(self._backend, token_id)
        if text is None:
            self._held_ids.append(token_id)
            return ""
        self._held_ids.clear()
        return text

    def finish(self) -> str:
        """What is still held back at the end; an unfinished character becomes U+FFFD."""
        text = self._backend.decode(self._held_ids, skip_special_tokens=self._skip_special)
        self._held_ids.clear()
        return text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer.

    Every byte has a token of its own, so any text survives a round trip. Ids 0..15 are
    ``SPECIAL_TOKENS`` (``<|endoftext|>`` is 0), the next 256 the bytes, then the merges. The result
    has fewer than ``vocab_size`` tokens only if the texts offer no more pairs to merge.

    Raises:
        DataError: ``vocab_size`` is too small for the special tokens and the bytes, or past ``LARGEST_VOCABULARY``.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocabulary of {vocab_size}: too small; {len(SPECIAL_TOKENS)} special tokens and 256 bytes need "
            f"at least {SMALLEST_VOCABULARY}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"vocabulary of {vocab_size}: too large; at most {LARGEST_VOCABULARY} are allowed")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str(pretty=True).encode("utf-8"), END_OF_DOCUMENT)


def _configured_eos(file: Path) -> str | None:
    """``eos_token`` of a ``tokenizer_config.json``: a string, or an object with ``content``."""
    if not file.is_file():
        return None
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file}: not a JSON object ({error})") from error
    if isinstance(eos, dict):
        eos = eos.get("content")
    if eos is not None and not isinstance(eos, str):
        raise DataError(f"{file}: eos_token is neither a string nor an object with a string `content`")
    return eos
