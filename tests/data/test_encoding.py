"""Masked character spans, token by token, against a reference that works on bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steptron.data.encoding import Document, Encoder, is_validation, parse, tokens_in_spans
from steptron.data.readers import BadDocument, Fields, RawDocument
from tests.data.corpora import small_tokenizer, varied_texts

TOKENIZER = small_tokenizer()
BACKEND = tokenizers.Tokenizer.from_str(TOKENIZER.file_bytes.decode())
ALPHABET = st.sampled_from(list("ab  \nthe→é漢字😀👩\u200d\u0301€\x00"))


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's table between the 256 bytes and the symbols that stand for them in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


SYMBOLS = _byte_of_symbol()


def slow_masked_tokens(text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """Walks through tokens byte by byte; a token is masked if any of its bytes belongs to a masked character."""
    character_of_byte = [index for index, character in enumerate(text) for _ in character.encode("utf-8")]
    masked = []
    position = 0
    for token in TOKENIZER.encode(text):
        symbols = BACKEND.id_to_token(token) or ""
        assert bytes(SYMBOLS[symbol] for symbol in symbols) == text.encode()[position : position + len(symbols)]
        characters = character_of_byte[position : position + len(symbols)]
        masked.append(any(start <= character < end for character in characters for start, end in spans))
        position += len(symbols)
    assert position == len(text.encode())
    return masked


@st.composite
def texts_with_spans(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    text = draw(st.text(ALPHABET, min_size=1, max_size=50))
    borders = st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text)))
    spans = draw(st.lists(borders.filter(lambda span: span[0] < span[1]), max_size=4))
    return text, spans


@given(texts_with_spans())
@example(("漢", [(0, 1)]))
@example((" the", [(0, 1)]))
@example(("the the", [(2, 3)]))
@example(("a b", [(0, 3)]))
@settings(max_examples=300, deadline=None)
def test_masked_tokens_equal_the_byte_by_byte_reference(case: tuple[str, list[tuple[int, int]]]) -> None:
    text, spans = case
    _, offsets = TOKENIZER.encode_with_offsets(text)
    assert tokens_in_spans(offsets, spans, len(text)).tolist() == slow_masked_tokens(text, spans)


def test_a_span_of_one_character_masks_all_tokens_that_share_its_bytes_and_no_other() -> None:
    text = "a漢b"
    _, offsets = TOKENIZER.encode_with_offsets(text)
    masked_T = tokens_in_spans(offsets, [(1, 2)], len(text))
    ids = TOKENIZER.encode(text)
    assert masked_T.sum() > 1  # the character is split over tokens
    assert TOKENIZER.decode([token for token, masked in zip(ids, masked_T, strict=True) if masked]) == "漢"


def test_spans_end_before_their_end_and_the_end_of_document_counts() -> None:
    encoder = Encoder(TOKENIZER, Fields(), 0, 0.0, np.dtype("<u2"))
    line = b'{"text": "abc", "masked_spans": [[0, 1], [2, 3]]}'
    batch = encoder.encode([RawDocument("f", 1, 0, True, line), RawDocument("g", None, 0, False, b"abc")])
    assert batch.loss_mask_T is not None
    ids = TOKENIZER.encode("abc")
    expected = [not masked for masked in slow_masked_tokens("abc", [(0, 1), (2, 3)])]
    assert batch.loss_mask_T.tolist() == [*expected, True, *[True] * len(ids), True]
    assert batch.tokens_T.tolist() == [*ids, 0, *ids, 0]


def test_a_batch_without_spans_has_no_mask() -> None:
    encoder = Encoder(TOKENIZER, Fields(), 0, 0.0, np.dtype("<u2"))
    for line in (b'{"text": "abc", "masked_spans": []}', b'{"text": "abc", "masked_spans": null}', b'{"text": "abc"}'):
        assert encoder.encode([RawDocument("f", 1, 0, True, line)]).loss_mask_T is None


BAD_LINES = {
    b'{"text": "abc"': ("invalid_json", "delimiter"),
    b"[" * 100_000: ("invalid_json", "recursion"),
    b'["abc"]': ("wrong_type", "JSON array, not an object"),
    b"null": ("wrong_type", "JSON null, not an object"),
    b'{"body": "abc"}': ("missing_field", "'text' is missing; there are: body"),
    b'{"text": null}': ("missing_field", "'text' is null"),
    b'{"text": 3}': ("wrong_type", "'text' is a JSON number, not a string"),
    b'{"text": ["a"]}': ("wrong_type", "'text' is a JSON array, not a string"),
    b'{"text": ""}': ("empty_document", "empty"),
    b'{"text": "a\xff"}': ("invalid_utf8", "byte 0xff"),
    b'{"text": "a\\ud800"}': ("invalid_utf8", "lone surrogate at character 1"),
    b'{"text": "abc", "masked_spans": [[1, 1]]}': ("bad_spans", r"\[1, 1\] is empty"),
    b'{"text": "abc", "masked_spans": [[0, 4]]}': ("bad_spans", "text of 3 characters"),
    b'{"text": "abc", "masked_spans": [[-1, 2]]}': ("bad_spans", "text of 3 characters"),
    b'{"text": "abc", "masked_spans": [[2, 1]]}': ("bad_spans", "text of 3 characters"),
    b'{"text": "abc", "masked_spans": [[0.0, 1]]}': ("bad_spans", "two whole numbers"),
    b'{"text": "abc", "masked_spans": [[true, 2]]}': ("bad_spans", "two whole numbers"),
    b'{"text": "abc", "masked_spans": [0, 1]}': ("bad_spans", "two whole numbers"),
    b'{"text": "abc", "masked_spans": [[0, 1, 2]]}': ("bad_spans", "two whole numbers"),
    b'{"text": "abc", "masked_spans": "0-1"}': ("bad_spans", "str instead of a list"),
    # Six bytes but two characters: spans count characters.
    '{"text": "漢字", "masked_spans": [[0, 3]]}'.encode(): ("bad_spans", "text of 2 characters"),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40].decode("latin-1"))
def test_bad_lines_are_told_apart_and_explained(line: bytes) -> None:
    kind, message = BAD_LINES[line]
    found = parse(RawDocument("corpus.jsonl", 7, 0, True, line), Fields())
    assert isinstance(found, BadDocument)
    assert (found.file, found.line, found.kind) == ("corpus.jsonl", 7, kind)
    assert re.search(message, found.message)


def test_invalid_utf8_in_a_text_file_is_reported_with_its_line() -> None:
    found = parse(RawDocument("notes.txt", None, 0, False, b"one\ntwo\nthr\xe9e\n"), Fields())
    assert found == BadDocument("notes.txt", 3, "invalid_utf8", "byte 0xe9 at offset 11: invalid continuation byte")


def test_fields_can_have_other_names() -> None:
    raw = RawDocument("f", 1, 0, True, b'{"content": "abc", "hide": [[0, 2]], "text": 3}')
    assert parse(raw, Fields("content", "hide")) == Document("abc", [(0, 2)])


def test_the_split_depends_on_text_and_seed_alone_and_keeps_its_share() -> None:
    texts = [text.encode() for text in varied_texts(20_000)]
    first = [is_validation(text, 1, 0.1) for text in texts]
    assert [is_validation(text, 1, 0.1) for text in reversed(texts)] == first[::-1]
    assert abs(sum(first) - 2_000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    other = [is_validation(text, 2, 0.1) for text in texts]
    assert abs(sum(a and b for a, b in zip(first, other, strict=True)) - 200) < 80
    # A larger fraction only adds documents.
    assert all(is_validation(text, 1, 0.2) for text, chosen in zip(texts, first, strict=True) if chosen)
    assert not any(is_validation(text, 1, 0.0) for text in texts)
