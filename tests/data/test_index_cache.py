"""Orders in files: the samples are the same as without, each file is built once, and damage is found."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data import index_cache
from steptron.data.dataset import DocumentStream, Split, TokenDataset
from steptron.data.errors import DataError
from steptron.data.index_cache import CachedOrders, IndexCache, OrderFile
from steptron.data.orders import ComputedOrders
from steptron.data.sampler import SampleSource, validation_datasets
from steptron.errors import ConfigError
from tests.data.corpora import build_small, varied_texts
from tests.parallel.layouts import NANO
from tests.worker_pool import WorkerPool


def _data(folder: Path, cache: Path | None, **settings: object) -> DataConfig:
    datasets = [DatasetConfig(path=folder / "a", weight=3.0), DatasetConfig(path=folder / "b")]
    return DataConfig(train=datasets, index_cache=cache, **{"sequence_length": 16, "seed": 7, **settings})  # type: ignore[arg-type]


def _source(data: DataConfig, split: Split = "train") -> SampleSource:
    return SampleSource(data.train, split, data)


def _file(folder: Path, epoch: int = 0, seed: int = 7) -> OrderFile:
    return OrderFile.of_documents(TokenDataset.open(folder / "a", "train"), seed, epoch)


# ----------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("split", ["train", "validation"])
def test_samples_are_those_of_a_run_without_a_cache(folder: Path, tmp_path: Path, split: Split) -> None:
    """Over several epochs, built by the first source and only read by the second."""
    expected = _source(_data(folder, None, sequence_length=64), split).micro_batch(0, 400)
    for _ in range(2):
        batch = _source(_data(folder, tmp_path / "new" / "cache", sequence_length=64), split).micro_batch(0, 400)
        for name in ("tokens_BS", "labels_BS", "loss_mask_BS", "positions_BS", "documents_BS"):
            torch.testing.assert_close(getattr(batch, name), getattr(expected, name), rtol=0, atol=0)
    epochs = {int(path.name.split("epoch")[1].split(".")[0]) for path in (tmp_path / "new" / "cache").iterdir()}
    assert len(epochs) == (1 if split == "validation" else max(epochs) + 1)
    assert split == "validation" or max(epochs) >= 4


def test_a_file_holds_what_its_description_says(folder: Path, tmp_path: Path) -> None:
    file = _file(folder, epoch=3, seed=7 + (2 << 64))
    mapped = IndexCache(tmp_path, 1.0).open(file)
    dataset = TokenDataset.open(folder / "a", "train")
    (path,) = tmp_path.iterdir()
    assert path.name == f"documents-{dataset.manifest.content_hash[:16]}-train-seed7-dataset2-epoch3.v1"
    content = path.read_bytes()
    described = json.loads(content[:4096])
    assert (described["content_hash"], described["split"]) == (dataset.manifest.content_hash, "train")
    assert (described["seed"], described["epoch"], described["entries"]) == (7 + 2**65, 3, dataset.num_documents)
    order_D = np.frombuffer(content, "<u4", dataset.num_documents, 4096)
    ends_D = np.frombuffer(content[-8 * dataset.num_documents :], "<i8")
    expected = ComputedOrders().documents(dataset.lengths_D, 7 + (2 << 64), 3)
    np.testing.assert_array_equal(order_D, expected.documents.numbers_N)
    np.testing.assert_array_equal(ends_D, np.cumsum(dataset.lengths_D[order_D]))
    np.testing.assert_array_equal(ends_D, expected.ends_D)
    assert len(content) == file.bytes and len(content) % 8 == 0
    # Mapped for reading and aligned: numpy would copy all of an array that is not.
    assert mapped.ends_D is not None
    for array in (mapped.permutation.numbers_N, mapped.ends_D):
        assert not array.flags.owndata and not array.flags.writeable and array.flags.aligned


def test_everything_that_an_order_depends_on_is_in_its_name(folder: Path) -> None:
    def names(path: Path, **settings: object) -> set[str]:
        return {file.name for file in _source(_data(path, None, **settings)).order_files(0, 60)}

    base = names(folder)
    assert len(base) == len(list(_source(_data(folder, None)).order_files(0, 60)))  # no two share one
    assert not base & names(folder, seed=8)
    assert names(folder, document_attention="crossing") == base
    longer = names(folder, sequence_length=24)
    assert {name for name in longer if name.startswith("documents")} >= {
        name for name in base if name.startswith("documents")
    }
    assert not {name for name in longer & base if name.startswith("samples")}
    validation = {file.name for file in _source(_data(folder, None), "validation").order_files(0, 60)}
    assert len(validation) == 2 and not validation & base


def test_the_files_that_are_named_ahead_are_those_that_are_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    original = IndexCache.open

    def spy(self: IndexCache, file: OrderFile) -> index_cache.MappedOrder:
        used.add(file.name)
        return original(self, file)

    monkeypatch.setattr(IndexCache, "open", spy)
    source = _source(_data(folder, tmp_path))
    for start, stop in ((0, 1), (0, 300), (137, 420), (250, 251)):
        used.clear()
        source = _source(_data(folder, tmp_path))
        source.micro_batch(start, stop - start)
        named = {file.name for file in source.order_files(start, stop)}
        assert used <= named
        # At the two ends of the range blocks are taken in part, so that an epoch beside them may not be needed.
        assert len(named - used) <= (2 if stop - start > 1 else 3)
    assert not source.missing_order_files(0, 300)
    assert source.missing_order_files(10_000, 10_001)
    assert list(source.order_files(5, 5)) == []


def test_nothing_of_the_size_of_the_dataset_is_held(tmp_path: Path, folder: Path) -> None:
    """Every array of a mapped stream lies in a file."""
    dataset = TokenDataset.open(folder / "a", "train", verify=False)
    order = CachedOrders(IndexCache(tmp_path, 1.0), dataset).documents(dataset.lengths_D, 7, 0)
    for array in (order.documents.numbers_N, order.ends_D, dataset.lengths_D, dataset._tokens.pointers_D):
        base: object = array
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        assert type(base).__name__ == "mmap"


# ----------------------------------------------------------------------------------- built once


def _build_in_worker(rank: int, world_size: int, path: str, folder: str) -> tuple[str, list[int]]:
    """All workers start together; what this one did, and the order that it then sees."""
    file = OrderFile.of_documents(TokenDataset.open(folder, "train"), 7, 0)
    cache = IndexCache(Path(path), 30.0, lambda name, done, total: time.sleep(0.2))
    dist.barrier()
    did = cache.prepare(file)
    return did, cache.open(file).permutation.numbers_N.tolist()


def test_of_processes_that_need_a_file_one_builds_it(folder: Path, tmp_path: Path, pool: WorkerPool) -> None:
    results = pool.run(4, _build_in_worker, str(tmp_path), str(folder / "a"))
    assert sorted(did for did, _ in results) == ["built", "found", "found", "found"]
    expected = ComputedOrders().documents(TokenDataset.open(folder / "a", "train").lengths_D, 7, 0)
    assert all(order == expected.documents.numbers_N.tolist() for _, order in results)
    assert [path.name for path in tmp_path.iterdir()] == [_file(folder).name]  # neither locks nor partial files


def test_who_waits_too_long_says_for_whom(folder: Path, tmp_path: Path) -> None:
    file = _file(folder)
    with open(tmp_path / f".{file.name}.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 12 on node7 (5 of 9 entries done)")
        lock.flush()
        message = (
            rf"{file.name}: not there, and process 12 on node7 \(5 of 9 entries done\), which builds it, gave no sign"
        )
        with pytest.raises(DataError, match=message + r" of life for 0.3 s \(parallel\.timeout_seconds\)"):
            IndexCache(tmp_path, 0.3).open(file)


def test_signs_of_life_prolong_the_wait(folder: Path, tmp_path: Path) -> None:
    """Whoever builds works for 1.5 s and tells so; others wait 0.6 s from the last time they heard of it."""
    file = _file(folder)
    waited: list[object] = []

    def wait() -> None:
        try:
            waited.append(IndexCache(tmp_path, 0.6).open(file))
        except DataError as error:
            waited.append(error)

    with open(tmp_path / f".{file.name}.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter = threading.Thread(target=wait)
        waiter.start()
        for step in range(15):
            lock.seek(0)
            lock.truncate()
            lock.write(f"process 12 on node7 ({step} of 15)")
            lock.flush()
            time.sleep(0.1)
            assert not waited
    waiter.join(30)
    assert isinstance(waited[0], index_cache.MappedOrder), waited  # it then builds the file itself


def test_when_the_builder_is_killed_another_takes_over_and_clears_up(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from steptron.data.index_cache import *; "
        "from steptron.data.dataset import TokenDataset; "
        "slow = lambda name, done, total: time.sleep(60) if done else None; "
        "file = OrderFile.of_documents(TokenDataset.open(sys.argv[1], 'train'), 7, 0); "
        "IndexCache(Path(sys.argv[2]), 1.0, slow).open(file)"
    )
    builder = subprocess.Popen([sys.executable, "-c", code, str(folder / "a"), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".*.partial")):
            assert time.monotonic() < deadline and builder.poll() is None
            time.sleep(0.02)
        builder.kill()
    finally:
        builder.kill()
        builder.wait(30)
    assert IndexCache(tmp_path, 1.0).prepare(_file(folder)) == "built"
    assert [path.name for path in tmp_path.iterdir()] == [_file(folder).name]


def test_partial_files_of_other_nodes_are_left_for_a_day(folder: Path, tmp_path: Path) -> None:
    """Where locks are those of one node only, another node may be writing."""
    fresh, old = (tmp_path / f".{_file(folder).name}.{node}-1.partial" for node in ("node1", "node2"))
    for path in (fresh, old):
        path.touch()
    os.utime(old, (0, time.time() - 25 * 3600))
    IndexCache(tmp_path, 1.0).open(_file(folder))
    assert fresh.exists() and not old.exists()


# ------------------------------------------------------------------------------- what goes wrong


def _change(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def _foreign(path: Path) -> None:
    other = path.with_name(path.name.replace("epoch0", "epoch1"))
    path.write_bytes(other.read_bytes())


def _older(path: Path) -> None:
    _change(path, 0, path.read_bytes()[:4096].replace(b'_version": 1', b'_version": 0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(_cut, r"bytes instead of \d+: cut off"), (_foreign, "not the order that"), (_older, "not the order that")],
)
def test_a_file_that_is_not_the_order_is_refused_by_name_and_replaced_ahead(
    folder: Path, tmp_path: Path, damage: object, message: str
) -> None:
    cache = IndexCache(tmp_path, 1.0)
    for epoch in (0, 1):
        cache.open(_file(folder, epoch))
    path = tmp_path / _file(folder).name
    sound = path.read_bytes()
    damage(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{message}.*; delete it, or let `steptron data"):
        cache.open(_file(folder))
    assert cache.prepare(_file(folder)) == "replaced"
    assert path.read_bytes() == sound
    assert cache.prepare(_file(folder)) == "found"


@pytest.mark.parametrize("offset", [4096 + 4 * 20 + 1, 4096 + 4 * 20, -8 * 20, -8 * 20 + 5, -8])
def test_damage_inside_is_found_by_the_samples_that_touch_it(folder: Path, tmp_path: Path, offset: int) -> None:
    dataset = TokenDataset.open(folder / "a", "train")
    cache = IndexCache(tmp_path, 1.0)
    cache.open(_file(folder))
    path = tmp_path / _file(folder).name
    sound = path.read_bytes()
    _change(path, offset, bytes([sound[offset] ^ 0x21]))
    stream = DocumentStream(dataset.lengths_D, 7, CachedOrders(cache, dataset))
    wrong, expected = 0, DocumentStream(dataset.lengths_D, 7)
    for start in range(0, stream.tokens_per_epoch - 7, 7):
        try:
            segments = stream.segments(start, 7)
        except DataError as error:
            assert str(error).startswith(f"{path}: damaged near entry")
            wrong += 1
        else:
            assert segments.documents_N.tolist() == expected.segments(start, 7).documents_N.tolist()
            assert segments.offsets_N.tolist() == expected.segments(start, 7).offsets_N.tolist()
    assert 0 < wrong < stream.tokens_per_epoch // 14
    assert cache.prepare(_file(folder)) == "replaced"
    assert path.read_bytes() == sound


def test_a_damaged_order_of_samples_is_found(tmp_path: Path) -> None:
    file = OrderFile.of_samples(1000, 7, 0)
    cache = IndexCache(tmp_path, 1.0)
    cache.open(file)
    _change(tmp_path / file.name, 4096 + 4 * 500, bytes(400))  # as after a crash of the file system
    with pytest.raises(DataError, match="damaged near entry"):
        cache.open(file).permutation.read(530, 531)
    assert cache.open(file).permutation.read(10, 11).size == 1
    assert cache.prepare(file) == "replaced"


def test_a_dataset_that_is_damaged_is_no_source_of_orders(folder: Path, tmp_path: Path) -> None:
    """With a cache most processes do not read the dataset's index; the one that builds does."""
    copy = build_small(tmp_path, "d", [{"text": text} for text in varied_texts(50)])
    pointers = 34 + 4 * 50
    _change(copy / "train.idx", pointers + 8 * 10, b"\x01")
    with pytest.raises(DataError, match=r"train\.idx: damaged"):
        TokenDataset.open(copy, "train")
    data = DataConfig(train=[DatasetConfig(path=copy)], sequence_length=16, index_cache=tmp_path / "cache")
    source = _source(data)
    with pytest.raises(DataError, match=r"train\.idx: damaged"):
        source.micro_batch(0, 1)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("documents")]


