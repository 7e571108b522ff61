"""Checkpoints become released folders: the round trip under every layout, files, dtypes, going on, refusals, memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steptron.checkpoint.released.names import released_tensors
from steptron.checkpoint.released.shards import parse_size, plan_shards
from steptron.checkpoint.weights import CheckpointWeights, ReleasedWeights
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, Section
from steptron.model.layer_spec import model_spec
from tests.checkpoint.released.transfers import (
    CASE,
    bf16_case,
    bits,
    configuration,
    do_export,
    do_import,
    failure,
    headers,
    load_and_save,
    load_folder,
    split,
    write_folder,
)
from tests.worker_pool import REPOSITORY, WorkerPool


class ModelFile(Section):
    model: ModelConfig


LAYOUTS = {
    "one process": (1, []),
    "PP2": (2, ["parallel.pipeline=2"]),
    "EP2": (2, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "TP2xEP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
}


@pytest.fixture(scope="module")
def imported(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Source and checkpoint by precision."""
    root = tmp_path_factory.mktemp("imported")
    sources = {"fp32": CASE, "bf16": bf16_case(root / "source")}
    for precision, source in sources.items():
        pool.run(2, do_import, source, root / precision)
    return {precision: (source, root / precision) for precision, source in sources.items()}


@pytest.mark.parametrize("precision, name", [*(("fp32", name) for name in LAYOUTS), ("bf16", "PP2xEP2")])
def test_the_round_trip_through_a_run_under_every_layout(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path, precision: str, name: str
) -> None:
    """Released folder, checkpoint, processes of a run, its checkpoint, released folder: no bit changes."""
    source, checkpoint = imported[precision]
    world_size, overrides = LAYOUTS[name]
    pool.run(world_size, load_and_save, checkpoint, tmp_path / "run", overrides)
    (result,) = pool.run(1, do_export, tmp_path / "run" / "checkpoints" / "step_00000000", tmp_path / "out", 400_000)
    tensors = load_folder(source)
    assert bits(load_folder(tmp_path / "out")) == bits(tensors)
    assert result.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    # Opening checks names, shapes and dtypes against the written config.json.
    written = ReleasedWeights(tmp_path / "out")
    assert written.model == ReleasedWeights(source).model and written.precision == precision


