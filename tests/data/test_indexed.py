"""Megatron's format: the same bytes as Megatron's builder writes, each side reads the other's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from steptron.data.errors import DataError
from steptron.data.indexed import IndexedWriter, open_indexed, smallest_dtype

VOCABULARIES = {200: np.uint8, 256: np.uint8, 257: np.uint16, 65_536: np.uint16, 65_537: np.int32, 128_896: np.int32}


def _documents(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(vocab_size)
    return [generator.integers(0, vocab_size, size) for size in (5, 1, 300, 17)] + [np.array([vocab_size - 1])]


def _write(prefix: Path, documents: list[np.ndarray], vocab_size: int) -> None:
    lengths = np.array([document.size for document in documents])
    with IndexedWriter(prefix, smallest_dtype(vocab_size)) as writer:
        writer.add(np.concatenate(documents[:2]), lengths[:2])
        writer.add(np.concatenate(documents[2:]), lengths[2:])
        writer.finish()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_files_equal_those_of_megatrons_builder(tmp_path: Path, vocab_size: int) -> None:
    documents = _documents(vocab_size)
    _write(tmp_path / "ours", documents, vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=VOCABULARIES[vocab_size])
    for document in documents:
        builder.add_document(document, [document.size])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_megatron_and_we_read_the_same_documents(tmp_path: Path, vocab_size: int) -> None:
    documents = _documents(vocab_size)
    _write(tmp_path / "train", documents, vocab_size)
    theirs = IndexedDataset(str(tmp_path / "train"))
    ours = open_indexed(tmp_path / "train")
    assert len(theirs) == len(documents) == len(theirs.document_indices) - 1
    assert theirs.index.dtype == VOCABULARIES[vocab_size] == ours.tokens_T.dtype
    for number, document in enumerate(documents):
        np.testing.assert_array_equal(theirs[number], document)
        start = ours.starts(slice(None))[number]
        np.testing.assert_array_equal(ours.tokens_T[start : start + ours.lengths_D[number]], document)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    def fresh() -> tuple[Path, Path]:
        _write(tmp_path / "train", _documents(1000), 1000)
        return tmp_path / "train.bin", tmp_path / "train.idx"

    data, index = fresh()
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train\.bin: 646 bytes, but the index speaks of 648"):
        open_indexed(tmp_path / "train")
    data, index = fresh()
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"train\.idx: .* cut off"):
        open_indexed(tmp_path / "train")
    index.write_bytes(b"x" * 100)
    with pytest.raises(DataError, match=r"train\.idx: not an index of Megatron's format"):
        open_indexed(tmp_path / "train")
    for place, value in (  # 5 lengths of 4 bytes from byte 34, then 5 pointers of 8
        (34 + 20, 2),  # begins elsewhere
        (34 + 20 + 8, 11),  # within a token
        (34 + 20 + 4 * 8 + 6, 0x40),  # far past the end
        (34 + 20 + 7, 0x80),  # negative
    ):
        _, index = fresh()
        content = bytearray(index.read_bytes())
        content[place] = value
        index.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.idx: damaged: its documents are not laid end to end"):
            open_indexed(tmp_path / "train")
    for lengths in ((6, 0, 300, 17, 1), (-1, 7, 300, 17, 1)):  # the right sum, and pointers to match
        data, index = fresh()
        content = bytearray(index.read_bytes())
        lengths_D = np.array(lengths, "<i4")
        content[34:54] = lengths_D.tobytes()
        content[54:94] = ((np.cumsum(lengths_D) - lengths_D) * 2).astype("<i8").tobytes()
        index.write_bytes(content)
        with pytest.raises(DataError, match="not laid end to end"):
            open_indexed(tmp_path / "train")
    data, index = fresh()
    content = bytearray(index.read_bytes())
    content[17] = 7  # float32
    index.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.idx: version 1, dtype code 7"):
        open_indexed(tmp_path / "train")
    index.unlink()
    with pytest.raises(DataError, match=r"train\.idx: missing"):
        open_indexed(tmp_path / "train")


def test_documents_of_several_sequences_are_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "train.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.finalize(str(tmp_path / "train.idx"))
    with pytest.raises(DataError, match="2 sequences in 1 documents"):
        open_indexed(tmp_path / "train")
