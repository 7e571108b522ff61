"""Rows of whole documents: what they hold, and that the model sees each document as if it stood alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steptron.config.schema import DataConfig, DatasetConfig, LossConfig
from steptron.data.batch import MicroBatch
from steptron.data.blend import Blend
from steptron.data.dataset import Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.packed_source import PackedSource
from steptron.data.packing import pack
from steptron.data.sampler import SampleSource
from steptron.data.sources import open_source
from steptron.model.assembly import StepModel
from steptron.model.mtp import mtp_loss_mask
from steptron.platform.distributed import shutdown
from steptron.train.feed import global_batch
from steptron.train.losses import count_tokens, loss_coefficients
from tests.model.helpers import assert_all_close, build_model, fill, gradients, single_process, small_config

LENGTH = 200
Document = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and whether each counts in the loss."""


def _datasets(folder: Path, *weights: float) -> list[DatasetConfig]:
    return [DatasetConfig(path=folder / name, weight=weight) for name, weight in zip("ab", weights, strict=False)]


def _source(datasets: list[DatasetConfig], split: Split = "train", **settings: Any) -> PackedSource:
    data = DataConfig(train=datasets, **{"sequence_length": LENGTH, "seed": 7, "packing": "best_fit"} | settings)
    source = open_source(datasets, split, data)
    assert isinstance(source, PackedSource)
    return source


def _documents(dataset: TokenDataset) -> list[Document]:
    documents = [dataset.document(number) for number in range(dataset.num_documents)]
    return [(tuple(tokens_T.tolist()), tuple(counts_T.tolist())) for tokens_T, counts_T in documents]


def _without_first(document: Document) -> Document:
    """The first token is no target, so that nobody can tell whether it would count."""
    return document[0], (False, *document[1][1:])


def _documents_in(batch: MicroBatch) -> list[list[Document]]:
    """The documents of each row, put together again token by token; checks everything else in the row."""
    rows = []
    for b in range(batch.tokens_BS.shape[0]):
        tokens, labels, counts, positions, numbers = (
            getattr(batch, name)[b].tolist()
            for name in ("tokens_BS", "labels_BS", "loss_mask_BS", "positions_BS", "documents_BS")
        )
        row: list[tuple[list[int], list[bool]]] = []
        for s, number in enumerate(numbers):
            if number == -1:
                padding = (tokens[s], labels[s], counts[s], positions[s], set(numbers[s:]))
                assert padding == (0, 0, False, 0, {-1})
            elif number == len(row):
                assert positions[s] == 0
                row.append(([tokens[s], labels[s]], [False, counts[s]]))
            else:
                assert number == len(row) - 1 and tokens[s] == row[-1][0][-1]
                assert positions[s] == len(row[-1][0]) - 1
                row[-1][0].append(labels[s])
                row[-1][1].append(counts[s])
        rows.append([(tuple(tokens), tuple(counts)) for tokens, counts in row])
    return rows


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_document_is_whole_in_one_row_of_each_epoch(folder: Path, epochs: int) -> None:
    dataset = TokenDataset.open(folder / "a", "train")
    source = _source(_datasets(folder, 1.0))
    rows = sum(pack(dataset.lengths_D - 1, LENGTH, 7, epoch).rows for epoch in range(epochs))
    found = Counter(document for row in _documents_in(source.micro_batch(0, rows)) for document in row)
    expected = Counter(_without_first(document) for document in _documents(dataset))
    assert found == Counter({document: epochs * count for document, count in expected.items()})
    assert any(not all(counts[1:]) for _, counts in found)


