"""The tiny released case and what imports and exports make of it; functions here are called in worker processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steptron.checkpoint import saving
from steptron.checkpoint.manifest import Progress
from steptron.checkpoint.released.exporting import export_released
from steptron.checkpoint.released.importing import import_released
from steptron.checkpoint.released.processes import Transfer
from steptron.checkpoint.weights import CheckpointWeights
from steptron.config.checks import check
from steptron.config.loader import with_overrides
from steptron.config.schema import PretrainConfig
from steptron.errors import UserError
from steptron.parallel.mesh import build_mesh
from steptron.train.step import TrainStep

CASE = Path(__file__).resolve().parents[2] / "data" / "step3p5" / "tiny"
Tensors = dict[str, torch.Tensor]


def load_folder(folder: Path) -> Tensors:
    """Every tensor of a released folder, read by the library; no name may lie in two files."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """Dtype, shape and bytes: equal for tensors that are equal to the bit, NaN included."""
    return {
        name: (tensor.dtype, list(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def write_folder(folder: Path, tensors: Tensors, **config: object) -> Path:
    """A released folder with the case's config.json, of which keys are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((CASE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


def bf16_case(folder: Path) -> Path:
    tensors = {
        name: tensor if name.endswith("router_bias") else tensor.to(torch.bfloat16)
        for name, tensor in load_folder(CASE).items()
    }
    return write_folder(folder, tensors, torch_dtype="bfloat16")


def split(source: Path, folder: Path) -> Path:
    """The same model in two files with an index."""
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    tensors = load_folder(source)
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[:50], names[50:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


def do_import(
    rank: int,
    world_size: int,
    source: Path,
    output: Path,
    force: bool = False,
    report: Callable[[int, int], None] = quiet,
) -> Transfer:
    return import_released(source, output, force=force, report=report)


def do_export(
    rank: int,
    world_size: int,
    checkpoint: Path,
    output: Path,
    max_shard_bytes: int = 10**9,
    precision: str | None = None,
    companions_from: Path | None = None,
    force: bool = False,
    report: Callable[[int, int], None] = quiet,
) -> Transfer:
    return export_released(
        CheckpointWeights(checkpoint),
        output,
        max_shard_bytes=max_shard_bytes,
        precision=precision,  # type: ignore[arg-type]
        companions_from=companions_from,
        force=force,
        report=report,
    )


def failure(rank: int, world_size: int, function: Callable[..., object], *args: object) -> str:
    """The message of the UserError, or the name of the interruption, that a call ends with."""
    try:
        function(rank, world_size, *args)
    except UserError as error:
        return str(error)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "no failure"


def configuration(checkpoint: Path, output: Path, overrides: list[str]) -> PretrainConfig:
    weights = CheckpointWeights(checkpoint)
    raw = {
        "model": weights.model.model_dump(),
        "data": {"train": [{"path": str(output / "data")}], "sequence_length": 40},
        "optimizer": {"lr": 1e-3},
        "loss": {"mtp_train_depths": 3},
        "train": {
            "output": str(output),
            "steps": 1,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "precision": weights.precision,
        },
    }
    return with_overrides(PretrainConfig.model_validate(raw), overrides, "the case")


def load_and_save(rank: int, world_size: int, checkpoint: Path, output: Path, overrides: list[str]) -> None:
    """A run under a layout starts from an imported checkpoint and writes one of its own, without training."""
    config = configuration(checkpoint, output, overrides)
    check(config, world_size)
    mesh = build_mesh(config.parallel)
    train = TrainStep(config, mesh, torch.device("cpu"), CheckpointWeights(checkpoint))
    saving.save(config, Progress(), ["hash"], train.chunks, train.optimizer, mesh)


def headers(folder: Path) -> dict[str, list[str]]:
    """Names of the tensors in each file."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found[path.name] = list(file.keys())
    return found