def test_a_mask_of_other_lengths_is_found_before_building(folder: Path, tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"text": "say nothing", "masked_spans": [[4, 11]]},
        {"text": "more"},
        {"text": "and more"},
    ]
    copy = build_small(tmp_path, "d", records)
    index = copy / "train.loss_mask.idx"
    lengths_D = np.frombuffer(index.read_bytes(), "<i4", 3, 34)
    _change(index, 34, (lengths_D + np.array([1, -1, 0])).astype("<i4").tobytes())
    dataset = TokenDataset.open(copy, "train", verify=False)
    with pytest.raises(DataError, match=r"loss_mask\.idx: document lengths differ"):
        IndexCache(tmp_path / "cache", 1.0).open(OrderFile.of_documents(dataset, 7, 0))


def test_a_folder_that_cannot_be_used_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.index_cache cannot be used: .*file: File exists"):
        IndexCache(tmp_path / "file", 1.0).open(_file(folder))
    config = load(NANO, [f"data.index_cache={tmp_path / 'file'}"]).config
    with pytest.raises(ConfigError, match=r"data\.index_cache \(.*file\) is not a folder"):
        check(config, world_size=1)
    check(load(NANO, [f"data.index_cache={tmp_path / 'none'}"]).config, world_size=1)

    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(DataError, match=r"the file system has no locks .* run `steptron data build-index`"):
            IndexCache(tmp_path / "a", 1.0).open(_file(folder))
    with monkeypatch.context() as patch:
        patch.setattr(index_cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5}))
        with pytest.raises(DataError, match=r"needs 4,\d+ bytes, the file system has 5 left"):
            IndexCache(tmp_path / "b", 1.0).open(_file(folder))

    def full(size: int, key: int) -> Iterator[np.ndarray]:
        yield np.zeros(1, np.uint32)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(index_cache, "permutation_pieces", full)
        with pytest.raises(DataError, match="No space left on device"):
            IndexCache(tmp_path / "c", 1.0).open(_file(folder))
    assert not [path for path in (tmp_path / "c").iterdir() if not path.name.endswith(".lock")]


