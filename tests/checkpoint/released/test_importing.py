"""Released folders become checkpoints: every value, every refusal, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import save_file

from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import read_manifest, read_model_config
from steptron.checkpoint.matrices import StoredMatrices
from steptron.checkpoint.released import importing
from steptron.checkpoint.released.names import released_tensors
from steptron.checkpoint.restore import restore_model
from steptron.checkpoint.weights import CheckpointWeights, ReleasedWeights
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, Section
from steptron.model.layer_spec import model_spec
from tests.checkpoint.released.transfers import (
    CASE,
    bf16_case,
    bits,
    do_import,
    failure,
    load_folder,
    split,
    write_folder,
)
from tests.worker_pool import WorkerPool


def imported_bits(checkpoint: Path) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """By released name, read with torch's reader and nothing of the import."""
    stored = StoredMatrices(checkpoint)
    names = {tensor.matrix.name: tensor.name for tensor in released_tensors(model_spec(read_model_config(checkpoint)))}
    assert names.keys() == stored.matrices.keys()
    return bits({names[name]: tensor for name, tensor in stored.read(stored.matrices).items()})


@pytest.mark.parametrize("world_size, form", [(1, "fp32"), (2, "bf16 with an index"), (3, "fp32")])
def test_every_value_arrives(pool: WorkerPool, tmp_path: Path, world_size: int, form: str) -> None:
    source = CASE if form == "fp32" else split(bf16_case(tmp_path / "bf16"), tmp_path / "split")
    results = pool.run(world_size, do_import, source, tmp_path / "out")
    tensors = load_folder(source)
    assert imported_bits(tmp_path / "out") == bits(tensors)
    for result in results:
        assert result.num_tensors == len(tensors) == 192
        assert result.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    # Every process has written its share, and nothing temporary stays.
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.distcp")]
    assert len(sizes) == world_size and max(sizes) < 1.2 * min(sizes)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def small_pieces(rank: int, world_size: int, source: Path, output: Path) -> int:
    importing.PIECE_BYTES, normal = 3000, importing.PIECE_BYTES
    try:
        do_import(rank, world_size, source, output)
    finally:
        importing.PIECE_BYTES = normal
    entries = torch.distributed.checkpoint.FileSystemReader(output).read_metadata().state_dict_metadata
    return max(len(entry.chunks) for entry in entries.values())


def test_tensors_in_pieces(pool: WorkerPool, tmp_path: Path) -> None:
    """Pieces of one tensor are shared by two processes; an expert's rows (8,192 bytes) are larger than a piece may be.

    Most pieces has eh_proj: 64 rows of 512 bytes, five to a piece.
    """
    assert pool.run(2, small_pieces, CASE, tmp_path / "out") == [13, 13]
    assert imported_bits(tmp_path / "out") == bits(load_folder(CASE))


def test_nan_and_infinity_keep_their_bits(pool: WorkerPool, tmp_path: Path) -> None:
    tensors = load_folder(CASE)
    raw = tensors["lm_head.weight"].view(torch.int32)
    raw[0, :4] = torch.tensor([0x7FC12345, -0x3FFFFF, 0x7F800001, 0x7F800000], dtype=torch.int32)
    source = write_folder(tmp_path / "nan", tensors)
    pool.run(1, do_import, source, tmp_path / "out")
    assert imported_bits(tmp_path / "out") == bits(tensors)


class ModelFile(Section):
    model: ModelConfig


def megatron_keys(rank: int, world_size: int, folder: Path) -> list[str]:
    return sorted(dist_checkpointing.load_tensors_metadata(str(folder)))


