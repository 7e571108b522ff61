"""Tokenizers: nothing lost, nothing added, no half characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.errors import DataError
from steptron.data.limits import LARGEST_VOCABULARY
from steptron.data.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer
from tests.data.corpora import TEXTS, small_tokenizer

TOKENIZER = small_tokenizer()
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_come_first_and_the_vocabulary_has_the_size_asked_for() -> None:
    assert TOKENIZER.eod_id == 0
    assert TOKENIZER.vocab_size == 420
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.file_bytes.decode())
    assert [backend.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(16))


def test_names_of_special_tokens_in_text_are_text_unless_asked_for() -> None:
    text = "a<|endoftext|>b"
    assert TOKENIZER.eod_id not in TOKENIZER.encode(text)
    assert TOKENIZER.eod_id not in TOKENIZER.encode_batch([text])[0]
    assert TOKENIZER.eod_id not in TOKENIZER.encode_with_offsets(text)[0]
    assert TOKENIZER.encode(text, parse_special=True) == [*TOKENIZER.encode("a"), 0, *TOKENIZER.encode("b")]
    assert TOKENIZER.eod_id not in TOKENIZER.encode(text)  # and the request does not last


@given(st.lists(ANY_TEXT, max_size=5))
@settings(max_examples=50, deadline=None)
def test_every_way_to_encode_gives_the_same_ids(texts: list[str]) -> None:
    one_by_one = [TOKENIZER.encode(text) for text in texts]
    assert TOKENIZER.encode_batch(texts) == one_by_one
    assert [TOKENIZER.encode_with_offsets(text)[0] for text in texts] == one_by_one


def test_training_is_deterministic() -> None:
    assert small_tokenizer().file_bytes == TOKENIZER.file_bytes


def test_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    assert train_tokenizer(TEXTS, 272).vocab_size == 272
    with pytest.raises(DataError, match=r"271: too small.*at least 272"):
        train_tokenizer(TEXTS, 271)


def test_vocabulary_that_the_library_would_die_of_is_refused() -> None:
    assert train_tokenizer(TEXTS, LARGEST_VOCABULARY).vocab_size < 1000
    with pytest.raises(DataError, match=r"1000001: too large; at most 1000000"):
        train_tokenizer(TEXTS, LARGEST_VOCABULARY + 1)


def test_settings_for_inference_in_the_file_do_not_touch_the_text(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.file_bytes.decode())
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="x")
    backend.post_processor = tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(trim_offsets=True),
            tokenizers.processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    text = "  leading and trailing spaces  " * 3
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.encode_with_offsets(text) == TOKENIZER.encode_with_offsets(text)
    assert loaded.encode_batch([text]) == [TOKENIZER.encode(text)]


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_hugging_face_folder_names_the_end_token(tmp_path: Path, eos: object) -> None:
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.load(tmp_path).eod_id == 2
    assert Tokenizer.load(tmp_path / "tokenizer.json").eod_id == 2
    assert Tokenizer.load(tmp_path, "<|endoftext|>").eod_id == 0


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 0
    for text in TEXTS[:7]:
        assert theirs(text)["input_ids"] == TOKENIZER.encode(text)


def test_unusable_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing: no such file or folder"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"folder without tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    TOKENIZER.save(tmp_path)
    with pytest.raises(DataError, match="has no token '</s>'"):
        Tokenizer.load(tmp_path, "</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token"):
        Tokenizer.load(tmp_path)


@given(ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_whole_text_without_broken_characters(text: str) -> None:
    decoder = TOKENIZER.stream_decoder()
    pieces = [decoder.push(token) for token in TOKENIZER.encode(text)]
    assert "".join([*pieces, decoder.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_that_ends_inside_a_character_shows_it_as_broken() -> None:
    ids = TOKENIZER.encode("a😀")
    decoder = TOKENIZER.stream_decoder()
    assert "".join(decoder.push(token) for token in ids[:-1]) == "a"
    assert decoder.finish().strip("\ufffd") == ""
    assert decoder.finish() == ""


def test_stream_leaves_special_tokens_out() -> None:
    decoder = TOKENIZER.stream_decoder()
    assert "".join(decoder.push(token) for token in [0, *TOKENIZER.encode("hi"), 2]) + decoder.finish() == "hi"
