"""Micro-batches against a reference that walks through the whole stream token by token."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.batch import MicroBatch
from steptron.data.blend import Blend
from steptron.data.dataset import DocumentStream, SampleOrder, TokenDataset
from steptron.data.errors import DataError
from steptron.data.sampler import SampleSource
from steptron.data.tokenizer import Tokenizer, train_tokenizer
from tests.data.corpora import TEXTS, build_small, varied_texts

SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


def _data(datasets: list[DatasetConfig], **settings: object) -> DataConfig:
    return DataConfig(train=datasets, **{"sequence_length": 16, "seed": 7, **settings})  # type: ignore[arg-type]


def _blend(folder: Path, *weights: float) -> list[DatasetConfig]:
    return [DatasetConfig(path=folder / name, weight=weight) for name, weight in zip("ab", weights, strict=False)]


def _slow_stream(dataset: TokenDataset, seed: int, epochs: int) -> list[tuple[int, bool, int]]:
    """(token, counts in the loss, number of its document in the stream) of some epochs, token by token."""
    order = DocumentStream(dataset.lengths_D, seed)
    stream: list[tuple[int, bool, int]] = []
    number = 0
    for epoch in range(epochs):
        for document in order.epoch_order(epoch).tolist():
            tokens_T, counts_T = dataset.document(document)
            stream += [
                (token, counts, number) for token, counts in zip(tokens_T.tolist(), counts_T.tolist(), strict=True)
            ]
            number += 1
    return stream


Row = tuple[list[int], list[int], list[bool], list[int], list[int]]


def _slow_row(stream: list[tuple[int, bool, int]], sample: int, length: int, isolated: bool) -> Row:
    """Tokens, labels, loss mask, positions, documents of a sample; padded where the stream ends."""
    tokens, labels, loss_mask, positions, documents = [], [], [], [], []
    window = stream[sample * length : (sample + 1) * length + 1]
    for place in range(length):
        if place + 1 < len(window):
            token, _, document = window[place]
            label, counts, next_document = window[place + 1]
            starts = [other for other in range(place + 1) if window[other][2] == document]
            tokens.append(token)
            labels.append(label)
            loss_mask.append(counts and (not isolated or next_document == document))
            positions.append(place - starts[0] if isolated else place)
            documents.append(document - window[0][2] if isolated else 0)
        else:
            tokens.append(0)
            labels.append(0)
            loss_mask.append(False)
            positions.append(0)
            documents.append(-1)
    return tokens, labels, loss_mask, positions, documents


def _rows(batch: MicroBatch) -> list[Row]:
    columns = (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.positions_BS, batch.documents_BS)
    return [tuple(column[row].tolist() for column in columns) for row in range(batch.tokens_BS.shape[0])]  # type: ignore[misc]


def _stream_seed(split: str, seed: int, number: int) -> int:
    return (seed if split == "train" else 0) + (number << 64)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("attention", ["isolated", "crossing"])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.0, 3.0)])
def test_batches_equal_the_slow_reference(
    folder: Path, split: Literal["train", "validation"], attention: str, weights: tuple[float, ...]
) -> None:
    datasets = _blend(folder, *weights)
    source = SampleSource(datasets, split, _data(datasets, document_attention=attention))
    streams = [
        _slow_stream(
            TokenDataset.open(dataset.path, split), _stream_seed(split, 7, number), 4 if split == "train" else 1
        )
        for number, dataset in enumerate(datasets)
    ]
    # Three of the four epochs: the last block of samples in them may reach into the next epoch.
    count = min(len(stream) // 16 * 3 // 4 for stream in streams) if split == "train" else source.num_samples
    assert count is not None and count > 10
    numbers = Blend(weights).locate(0, count)[0].tolist()
    orders = [
        SampleOrder(len(stream) // 4 // 16, _stream_seed(split, 7, number)) for number, stream in enumerate(streams)
    ]
    places = [numbers[:sample].count(number) for sample, number in enumerate(numbers)]
    if split == "train":
        places = [orders[number].place(place) for number, place in zip(numbers, places, strict=True)]
    expected = [
        _slow_row(streams[number], place, 16, attention == "isolated")
        for number, place in zip(numbers, places, strict=True)
    ]
    assert _rows(source.micro_batch(0, count)) == expected
    # Random access and other cuts give the same rows.
    for first, size in ((count - 1, 1), (3, 4), (0, 1), (5, 0)):
        assert _rows(source.micro_batch(first, size)) == expected[first : first + size]
    flat = [value for row in expected for value in row[2]]
    assert any(flat) and not all(flat)


def test_shapes_and_dtypes_are_those_of_the_contract(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    batch = SampleSource(datasets, "train", _data(datasets)).micro_batch(5, 3)
    for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS"):
        assert getattr(batch, name).dtype == torch.int64
        assert getattr(batch, name).shape == (3, 16)
    assert batch.loss_mask_BS.dtype == torch.bool


def test_every_token_of_an_epoch_is_an_input_once(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    dataset = TokenDataset.open(folder / "a", "train")
    # A sequence length that divides the epoch, so that samples and epochs end together.
    length = next(size for size in range(2, dataset.num_tokens) if dataset.num_tokens % size == 0)
    source = SampleSource(datasets, "train", _data(datasets, sequence_length=length))
    for epoch in (0, 3):
        count = dataset.num_tokens // length
        seen = source.micro_batch(epoch * count, count).tokens_BS.flatten().bincount(minlength=420)
        everything = [dataset.document(number)[0] for number in range(dataset.num_documents)]
        np.testing.assert_array_equal(seen.numpy(), np.bincount(np.concatenate(everything), minlength=420))


def test_neighbouring_samples_share_one_token(folder: Path) -> None:
    """In the stream's order, which is the validation split's."""
    datasets = _blend(folder, 1.0)
    source = SampleSource(datasets, "validation", _data(datasets))
    assert source.num_samples is not None
    batch = source.micro_batch(0, source.num_samples - 1)
    torch.testing.assert_close(batch.labels_BS[:-1, -1], batch.tokens_BS[1:, 0], rtol=0, atol=0)
    torch.testing.assert_close(batch.labels_BS[:, :-1], batch.tokens_BS[:, 1:], rtol=0, atol=0)


def test_samples_are_shuffled_within_an_epoch() -> None:
    """Every block is a permutation, no two are alike, and a batch does not come from one place."""
    order = SampleOrder(50, seed=3)
    blocks = [[order.place(block * 50 + i) - block * 50 for i in range(50)] for block in range(4)]
    assert all(sorted(block) == list(range(50)) for block in blocks)
    assert len({tuple(block) for block in blocks}) == 4
    assert [order.place(i) for i in range(60)] == [SampleOrder(50, seed=3).place(i) for i in range(60)]
    assert [order.place(i) for i in range(50)] != [SampleOrder(50, seed=4).place(i) for i in range(50)]
    neighbours = sum(abs(a - b) == 1 for block in blocks for a, b in itertools.pairwise(block))
    assert neighbours < 20


def test_the_end_of_document_counts_and_what_follows_it_does_only_when_crossing(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    isolated = SampleSource(datasets, "train", _data(datasets)).micro_batch(0, 50)
    crossing = SampleSource(datasets, "train", _data(datasets, document_attention="crossing")).micro_batch(0, 50)
    torch.testing.assert_close(isolated.tokens_BS, crossing.tokens_BS, rtol=0, atol=0)
    assert isolated.loss_mask_BS[isolated.labels_BS == 0].all()
    after_end_BS = isolated.tokens_BS == 0
    assert not isolated.loss_mask_BS[after_end_BS].any()
    assert crossing.loss_mask_BS[after_end_BS].any()


def test_order_depends_on_the_seed_for_training_only(folder: Path) -> None:
    datasets = _blend(folder, 1.0, 1.0)

    def tokens(split: Literal["train", "validation"], seed: int) -> list[Row]:
        return _rows(SampleSource(datasets, split, _data(datasets, seed=seed)).micro_batch(0, 8))

    assert tokens("train", 1) == tokens("train", 1)
    assert tokens("train", 1) != tokens("train", 2)
    assert tokens("validation", 1) == tokens("validation", 2)


def test_a_dataset_named_twice_is_not_read_in_step(folder: Path) -> None:
    datasets = [DatasetConfig(path=folder / "a"), DatasetConfig(path=folder / "a")]
    rows = _rows(SampleSource(datasets, "train", _data(datasets)).micro_batch(0, 8))
    assert rows[0::2] != rows[1::2]


def test_validation_uses_every_target_once_and_then_pads(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    dataset = TokenDataset.open(folder / "a", "validation")
    source = SampleSource(datasets, "validation", _data(datasets, document_attention="crossing"))
    count = source.num_samples
    assert count == -(-(dataset.num_tokens - 1) // 16)
    batch = source.micro_batch(0, count + 3)
    real_BS = batch.documents_BS >= 0
    assert int(real_BS.sum()) == dataset.num_tokens - 1
    assert not real_BS[count:].any()
    assert not batch.loss_mask_BS[~real_BS].any()
    for values_BS in (batch.tokens_BS, batch.labels_BS, batch.positions_BS):
        assert not values_BS[~real_BS].any()
    assert _rows(source.micro_batch(count + 100, 2)) == _rows(source.micro_batch(count, 2))


def test_validation_that_fits_exactly_has_no_empty_sample(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    targets = TokenDataset.open(folder / "a", "validation").num_tokens - 1
    for count in (1, 2, 3):
        length = -(-targets // count)
        source = SampleSource(datasets, "validation", _data(datasets, sequence_length=length))
        assert source.num_samples == count
        assert (source.micro_batch(count - 1, 1).documents_BS >= 0).any()


def test_validation_of_a_blend_keeps_its_weights_and_never_repeats(folder: Path) -> None:
    datasets = _blend(folder, 1.0, 3.0)
    source = SampleSource(datasets, "validation", _data(datasets))
    sizes = [-(-(TokenDataset.open(item.path, "validation").num_tokens - 1) // 16) for item in datasets]
    count = source.num_samples
    assert count is not None
    used = np.bincount(Blend([1, 3]).locate(0, count)[0], minlength=2)
    assert all(used <= sizes) and any(used == sizes)
    assert abs(used[0] - count / 4) < 1


def test_a_validation_split_shorter_than_a_sequence_is_one_padded_sample(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    source = SampleSource(datasets, "validation", _data(datasets, sequence_length=100_000))
    assert source.num_samples == 1
    tokens = TokenDataset.open(folder / "a", "validation").num_tokens
    assert int((source.micro_batch(0, 1).documents_BS >= 0).sum()) == tokens - 1


def test_training_is_endless(folder: Path) -> None:
    datasets = _blend(folder, 2.0, 1.0)
    source = SampleSource(datasets, "train", _data(datasets))
    assert source.num_samples is None
    assert (source.micro_batch(10**13, 2).documents_BS >= 0).all()


def test_sequences_longer_than_all_data_are_refused(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    tokens = TokenDataset.open(folder / "a", "train").num_tokens
    SampleSource(datasets, "train", _data(datasets, sequence_length=tokens - 1))
    with pytest.raises(
        DataError, match=rf"a: its train split has {tokens} tokens, but .*data\.sequence_length {tokens}"
    ):
        SampleSource(datasets, "train", _data(datasets, sequence_length=tokens))


def test_other_unusable_datasets_are_refused(folder: Path, tmp_path: Path) -> None:
    missing = [DatasetConfig(path=tmp_path / "missing")]
    with pytest.raises(DataError, match="missing: no such folder"):
        SampleSource(missing, "train", _data(missing))
    with pytest.raises(DataError, match="no dataset for the validation split"):
        SampleSource([], "validation", _data(missing))
    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer")
    other = build_small(tmp_path, "other", [{"text": text} for text in varied_texts(30)])
    datasets = [DatasetConfig(path=folder / "a"), DatasetConfig(path=other)]
    with pytest.raises(DataError, match=r"a and .*other were built with different tokenizers"):
        SampleSource(datasets, "train", _data(datasets))
    # The same tokenizer with another end-of-document token is another tokenizer.
    shutil.rmtree(tmp_path / "tokenizer")
    Tokenizer.load(folder / "tokenizer").save(tmp_path / "tokenizer")
    third = build_small(tmp_path, "third", [{"text": text} for text in varied_texts(30)], eod_token="<|im_end|>")
    datasets[1] = DatasetConfig(path=third)
    with pytest.raises(DataError, match="different tokenizers"):
        SampleSource(datasets, "train", _data(datasets))


def test_a_model_with_too_few_rows_is_refused(folder: Path) -> None:
    datasets = _blend(folder, 1.0)
    source = SampleSource(datasets, "train", _data(datasets))
    assert source.vocabulary_size == 420
    source.check_vocabulary(420)
    source.check_vocabulary(512)
    with pytest.raises(DataError, match=r"ids up to 419, but model\.vocab_size is 419"):
        source.check_vocabulary(419)


def test_tokens_outside_the_vocabulary_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = build_small(tmp_path, "d", [{"text": text} for text in varied_texts(60)])
    datasets = [DatasetConfig(path=folder)]
    data = folder / "train.bin"
    tokens_T = np.fromfile(data, "<u2")
    count = tokens_T.size // 16
    tokens_T[100] = 419  # the last of the vocabulary
    tokens_T.tofile(data)
    SampleSource(datasets, "train", _data(datasets)).micro_batch(0, count)
    tokens_T[100] = 420
    tokens_T.tofile(data)
    source = SampleSource(datasets, "train", _data(datasets))
    with pytest.raises(DataError, match=rf"{folder}: train\.bin is damaged: .* token id 420, the vocabulary has 420"):
        source.micro_batch(0, count)


def test_figures_of_a_blend_are_weighted_by_its_shares_of_tokens(folder: Path) -> None:
    """Not by the sizes of the datasets: a sample comes from each by its weight."""
    datasets = _blend(folder, 3.0, 1.0)
    records = [TokenDataset.open(dataset.path, "validation").manifest.validation for dataset in datasets]
    source = SampleSource(datasets, "validation", _data(datasets))
    one, two = ((r.bytes - (r.masked_bytes or 0)) / (r.tokens - r.masked_tokens) for r in records)
    expected = 0.75 * one + 0.25 * two
    assert source.bytes_per_token == pytest.approx(expected, rel=1e-12)
    entropy = 0.75 * records[0].unigram_entropy + 0.25 * records[1].unigram_entropy
    assert source.unigram_entropy == pytest.approx(entropy, rel=1e-12)
