"""The state of a run as whole logical matrices: in memory, gathered from its ranks, and in a checkpoint's files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from steptron.checkpoint.manifest import Progress
from steptron.config.loader import load as load_config
from steptron.config.schema import PretrainConfig
from steptron.train.step import TrainStep
from tests.parallel.layouts import NANO, Part, parts_of

PROGRESS = Progress(step=2, consumed_sequences=16, consumed_tokens=700)
ADAMW, MUON, BF16 = "optimizer.name=adamw", "optimizer.name=muon", "train.precision=bf16"
State = dict[str, Part]


def configuration(output: Path, overrides: Sequence[str]) -> PretrainConfig:
    """Nano under AdamW, unless overrides say otherwise."""
    return load_config(NANO, [f"train.output={output}", "data.sequence_length=48", ADAMW, *overrides]).config


def forget(train: TrainStep) -> None:
    """Fills everything that a checkpoint sets with NaN."""
    for _, tensor in train.chunks.logical_tensors():
        tensor.detach().fill_(math.nan)
    for states in train.optimizer.state().values():
        for state in states:
            state.tensor.fill_(math.nan)


def state_of(train: TrainStep) -> State:
    """Every logical matrix of this rank's state; NaN is what another rank owns."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    kinds["model"] = {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}
    for kind, states in train.optimizer.state().items():
        held: dict[str, torch.Tensor] = {}
        kinds[f"optimizer.{kind}"] = held
        for state in states:
            piece = state.owned.piece
            whole = held.setdefault(piece.shard.parameter.name, torch.full(piece.shard.shape, math.nan))
            assert whole.view(-1)[piece.start : piece.stop].isnan().all()
            whole.view(-1)[piece.start : piece.stop] = state.tensor
    return {
        f"{kind}.{name}": part
        for kind, tensors in kinds.items()
        for name, part in parts_of(train.spec, train.mesh.place, tensors).items()
    }


def assembled(ranks: Sequence[State]) -> dict[str, torch.Tensor]:
    """Whole logical matrices of a state; what several ranks have is equal, and only the embedding, which two stages
    update, has more than one owner."""
    found: dict[str, dict[int, Part]] = {}
    for state in ranks:
        for name, part in state.items():
            known = found.setdefault(name, {}).setdefault(part.index, Part(part.axis, part.index, part.tensor.clone()))
            here = ~part.tensor.isnan()
            twice = here & ~known.tensor.isnan()
            assert torch.equal(known.tensor[twice], part.tensor[twice]), name
            known.tensor[here] = part.tensor[here]
    wholes = {
        name: torch.cat([parts[index].tensor for index in sorted(parts)], dim=parts[min(parts)].axis)
        for name, parts in found.items()
    }
    assert [name for name, whole in wholes.items() if whole.isnan().any()] == []
    return wholes


def num_owned(ranks: Sequence[State], kind: str) -> int:
    """Elements that all ranks together own of one kind of state, but for the embedding's."""
    prefix, embedding = f"optimizer.{kind}.", f"optimizer.{kind}.embedding.weight"
    return sum(
        int((~part.tensor.isnan()).sum())
        for state in ranks
        for name, part in state.items()
        if name.startswith(prefix) and name != embedding
    )


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("random.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