def test_a_padded_vocabulary_is_cut_again(pool: WorkerPool, tmp_path: Path) -> None:
    """127 tokens on two ranks: the second one's last row is padding, which no export holds."""
    tensors = {
        name: tensor[:127].clone()
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "shared_head.output.weight"))
        else tensor
        for name, tensor in load_folder(CASE).items()
    }
    source = write_folder(tmp_path / "odd", tensors, vocab_size=127)
    pool.run(1, do_import, source, tmp_path / "imported")
    pool.run(2, load_and_save, tmp_path / "imported", tmp_path / "run", ["parallel.tensor=2"])
    pool.run(1, do_export, tmp_path / "run" / "checkpoints" / "step_00000000", tmp_path / "out")
    assert bits(load_folder(tmp_path / "out")) == bits(tensors)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_imported_checkpoint_comes_back_in_one_file(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path, precision: str
) -> None:
    source, checkpoint = imported[precision]
    pool.run(1, do_export, checkpoint, tmp_path / "out")
    assert bits(load_folder(tmp_path / "out")) == bits(load_folder(source))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_and_index(pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Three processes write files of up to 40,000 bytes of whole tensors, in the model's order."""
    source, checkpoint = imported["bf16"]
    out = tmp_path / "out"
    results = pool.run(3, do_export, checkpoint, out, 40_000)
    tensors = load_folder(source)
    assert bits(load_folder(out)) == bits(tensors)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"] == {"total_size": total} and {result.num_bytes for result in results} == {total}
    files = headers(out)
    assert index["weight_map"] == {name: file for file, names in files.items() for name in names}
    count = len(files)
    assert list(files) == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    sizes = [sum(tensors[name].nbytes for name in names) for names in files.values()]
    assert all(size <= 40_000 for size in sizes)
    # Files are filled in the model's order: each would be too large with the next file's first tensor.
    order = {tensor.name: number for number, tensor in enumerate(ReleasedWeights(source).expected)}
    firsts = [min(names, key=order.__getitem__) for names in files.values()]
    assert [order[name] for name in firsts] == sorted(order[name] for name in firsts)
    assert all(size + tensors[first].nbytes > 40_000 for size, first in zip(sizes, firsts[1:], strict=False))
    for path in out.glob("*.safetensors"):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        assert length % 8 == 0
        for name, entry in header.items():
            if name != "__metadata__":  # where readers map the file, elements must be aligned
                assert entry["data_offsets"][0] % tensors[name].itemsize == 0


def test_the_released_model_is_planned_to_the_byte() -> None:
    flash = load_section(REPOSITORY / "configs" / "model" / "step3p5-flash.yaml", ModelFile).model
    shards = plan_shards(released_tensors(model_spec(flash)), "bf16", parse_size("5GB"))
    assert sum(shard.num_bytes for shard in shards) == 398_768_626_944
    assert len({entry.name for shard in shards for entry in shard.entries}) == 804
    assert sum(len(shard.entries) for shard in shards) == 804
    assert all(shard.num_bytes <= 5e9 for shard in shards)


def test_a_tensor_larger_than_a_file_may_be_has_its_own(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = imported["fp32"]
    pool.run(2, do_export, checkpoint, tmp_path / "out", 1)
    assert [len(names) for names in headers(tmp_path / "out").values()] == [1] * 192
    assert bits(load_folder(tmp_path / "out")) == bits(load_folder(source))


@pytest.mark.parametrize("stored, wanted", [("fp32", "bf16"), ("bf16", "fp32")])
def test_dtypes_are_converted_and_router_biases_are_not(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path, stored: str, wanted: str
) -> None:
    source, checkpoint = imported[stored]
    pool.run(1, do_export, checkpoint, tmp_path / "out", 10**9, wanted)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[wanted]
    expected = {
        name: tensor if name.endswith("router_bias") else tensor.to(dtype)
        for name, tensor in load_folder(source).items()
    }
    assert bits(load_folder(tmp_path / "out")) == bits(expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config == original | {"torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[wanted]}


def test_a_shared_output_matrix_is_written_for_every_depth(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    _, checkpoint = imported["fp32"]
    pool.run(1, load_and_save, checkpoint, tmp_path / "run", ["model.mtp.head=shared"])
    pool.run(1, do_export, tmp_path / "run" / "checkpoints" / "step_00000000", tmp_path / "out")
    tensors = load_folder(tmp_path / "out")
    expected = load_folder(CASE)
    for layer in (9, 10, 11):
        expected[f"model.layers.{layer}.transformer.shared_head.output.weight"] = expected["lm_head.weight"]
    assert bits(tensors) == bits(expected)


class StopAfter:
    """A report that counts the tensors that were written, and is interrupted after some bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, done: int, total: int) -> None:
        if done > self.limit:
            raise KeyboardInterrupt


class Count:
    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, done: int, total: int) -> None:
        self.log.write_text(str(total))


def test_an_interrupted_export_goes_on(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = imported["fp32"]
    out, partial = tmp_path / "out", tmp_path / ".out.exporting"
    arguments = (checkpoint, out, 300_000, None, None, False)
    assert pool.run(1, failure, do_export, *arguments, StopAfter(1_500_000)) == ["KeyboardInterrupt"]
    assert not out.exists()
    kept = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert len(kept) >= 3
    # One of the complete files is damaged meanwhile: it is written again.
    damaged = min(kept)
    os.truncate(partial / damaged, 5000)
    total = sum(tensor.nbytes for tensor in load_folder(source).values())
    pool.run(1, do_export, *arguments, Count(tmp_path / "log"))
    assert int((tmp_path / "log").read_text()) < total - 500_000
    again = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert {name for name in kept if again[name] == kept[name]} == kept.keys() - {damaged}
    assert bits(load_folder(out)) == bits(load_folder(source))
    assert not partial.exists() and not list(out.glob("*.partial")) and not (out / "plan.json").exists()


@pytest.mark.parametrize("change", ["dtype", "shard size", "checkpoint"])
def test_files_of_another_export_are_not_taken_over(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path, change: str
) -> None:
    source, checkpoint = imported["fp32"]
    out = tmp_path / "out"
    pool.run(1, failure, do_export, checkpoint, out, 300_000, None, None, False, StopAfter(1_500_000))
    size = 300_001 if change == "shard size" else 300_000
    expected = load_folder(source)
    if change == "checkpoint":
        for tensor in expected.values():
            tensor.mul_(2)
        pool.run(1, do_import, write_folder(tmp_path / "twice", expected), tmp_path / "other")
        checkpoint = tmp_path / "other"
    pool.run(1, do_export, checkpoint, out, size, "bf16" if change == "dtype" else None)
    if change == "dtype":
        expected = {n: t if n.endswith("router_bias") else t.to(torch.bfloat16) for n, t in expected.items()}
    assert bits(load_folder(out)) == bits(expected)


def break_checkpoint(folder: Path, copy: Path) -> Path:
    """A checkpoint of which the second half of a file is gone."""
    shutil.copytree(folder, copy)
    file = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return copy


def test_a_damaged_checkpoint_is_named_on_every_rank(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    broken = break_checkpoint(imported["fp32"][1], tmp_path / "broken")
    for message in pool.run(2, failure, do_export, broken, tmp_path / "out", 300_000):
        assert message.startswith(f"checkpoint {broken} is damaged; name another one:")
        assert ".distcp has" in message and "cut off" in message
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_replaced_only_when_asked_for(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    _, checkpoint = imported["fp32"]
    out = tmp_path / "out"
    pool.run(1, do_export, checkpoint, out, 300_000)
    for message in pool.run(2, failure, do_export, checkpoint, out):
        assert "out holds a released model already: name another folder, or replace it with --force" in message
    pool.run(1, do_export, checkpoint, out, 10**9, None, None, True)
    assert list(headers(out)) == ["model.safetensors"]
    (message,) = pool.run(1, failure, do_export, checkpoint, checkpoint, 10**9, None, None, True)
    assert "is, holds or lies in what is read" in message
    (message,) = pool.run(1, failure, do_export, checkpoint, out, 10**9, None, out, True)
    assert "is, holds or lies in what is read" in message


def test_what_the_layout_cannot_express_is_refused(
    pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    _, checkpoint = imported["fp32"]
    overrides = ["model.mtp.chain=post_norm", "model.clamp.position=before_silu"]
    pool.run(1, load_and_save, checkpoint, tmp_path / "run", overrides)
    (message,) = pool.run(1, failure, do_export, tmp_path / "run" / "checkpoints" / "step_00000000", tmp_path / "out")
    assert "2 problems" in message and "model.mtp.chain is post_norm" in message and "before_silu" in message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_configuration_of_a_run(pool: WorkerPool, imported: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Longest sequence: factor x original length with scaling (2 x 64), else the run's sequence length."""
    _, checkpoint = imported["fp32"]
    longest = {}
    for name, overrides in {"scaled": [], "plain": ["model.full.rope.scaling=null"]}.items():
        pool.run(1, load_and_save, checkpoint, tmp_path / name, overrides)
        folder = tmp_path / name / "checkpoints" / "step_00000000"
        pool.run(1, do_export, folder, tmp_path / f"{name}-out")
        config = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
        assert ReleasedWeights(tmp_path / f"{name}-out").model == CheckpointWeights(folder).model
        assert (
            config["architectures"] == ["Step3p5ForCausalLM"]
            and config["max_seq_len"] == (config["max_position_embeddings"])
        )
        longest[name] = config["max_position_embeddings"]
    assert longest == {"scaled": 128, "plain": 40}
    assert configuration(checkpoint, tmp_path, []).data.sequence_length == 40


def test_peak_memory_is_a_fraction_of_the_model(tmp_path: Path) -> None:
    """300 MB in tensors of up to 17 MB, in a process of its own that is set up as the command's."""
    raw = json.loads((CASE / "config.json").read_text())
    wide = {"moe_num_experts": 32, "moe_intermediate_size": 2048}
    tensors = load_folder(CASE)
    shapes = {"gate": (32, 64), "router_bias": (32,), "gate_proj": (32, 2048, 64), "up_proj": (32, 2048, 64)}
    shapes["down_proj"] = (32, 64, 2048)
    for name in tensors:
        part = name.removesuffix(".weight").rpartition(".")
        if part[0].endswith(".moe"):
            tensors[name] = torch.randn(shapes[part[2]])
    large = write_folder(tmp_path / "source", tensors, **raw | wide)
    total = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    assert total > 300e6
    result = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.released.memory", str(CASE), str(large), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
    )
    assert result.returncode == 0, result.stderr
    importing, exporting, whole = map(int, result.stdout.split())
    assert importing < 0.25 * total and exporting < 0.25 * total, result.stdout
    # What is measured would show a model that is held whole.
    assert whole > 0.6 * total, result.stdout
    assert bits(load_folder(tmp_path / "large-out")) == bits(load_folder(large))


def test_a_split_source_and_a_split_export_meet(pool: WorkerPool, tmp_path: Path) -> None:
    source = split(CASE, tmp_path / "split")
    pool.run(1, do_import, source, tmp_path / "imported")
    pool.run(1, do_export, tmp_path / "imported", tmp_path / "out", 1_000_000)
    pool.run(1, do_import, tmp_path / "out", tmp_path / "again")
    pool.run(1, do_export, tmp_path / "again", tmp_path / "last")
    assert bits(load_folder(tmp_path / "last")) == bits(load_folder(CASE))
