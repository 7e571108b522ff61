"""From raw documents to tokens and loss masks: what each worker process does."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steptron.data.loss_mask import COUNTS, METADATA
from steptron.data.readers import BadDocument, Fields, RawDocument
from steptron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        text: what it says.
        masked_spans: characters [start, end) of the text whose tokens do not count in the loss.
        metadata: what is said of it before the text; empty where nothing is.
    """

    text: str
    masked_spans: list[tuple[int, int]]
    metadata: str = ""


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as tokens, in input order.

    Attributes:
        tokens_T: all documents' tokens one after the other, each with its end-of-document token.
        loss_mask_T: uint8, bits of ``loss_mask``; None if no document has spans or metadata.
        lengths_D: int64, tokens per document.
        validation_D: bool, documents of the validation split.
        text_bytes_D: int64, UTF-8 bytes of each text.
        masked_bytes_D: int64, those of them whose tokens do not count in the loss.
        sources_D: int64, INPUT of each document.
        bad: what could not become a document.
        metadata_bytes_D: int64, UTF-8 bytes of each document's metadata; None where no document has any.
    """

    tokens_T: np.ndarray
    loss_mask_T: np.ndarray | None
    lengths_D: np.ndarray
    validation_D: np.ndarray
    text_bytes_D: np.ndarray
    masked_bytes_D: np.ndarray
    sources_D: np.ndarray
    bad: list[BadDocument]
    metadata_bytes_D: np.ndarray | None = None


@dataclass(frozen=True)
class Encoder:
    """What turns batches into tokens: a pure function of its fields and the documents."""

    tokenizer: Tokenizer
    fields: Fields
    seed: int
    validation_fraction: float
    dtype: np.dtype

    def __reduce__(self) -> tuple[object, ...]:
        """How a worker process rebuilds it: the tokenizer from the content of its file."""
        tokenizer = (self.tokenizer.file_bytes, self.tokenizer.eod_token)
        return _rebuilt, (tokenizer, self.fields, self.seed, self.validation_fraction, self.dtype)

    def encode(self, items: Sequence[RawDocument | BadDocument]) -> EncodedBatch:
        """Parses and tokenizes a batch."""
        raw: list[RawDocument] = []
        documents: list[Document] = []
        bad: list[BadDocument] = []
        for item in items:
            parsed = item if isinstance(item, BadDocument) else parse(item, self.fields)
            if isinstance(parsed, BadDocument):
                bad.append(parsed)
            else:
                assert isinstance(item, RawDocument)
                raw.append(item)
                documents.append(parsed)

        tokens, masks, masked_bytes = self._tokens_and_masks(documents)
        texts = [document.text.encode("utf-8") for document in documents]
        return EncodedBatch(
            tokens_T=np.concatenate([np.zeros(0, self.dtype), *tokens]),
            loss_mask_T=_join_masks(tokens, masks),
            lengths_D=np.array([len(document) for document in tokens], np.int64),
            validation_D=np.array(
                [is_validation(text, self.seed, self.validation_fraction) for text in texts], np.bool_
            ),
            text_bytes_D=np.array([len(text) for text in texts], np.int64),
            masked_bytes_D=np.array(masked_bytes, np.int64),
            sources_D=np.array([document.source for document in raw], np.int64),
            bad=bad,
            metadata_bytes_D=np.array([len(document.metadata.encode("utf-8")) for document in documents], np.int64),
        )

    def _tokens_and_masks(
        self, documents: list[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray | None], list[int]]:
        """Tokens with the end-of-document token, the loss mask of the documents that have spans or metadata, and the
        UTF-8 bytes of text whose tokens do not count.

        Metadata are encoded apart from the text: no token is of both, and the text's are those without metadata.
        """
        plain = [document.text for document in documents if not document.masked_spans]
        plain_ids = iter(self.tokenizer.encode_batch(plain))
        metadata = [document.metadata for document in documents if document.metadata]
        metadata_ids = iter(self.tokenizer.encode_batch(metadata))
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray | None] = []
        masked_bytes: list[int] = []
        for document in documents:
            if document.masked_spans:
                ids, offsets = self.tokenizer.encode_with_offsets(document.text)
                masked_T = tokens_in_spans(offsets, document.masked_spans, len(document.text))
                masked_bytes.append(_bytes_of_tokens(document.text, offsets, masked_T))
                # The end-of-document token always counts.
                mask_T = np.append(np.where(masked_T, 0, COUNTS), COUNTS).astype(np.uint8)
            else:
                ids = next(plain_ids)
                mask_T = np.full(len(ids) + 1, COUNTS, np.uint8)
                masked_bytes.append(0)
            head_ids = next(metadata_ids) if document.metadata else []
            head_T = np.full(len(head_ids), COUNTS | METADATA, np.uint8)
            has_mask = bool(document.masked_spans or head_ids)
            masks.append(np.concatenate([head_T, mask_T]) if has_mask else None)
            tokens.append(np.array([*head_ids, *ids, self.tokenizer.eod_id], self.dtype))
        return tokens, masks, masked_bytes


def _rebuilt(
    tokenizer: tuple[bytes, str], fields: Fields, seed: int, validation_fraction: float, dtype: np.dtype
) -> Encoder:
    return Encoder(Tokenizer(*tokenizer), fields, seed, validation_fraction, dtype)


def parse(raw: RawDocument, fields: Fields) -> Document | BadDocument:
    """Decodes and checks one raw document."""

    def bad(kind: str, message: str) -> BadDocument:
        return BadDocument(raw.file, raw.line, kind, message)  # type: ignore[arg-type]

    try:
        text: object = raw.payload.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw.payload[error.start]
        if raw.line is None:
            line = raw.payload.count(b"\n", 0, error.start) + 1
            message = f"byte 0x{byte:02x} at offset {error.start}: {error.reason}"
            return BadDocument(raw.file, line, "invalid_utf8", message)
        return bad("invalid_utf8", f"byte 0x{byte:02x} at byte {error.start} of the text: {error.reason}")
    spans, about = raw.spans, raw.metadata
    if raw.is_json:
        try:
            record = json.loads(str(text))
        except (ValueError, RecursionError) as error:
            return bad("invalid_json", str(error))
        if not isinstance(record, dict):
            return bad("wrong_type", f"the line is a JSON {_json_type(record)}, not an object")
        if record.get(fields.text) is None:
            # A name may hold lone surrogates, which no file and no terminal takes.
            names = ", ".join(record).encode("utf-8", "backslashreplace").decode("utf-8")
            state = "is null" if fields.text in record else f"is missing; there are: {names or 'none'}"
            return bad("missing_field", f"field {fields.text!r} {state}")
        text, spans = record[fields.text], record.get(fields.spans)
        about = tuple((name, record.get(name)) for name in fields.metadata)
        if not isinstance(text, str):
            return bad("wrong_type", f"field {fields.text!r} is a JSON {_json_type(text)}, not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return bad("invalid_utf8", f"field {fields.text!r} has a lone surrogate at character {error.start}")
    assert isinstance(text, str)
    if not text:
        return bad("empty_document", "the text is empty")
    problem = _problem_of_spans(spans, len(text))
    if problem is not None:
        return bad("bad_spans", f"field {fields.spans!r}: {problem}")
    for name, value in about:
        problem = _problem_of_metadata(value)
        if problem is not None:
            return bad("wrong_type", f"field {name!r}: {problem}")
    return Document(
        text,
        [(span[0], span[1]) for span in spans or []],  # type: ignore[attr-defined]
        metadata_text((name, str(value)) for name, value in about if value is not None),
    )


def metadata_text(about: Iterable[tuple[str, str]]) -> str:
    """What a document begins with: a line ``name: value`` for each value that is not blank, and an empty line.

    Args:
        about: names and values; white space within a value, which could end its line, becomes single spaces.
    """
    lines = [f"{name}: {' '.join(value.split())}\n" for name, value in about if value.strip()]
    return "".join([*lines, "\n"]) if lines else ""


def tokens_in_spans(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], num_characters: int
) -> np.ndarray:
    """bool [T]: which tokens share a character with a span.

    Args:
        offsets: characters [start, end) of each token. Tokens that split one character between them
            all carry it.
        spans: characters [start, end), in any order, overlapping or not.
        num_characters: length of the text.
    """
    steps_C1 = np.zeros(num_characters + 1, np.int64)
    for start, end in spans:
        steps_C1[start] += 1
        steps_C1[end] -= 1
    masked_C = np.cumsum(steps_C1[:-1]) > 0
    before_C1 = np.concatenate([[0], np.cumsum(masked_C)])
    offsets_T2 = np.array(offsets, np.int64).reshape(-1, 2)
    return before_C1[offsets_T2[:, 1]] > before_C1[offsets_T2[:, 0]]


def _bytes_of_tokens(text: str, offsets: Sequence[tuple[int, int]], chosen_T: np.ndarray) -> int:
    """UTF-8 bytes of the characters that chosen tokens, bool [T], carry."""
    chosen = [offset for offset, is_chosen in zip(offsets, chosen_T.tolist(), strict=True) if is_chosen]
    # Tokens that split a character between them carry it once.
    ends = [0, *itertools.accumulate((end for _, end in chosen), max)]
    return sum(
        len(text[max(start, done) : end].encode("utf-8")) for (start, end), done in zip(chosen, ends, strict=False)
    )


def is_validation(text: bytes, seed: int, fraction: float) -> bool:
    """Whether a document belongs to the validation split.

    Decided by a keyed hash of the text alone: neither order nor number of documents matters, a
    corpus can grow without documents changing sides, and copies of a document are on the same side.
    """
    digest = hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _problem_of_metadata(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return "not UTF-8" if isinstance(value, bytes) else f"a JSON {_json_type(value)}, not a string"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"a lone surrogate at character {error.start}"
    return None


def _problem_of_spans(spans: object, num_characters: int) -> str | None:
    if spans is None:
        return None
    if not isinstance(spans, list):
        return f"{type(spans).__name__} instead of a list of [start, end]"
    for span in spans:
        if not isinstance(span, list) or len(span) != 2 or any(type(border) is not int for border in span):
            return f"{span!r} is not [start, end] with two whole numbers"
        start, end = span
        if start == end:
            return f"{span!r} is empty"
        if not 0 <= start < end <= num_characters:
            return f"{span!r} does not lie within the text of {num_characters} characters"
    return None


def _join_masks(tokens: list[np.ndarray], masks: list[np.ndarray | None]) -> np.ndarray | None:
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [np.full(len(ids), COUNTS, np.uint8) if mask is None else mask for ids, mask in zip(tokens, masks, strict=True)]
    )


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