def test_rows_hold_several_documents_and_fill_up(folder: Path) -> None:
    dataset = TokenDataset.open(folder / "a", "train")
    source = _source(_datasets(folder, 1.0))
    rows = pack(dataset.lengths_D - 1, LENGTH, 7, 0).rows
    fewest = -(-(dataset.num_tokens - dataset.num_documents) // LENGTH)
    assert fewest <= rows <= fewest + 1
    assert int(source.micro_batch(0, rows).documents_BS.max()) > 3


def test_a_sample_is_a_function_of_its_number(folder: Path) -> None:
    """Whatever was asked before, and however samples are cut into micro-batches."""
    datasets = _datasets(folder, 1.0, 2.0)
    whole = _source(datasets).micro_batch(0, 60)
    for first, count in ((59, 1), (10, 7), (0, 3)):
        batch = _source(datasets).micro_batch(first, count)
        for name in MicroBatch.__dataclass_fields__:
            assert torch.equal(getattr(batch, name), getattr(whole, name)[first : first + count])
    assert not torch.equal(_source(datasets, seed=8).micro_batch(0, 60).tokens_BS, whole.tokens_BS)


@pytest.mark.parametrize("data_size, micro_batch_size", [(1, 4), (2, 2), (4, 1), (2, 1)])
def test_layouts_take_the_same_rows(folder: Path, data_size: int, micro_batch_size: int) -> None:
    source = _source(_datasets(folder, 1.0, 2.0))
    taken: dict[int, torch.Tensor] = {}
    for rank in range(data_size):
        mesh: Any = SimpleNamespace(data_rank=rank, data_size=data_size)
        batches = global_batch(source, 16, 8, micro_batch_size, mesh, torch.device("cpu"))
        for j, batch in enumerate(batches):
            for b in range(micro_batch_size):
                taken[(j * data_size + rank) * micro_batch_size + b] = batch.tokens_BS[b]
    expected = source.micro_batch(16, 8).tokens_BS
    assert torch.equal(torch.stack([taken[number] for number in range(8)]), expected)


@pytest.mark.parametrize("weights", [(1.0, 3.0), (30.0, 90.0), (0.05, 0.15)])
def test_weights_are_shares_of_rows_on_any_scale(folder: Path, weights: tuple[float, float]) -> None:
    datasets = _datasets(folder, *weights)
    own = [{document[0] for document in _documents(TokenDataset.open(item.path, "train"))} for item in datasets]
    rows = _documents_in(_source(datasets).micro_batch(0, 80))
    origins = [next(number for number in (0, 1) if row[0][0] in own[number]) for row in rows]
    assert origins == Blend([1, 3]).locate(0, 80)[0].tolist()
    for origin, row in zip(origins, rows, strict=True):
        assert all(tokens in own[origin] for tokens, _ in row)


def test_validation_holds_every_document_once_and_then_pads(folder: Path) -> None:
    datasets = _datasets(folder, 1.0)
    source = _source(datasets, "validation")
    count = source.num_samples
    assert count is not None
    batch = source.micro_batch(0, count + 3)
    found = Counter(document for row in _documents_in(batch) for document in row)
    expected = _documents(TokenDataset.open(folder / "a", "validation"))
    assert found == Counter(map(_without_first, expected))
    assert (batch.documents_BS[:count] >= 0).any(dim=1).all() and (batch.documents_BS[count:] == -1).all()
    assert torch.equal(_source(datasets, "validation", seed=9).micro_batch(0, count).tokens_BS, batch.tokens_BS[:count])


def test_figures_are_weighted_by_tokens_not_rows(folder: Path) -> None:
    """Rows of a blend are equally many, but hold unequally many tokens."""
    datasets = _datasets(folder, 1.0, 1.0)
    source = _source(datasets, "validation", sequence_length=1200)
    opened = [TokenDataset.open(item.path, "validation") for item in datasets]
    inputs = [dataset.num_tokens - dataset.num_documents for dataset in opened]
    assert source.num_samples == 2 and max(inputs) <= 1200  # one row each
    records = [dataset.manifest.validation for dataset in opened]
    counted = [
        (record.bytes - (record.masked_bytes or 0)) / (record.tokens - record.masked_tokens) for record in records
    ]
    expected = sum(n * value for n, value in zip(inputs, counted, strict=True)) / sum(inputs)
    assert source.bytes_per_token == pytest.approx(expected, rel=1e-12)


def test_documents_longer_than_a_row_are_refused(folder: Path) -> None:
    datasets = _datasets(folder, 1.0)
    lengths_D = TokenDataset.open(folder / "a", "train").lengths_D
    longest = int(lengths_D.max())
    _source(datasets, sequence_length=longest - 1)
    with pytest.raises(DataError) as caught:
        _source(datasets, sequence_length=longest - 3)
    message = str(caught.value)
    count = int((lengths_D > longest - 2).sum())
    assert message.startswith(f"{folder / 'a'}: {count} of the {lengths_D.size} documents of its train split")
    assert f"the longest has {longest}" in message
    assert f"data.sequence_length to at least {longest - 1}" in message and f"--max-tokens {longest - 2}" in message


def test_a_dataset_without_a_target_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of one token are in no row, so that no epoch would ever have one."""
    dataset = TokenDataset.open(folder / "a", "train")
    dataset.lengths_D = torch.ones(dataset.num_documents, dtype=torch.int32).numpy()
    monkeypatch.setattr(TokenDataset, "open", lambda *_, **__: dataset)
    with pytest.raises(DataError, match="a: no document of its train split has a token to be predicted"):
        _source(_datasets(folder, 1.0))


def test_index_files_are_not_made(folder: Path) -> None:
    source = _source(_datasets(folder, 1.0))
    assert source.missing_order_files(0, 10) == []
    with pytest.raises(DataError, match="best_fit has no orders to be built"):
        source.order_files(0, 10)


def test_streams_are_the_default(folder: Path) -> None:
    datasets = _datasets(folder, 1.0)
    assert isinstance(open_source(datasets, "train", DataConfig(train=datasets, sequence_length=16)), SampleSource)


# ------------------------------------------------------------------------------------- the model


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Other tests of this process make their own."""
    yield
    shutdown()


MODEL, LOSSES = small_config(vocab_size=420), LossConfig(mtp_train_depths=2)


def _alone(document: Document) -> MicroBatch:
    """A row of one document and no padding, as its definition says."""
    tokens, counts = (torch.tensor([values]) for values in document)
    inputs = tokens[:, :-1]
    return MicroBatch(
        inputs, tokens[:, 1:], counts[:, 1:], torch.arange(inputs.shape[1])[None], torch.zeros_like(inputs)
    )


def _objective(model: StepModel, batches: list[MicroBatch]) -> tuple[float, torch.Tensor]:
    """Training loss and the sums of the heads, after forward and backward passes weighted by global counts."""
    counts = count_tokens(batches, 2, single_process().groups.dp_cp)
    coefficients = torch.tensor(loss_coefficients(LOSSES, counts))
    total, sums = 0.0, torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        own = model(batch)
        loss = torch.dot(own, coefficients)
        loss.backward()
        total += loss.item()
        sums += own.detach().double()
    return total, sums


def test_a_packed_batch_trains_as_its_documents_do_apart(folder: Path) -> None:
    packed = _source(_datasets(folder, 1.0)).micro_batch(0, 2)
    by_tokens = {document[0]: document for document in _documents(TokenDataset.open(folder / "a", "train"))}
    documents = [by_tokens[tokens] for row in _documents_in(packed) for tokens, _ in row]
    assert len(documents) > 6
    results = []
    for batches in ([packed], [_alone(document) for document in documents]):
        model = build_model(MODEL)
        fill(model, 3)
        results.append((*_objective(model, batches), gradients(model)))
    (total, sums, gradient), (expected_total, expected_sums, expected_gradient) = results
    assert total == pytest.approx(expected_total, rel=1e-5)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=0)
    assert_all_close(gradient, expected_gradient, 1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_targets_of_mtp_stay_in_their_document(folder: Path, depth: int) -> None:
    """A document of L tokens has L - 1 - depth of them, less those that are masked."""
    batch = _source(_datasets(folder, 1.0)).micro_batch(0, 6)
    mask_BS = mtp_loss_mask(batch, depth)
    expected = sum(sum(counts[1 + depth :]) for row in _documents_in(batch) for _, counts in row)
    assert int(mask_BS.sum()) == expected
    shifted_BS = torch.roll(batch.documents_BS, -depth, dims=1)
    assert torch.equal(batch.documents_BS[mask_BS], shifted_BS[mask_BS])