def restored(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    model = restore_model(CheckpointWeights(folder), torch.device("cpu"))
    return {name: tensor.detach() for name, tensor in model.logical_tensors()}


def from_released(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = restore_model(ReleasedWeights(CASE), torch.device("cpu"))
    return {name: tensor.detach() for name, tensor in model.logical_tensors()}


def test_the_checkpoint_is_one_of_ours(pool: WorkerPool, tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "out"
    pool.run(1, do_import, CASE, out)
    model = ReleasedWeights(CASE).model
    assert read_manifest(out).progress is None
    assert read_model_config(out) == model == load_section(out / "model.yaml", ModelFile).model
    (keys,) = pool.run(1, megatron_keys, out)
    assert len(keys) == 192 and all(key.startswith("model.") for key in keys)
    (ours,), (direct,) = pool.run(1, restored, out), pool.run(1, from_released)
    assert bits(ours) == bits(direct)


def test_all_that_does_not_fit_is_listed_before_anything_is_written(pool: WorkerPool, tmp_path: Path) -> None:
    tensors = load_folder(CASE)
    del tensors["model.norm.weight"], tensors["model.layers.3.moe.router_bias"]
    tensors["model.layers.11.embed_tokens.weight"] = torch.zeros(2)
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].clone()
    tensors["model.layers.4.moe.router_bias"] = tensors["model.layers.4.moe.router_bias"].to(torch.bfloat16)
    source = write_folder(tmp_path / "bad", tensors)
    for message in pool.run(2, failure, do_import, source, tmp_path / "out"):
        assert message.splitlines() == [
            f"{source} does not fit its config.json: 5 problems",
            "  - model.layers.1.self_attn.q_proj.weight has shape [64, 64], the model needs [96, 64]",
            "  - model.layers.3.moe.router_bias [8] is missing",
            "  - model.layers.4.moe.router_bias has dtype BF16, the model needs F32",
            "  - model.norm.weight [64] is missing",
            "  - model.layers.11.embed_tokens.weight is not part of the model",
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def damage(folder: Path, how: str) -> str:
    """Damages a split folder; returns what the message must hold."""
    index, second = folder / "model.safetensors.index.json", "model-00002-of-00002.safetensors"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    name = next(name for name, file in weight_map.items() if file == second)
    if how == "missing file":
        (folder / second).unlink()
        return f"{second} is missing"
    if how == "truncated file":
        os.truncate(folder / second, (folder / second).stat().st_size // 2)
        return f"{second} cannot be read"
    if how == "damaged header":
        with (folder / second).open("r+b") as stream:
            stream.write(b"\xff" * 16)
        return f"{second} cannot be read"
    if how == "wrong total":
        content["metadata"]["total_size"] = 2_882_241
        index.write_text(json.dumps(content))
        return f"metadata.total_size is {content['metadata']['total_size']}, the tensors have"
    if how == "another file beside them":
        save_file({"model.extra": torch.zeros(1)}, folder / "extra.safetensors")
        return "extra.safetensors is not named by model.safetensors.index.json"
    if how == "tensor in two files":
        first = "model-00001-of-00002.safetensors"
        tensors = load_folder(folder)
        own = [key for key, file in weight_map.items() if file == first]
        save_file({key: tensors[key] for key in [*own, name]}, folder / first)
        return f"{name} lies in {first} and in {second}"
    if how == "file outside the folder":
        weight_map[name] = f"../{second}"
        expected = f"'../{second}' is not the name of a file in the folder"
    elif how == "index names another file":
        weight_map[name] = "model-00001-of-00002.safetensors"
        expected = f"{name}: the index says model-00001-of-00002.safetensors, but it lies in {second}"
    else:
        del weight_map[name]
        expected = f"{name} lies in {second}, but the index does not name it"
    index.write_text(json.dumps(content))
    return expected


@pytest.mark.parametrize(
    "how",
    [
        "missing file",
        "truncated file",
        "damaged header",
        "tensor in two files",
        "file outside the folder",
        "another file beside them",
        "wrong total",
        "index names another file",
        "index leaves one out",
    ],
)
def test_damaged_folders_are_refused_by_name(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    source = split(CASE, tmp_path / "split")
    expected = damage(source, how)
    (message,) = pool.run(1, failure, do_import, source, tmp_path / "out")
    assert expected in message and str(source) in message
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


class Truncate:
    """A report that damages the source once something has been moved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, done: int, total: int) -> None:
        if done and self.file.stat().st_size > 1000:
            os.truncate(self.file, 1000)


class Interrupt:
    """A report that is interrupted once ``after`` bytes have been moved, on one rank."""

    def __init__(self, rank: int, after: int) -> None:
        self.rank, self.after = rank, after

    def __call__(self, done: int, total: int) -> None:
        if done >= self.after and torch.distributed.get_rank() == self.rank:
            raise KeyboardInterrupt


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_source_that_breaks_in_the_middle_leaves_nothing(pool: WorkerPool, tmp_path: Path, world_size: int) -> None:
    source = split(CASE, tmp_path / "split")
    report = Truncate(source / "model-00002-of-00002.safetensors")
    messages = pool.run(world_size, failure, do_import, source, tmp_path / "out", False, report)
    for message in messages:
        assert message.startswith(f"{tmp_path / 'out'} not written: {report.file}: ") and "cannot be read" in message
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interruption_leaves_nothing_and_is_felt_by_all(pool: WorkerPool, tmp_path: Path, world_size: int) -> None:
    report = Interrupt(world_size - 1, 500_000)
    outcomes = pool.run(world_size, failure, do_import, CASE, tmp_path / "out", False, report)
    assert outcomes == ["KeyboardInterrupt"] * world_size
    assert list(tmp_path.iterdir()) == []


def import_with_small_files(rank: int, world_size: int, source: Path, output: Path) -> None:
    """As on a disk that is full: no file gets larger than 1 MB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        do_import(rank, world_size, source, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_leaves_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.run(2, failure, import_with_small_files, CASE, tmp_path / "out"):
        assert message.startswith(f"{tmp_path / 'out'} not written: ")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_when_asked_for(pool: WorkerPool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    pool.run(1, do_import, CASE, out)  # an empty folder is no obstacle
    before = (out / MANIFEST).stat().st_ino
    for message in pool.run(2, failure, do_import, CASE, out):
        assert "out holds a checkpoint already: name another folder, or replace it with --force" in message
    # A failure leaves the old one alone.
    assert pool.run(1, failure, do_import, CASE, out, True, Interrupt(0, 1)) == ["KeyboardInterrupt"]
    assert (out / MANIFEST).stat().st_ino == before
    source = bf16_case(tmp_path / "bf16")
    pool.run(1, do_import, source, out, True)
    assert imported_bits(out) == bits(load_folder(source))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("keep me")
    for taken in (other, other / "notes.txt"):
        (message,) = pool.run(1, failure, do_import, CASE, taken, True)
        assert f"{taken} exists and is not a checkpoint" in message
    (message,) = pool.run(1, failure, do_import, source, tmp_path, True)
    assert "is, holds or lies in what is read" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "other", "out"]


class FullDisk:
    free = 2_000_000


def on_a_small_disk(rank: int, world_size: int, source: Path, output: Path) -> None:
    with mock.patch("shutil.disk_usage", lambda path: FullDisk):
        do_import(rank, world_size, source, output)


def test_a_disk_without_room_is_refused_at_once(pool: WorkerPool, tmp_path: Path) -> None:
    (message,) = pool.run(1, failure, on_a_small_disk, CASE, tmp_path / "out")
    assert message.endswith(f"2,882,240 bytes are to be written, but the disk of {tmp_path} has 2,000,000 left")
    assert list(tmp_path.iterdir()) == []