def test_progress_is_told(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    IndexCache(tmp_path, 1.0, lambda *progress: told.append(progress)).open(_file(folder))
    size = TokenDataset.open(folder / "a", "train").num_documents
    assert told == [(_file(folder).name, 0, size), (_file(folder).name, size, size)]


# ------------------------------------------------------------------------------------- build-index


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", "build-index", *map(str, arguments)], env={"COLUMNS": "200"})


def test_build_index_leaves_nothing_to_build(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    overrides = (
        f"data.train=[{{path: {folder / 'a'}, weight: 3.0}}, {{path: {folder / 'b'}}}]",
        "data.sequence_length=64",
        f"data.index_cache={cache}",
        "train.steps=20",
        "train.global_batch_size=8",
    )
    built = _run(NANO, *overrides)
    assert built.exit_code == 0, built.output
    config = load(NANO, overrides).config
    source = _source(config.data)
    validation = SampleSource(validation_datasets(config.data), "validation", config.data)
    assert not source.missing_order_files(0, 160)
    names = {path.name for path in cache.iterdir()}
    assert names == {file.name for file in (*source.order_files(0, 160), *validation.order_files(0, 160))}
    assert built.stdout.count("built ") == len(names)
    assert f"{len(names)} orders, " in built.stdout

    def refuse(self: IndexCache, file: OrderFile, replace: bool = False) -> bool:
        raise AssertionError(f"{file.name} was not there")

    with monkeypatch.context() as patch:
        patch.setattr(IndexCache, "_build_once", refuse)
        source.micro_batch(0, 160)
        validation.micro_batch(0, 160)
        assert _run(NANO, *overrides).stdout.count("found ") == len(names)
    damaged = cache / sorted(names)[0]
    _cut(damaged)
    again = _run(NANO, *overrides)
    assert again.stdout.count("found ") == len(names) - 1
    assert re.search(rf"replaced .* {damaged.name}", again.stdout)
    later = _run(NANO, *overrides[:2], f"data.index_cache={tmp_path / 'later'}", *overrides[3:], "--from-step", 18)
    assert later.exit_code == 0, later.output
    assert {path.name for path in (tmp_path / "later").iterdir()} < names
    assert not _source(config.data.model_copy(update={"index_cache": tmp_path / "later"})).missing_order_files(144, 160)


def test_build_index_without_a_folder_says_what_to_set(folder: Path) -> None:
    failed = _run(NANO, f"data.train=[{{path: {folder / 'a'}}}]")
    assert failed.exit_code == 2
    assert "data.index_cache is not set: name the folder" in failed.stderr
