"""The endless stream of documents: shuffled per epoch, complete, found at random as in sequence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.dataset import DocumentStream, TokenDataset
from steptron.data.errors import DataError
from tests.data.corpora import build_small, varied_texts

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def _slow_stream(stream: DocumentStream, lengths: list[int], epochs: int) -> list[tuple[int, int]]:
    """(document, offset) of every token of some epochs, one by one."""
    return [
        (document, offset)
        for epoch in range(epochs)
        for document in stream.epoch_order(epoch).tolist()
        for offset in range(lengths[document])
    ]


def _tokens_of(stream: DocumentStream, start: int, length: int) -> list[tuple[int, int]]:
    segments = stream.segments(start, length)
    return [
        (document, offset + step)
        for document, offset, size in zip(
            segments.documents_N.tolist(), segments.offsets_N.tolist(), segments.lengths_N.tolist(), strict=True
        )
        for step in range(size)
    ]


@given(LENGTHS, st.integers(0, 2**70), st.data())
@settings(max_examples=30, deadline=None)
def test_any_part_equals_the_slow_stream(lengths: list[int], seed: int, data: st.DataObject) -> None:
    stream = DocumentStream(np.array(lengths, np.int32), seed)
    whole = _slow_stream(stream, lengths, 4)
    # In any order, backwards over epochs too.
    for _ in range(5):
        start = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.integers(1, len(whole) - start))
        assert _tokens_of(stream, start, length) == whole[start : start + length]
        assert np.all(stream.segments(start, length).lengths_N > 0)


@given(LENGTHS, st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_every_token_of_an_epoch_comes_exactly_once(lengths: list[int], seed: int) -> None:
    stream = DocumentStream(np.array(lengths, np.int32), seed)
    expected = Counter((document, offset) for document, size in enumerate(lengths) for offset in range(size))
    for epoch in (0, 1, 10**6):
        start = epoch * stream.tokens_per_epoch
        assert Counter(_tokens_of(stream, start, stream.tokens_per_epoch)) == expected


def test_epochs_and_seeds_give_different_orders_and_the_same_again() -> None:
    lengths_D = np.ones(1000, np.int32)
    first = DocumentStream(lengths_D, 1)
    orders = [first.epoch_order(epoch).tolist() for epoch in (0, 1, 2)]
    orders.append(DocumentStream(lengths_D, 2).epoch_order(0).tolist())
    orders.append(DocumentStream(lengths_D, 1 + 2**64).epoch_order(0).tolist())
    assert len({tuple(order) for order in orders}) == 5
    for order in orders:
        fixed_points = sum(position == document for position, document in enumerate(order))
        assert fixed_points < 10  # 1 is expected
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.2
    again = DocumentStream(lengths_D, 1)
    assert [again.epoch_order(epoch).tolist() for epoch in (2, 0, 1)] == [orders[2], orders[0], orders[1]]


def test_the_order_is_pinned() -> None:
    """A change here changes the data order of every run that is resumed."""
    stream = DocumentStream(np.ones(12, np.int32), 1234)
    assert stream.epoch_order(0).tolist() == PINNED_ORDER
    assert stream.epoch_order(7).tolist() == PINNED_ORDER_OF_EPOCH_7


PINNED_ORDER = [8, 11, 4, 7, 6, 2, 0, 3, 9, 10, 1, 5]
PINNED_ORDER_OF_EPOCH_7 = [2, 9, 8, 3, 4, 6, 5, 1, 7, 10, 11, 0]


def test_a_million_documents_take_arrays_not_lists() -> None:
    lengths_D = np.random.default_rng(0).integers(1, 2000, 10**6).astype(np.int32)
    stream = DocumentStream(lengths_D, 0)
    assert stream.tokens_per_epoch > 9 * 10**8
    for start in (0, 10**9, 17 * 10**12):
        segments = stream.segments(start, 8193)
        assert segments.lengths_N.sum() == 8193
        epoch = start // stream.tokens_per_epoch
        order_D = stream.epoch_order(epoch)
        position = int(np.flatnonzero(order_D == segments.documents_N[0])[0])
        before = int(lengths_D[order_D[:position]].sum(dtype=np.int64))
        assert epoch * stream.tokens_per_epoch + before + segments.offsets_N[0] == start


def test_a_dataset_knows_its_size_and_documents(tmp_path: Path) -> None:
    folder = build_small(tmp_path, "d", [{"text": text} for text in varied_texts(20)])
    dataset = TokenDataset.open(folder, "train")
    assert dataset.num_documents == dataset.manifest.train.documents == 20
    assert dataset.num_tokens == dataset.manifest.train.tokens == dataset.lengths_D.sum()
    tokens_T, counts_T = dataset.document(3)
    assert tokens_T.dtype == np.dtype(np.int64) and counts_T.dtype == np.dtype(np.bool_)


def test_folders_that_are_no_dataset_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        TokenDataset.open(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match=r"not a dataset \(it has no dataset\.json\)"):
        TokenDataset.open(tmp_path, "train")
    folder = build_small(tmp_path, "d", [{"text": "one"}])
    manifest = folder / "dataset.json"
    content = manifest.read_text()
    for change, message in (
        (('"format_version": 1', '"format_version": 2'), "format version 2, this Steptron reads version 1"),
        (('"steptron.dataset"', '"other"'), "not the manifest of a dataset"),
        (('"eod_id": 0', '"eod_id": "zero"'), "field eod_id"),
        (('"documents": 1', '"documents": 2'), r"train\.idx: 1 documents and .* dataset\.json speaks of 2"),
        (("{", "["), "not JSON"),
    ):
        manifest.write_text(content.replace(*change, 1))
        with pytest.raises(DataError, match=message):
            TokenDataset.open(folder, "train")
