"""Shared data and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.manifest import FileRecord, Manifest, SplitRecord
from steptron.platform.nodes import folders
from tests.platform.nodes.simulated import peers_on, roll_of
from tests.worker_pool import WorkerPool


def _dataset(folder: Path, content_hash: str, size: int = 4) -> Path:
    split = SplitRecord(
        documents=1,
        tokens=4,
        masked_tokens=0,
        bytes=4,
        loss_mask=False,
        unigram_entropy=0.0,
        unigram_cross_entropy=0.0,
    )
    folder.mkdir()
    Manifest(
        vocabulary_size=8,
        eod_id=0,
        tokenizer_hash="t",
        dtype="uint8",
        seed=1,
        validation_fraction=0.0,
        bad_documents=0,
        train=split,
        validation=split,
        sources=[],
        files={"train.bin": FileRecord(size=4, sha256="x")},
        content_hash=content_hash,
    ).write(folder)
    (folder / "train.bin").write_bytes(b"x" * size)
    return folder


class _Config:
    """What is read of a configuration."""

    def __init__(self, *paths: Path) -> None:
        datasets = [DatasetConfig(path=path) for path in paths]
        self.data = DataConfig(train=datasets, sequence_length=8)


def _look(path: Path) -> dict[str, Any]:
    config: Any = _Config(path)
    (found,) = folders.own_data(config).values()
    return found


def test_same_content_is_ok_and_other_content_is_named(tmp_path: Path) -> None:
    first, second = _dataset(tmp_path / "a", "1" * 64), _dataset(tmp_path / "b", "2" * 64)
    assert _look(first) == {"hash": "1" * 64}
    seen = [{"data": _look(path)} for path in (first, first, second, first)]
    (check,) = folders.judge_data([seen[0]] * 4, peers_on(2, 2))
    assert (check.status, check.name) == ("ok", "data")
    (check,) = folders.judge_data(seen, peers_on(2, 2))
    assert check.status == "failed"
    assert check.advice == f"{'2' * 12} on rank 2 (node1), {'1' * 12} elsewhere: copy it again"


def test_data_that_are_missing_or_cut_on_a_node_are_named(tmp_path: Path) -> None:
    good, cut = _dataset(tmp_path / "a", "1"), _dataset(tmp_path / "b", "1", size=3)
    assert _look(cut) == {"error": "missing or cut: train.bin"}
    assert "no such folder" in _look(tmp_path / "nowhere")["error"]
    seen = [{"data": _look(path)} for path in (good, good, cut, tmp_path / "nowhere")]
    (check,) = folders.judge_data(seen, peers_on(2, 2))
    assert (check.status, check.value) == ("failed", "cannot be used by 2 processes")
    assert check.advice == "ranks 2-3 (node1): missing or cut: train.bin"


def _exchange(rank: int, world_size: int, outputs: list[Path]) -> Any:
    with mock.patch.object(folders, "_PATIENCE_SECONDS", 1.0 if len(set(outputs)) > 1 else 30.0):
        return folders.exchange_tokens(roll_of(rank, world_size, per_node=1), outputs[rank])


def test_a_shared_output_folder(pool: WorkerPool, tmp_path: Path) -> None:
    output = tmp_path / "runs" / "mine"
    checks, *others = pool.run(3, _exchange, [output] * 3)
    assert [(check.status, check.value) for check in checks] == [("ok", "written and read by 3 nodes")]
    assert others == [None, None]
    assert list(tmp_path.iterdir()) == []  # nothing is left, the folders it made neither


def test_what_was_in_the_folder_stays(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}")
    pool.run(2, _exchange, [tmp_path] * 2)
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_node_with_a_folder_of_its_own_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    shared, own = tmp_path / "shared" / "run", tmp_path / "own" / "run"
    (check,) = pool.run(3, _exchange, [shared, own, shared])[0]
    assert (check.status, check.value) == ("failed", "not shared, or not writable, on 1 nodes")
    assert check.advice == "rank 1 (node1): the file that rank 0 wrote there is not seen by another node"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_folder_that_cannot_be_written_is_named(pool: WorkerPool, tmp_path: Path, wrong: int) -> None:
    (tmp_path / "file").write_text("")
    outputs = [tmp_path / "run", tmp_path / "run"]
    outputs[wrong] = tmp_path / "file" / "run"
    (check,) = pool.run(2, _exchange, outputs)[0]
    assert check.status == "failed" and f"rank {wrong} (node{wrong}): " in check.advice
