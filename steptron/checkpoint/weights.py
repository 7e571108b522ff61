"""The weights of a model, wherever they lie: a folder in the released layout, or one of our checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from steptron.checkpoint.fit import Filling, Fit, fit, logical_shapes
from steptron.checkpoint.folder import MANIFEST, resolve
from steptron.checkpoint.manifest import read_model_config, read_sequence_length
from steptron.checkpoint.matrices import StoredMatrices
from steptron.checkpoint.newest import problems_of_all
from steptron.checkpoint.released.folder import CONFIG, DTYPES, INDEX, SINGLE, ReleasedFolder, read_json
from steptron.checkpoint.released.model_config import read_model_config as read_released_config
from steptron.checkpoint.released.model_config import read_precision
from steptron.checkpoint.released.names import Precision, ReleasedTensor, released_tensors
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError, UserError
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.model.parameter_shards import MatrixShard, shard
from steptron.parallel.mesh import Mesh


class Weights(Protocol):
    """A model's weights.

    Attributes:
        path: where they lie.
        model: the architecture.
        precision: dtype of every tensor but the router's selection biases, which are fp32.
        sequence_length: tokens of the sequences that it was trained on, where that is known.
        filling: what fills the places of a model that they leave open; None: nothing may be missing.
    """

    path: Path
    model: ModelConfig
    precision: Precision
    sequence_length: int | None
    filling: Filling | None

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, by released name."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole tensors by released name, in the dtypes that are stored.

        Raises:
            UserError: a file cannot be read.
        """

    def fit(self, spec: ModelSpec) -> Fit:
        """What of a model is not read from them.

        Raises:
            ConfigError: lists every tensor that is missing, has another shape, or is not part of the model.
        """

    def load_into(self, model: ModelChunks, mesh: Mesh) -> None:
        """Sets every parameter and router bias of this process's part of a model; each process reads just that.

        The model may leave out MTP depths, and a depth's own output matrix where it shares the main one. Numbers are
        converted to the model's dtype.

        Raises:
            ConfigError: as :meth:`fit` does.
            UserError: a file cannot be read.
        """


def open_weights(path: Path, filling: Filling | None = None) -> Weights:
    """The weights in a folder: of a released model, of a checkpoint, or of a run (its newest checkpoint).

    Args:
        path: the folder.
        filling: what fills the places of a model that they leave open; nothing may be missing when None.

    Raises:
        UserError: the folder holds neither, or what it holds does not fit its configuration; every problem is listed.
    """
    if (path / SINGLE).is_file() or (path / INDEX).is_file() or (path / CONFIG).is_file():
        return ReleasedWeights(path, filling)
    try:
        return CheckpointWeights(resolve(path), filling)
    except UserError as error:
        if (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
            raise
        raise UserError(
            f"{path} holds no weights: expected a released model ({CONFIG} with {SINGLE} or {INDEX}), a checkpoint "
            f"({MANIFEST}) or a run's folder (checkpoints/step_*)"
        ) from error


def same_on_every_rank(weights: Weights) -> Weights:
    """The weights that the first rank has found: a run may write a newer checkpoint while others look. Collective."""
    found = [weights.path]
    dist.broadcast_object_list(found, src=0)
    return weights if found[0] == weights.path else open_weights(found[0], weights.filling)


def refuse_damaged(weights: Weights, contents: bool = True, group: dist.ProcessGroup | None = None) -> None:
    """Reads the files of a checkpoint and compares them with their checksums. Collective: each process reads its share.
    Released models have no checksums.

    Args:
        weights: the same on every process.
        contents: compare checksums; otherwise only sizes.
        group: of all processes, with more patience than the default one.

    Raises:
        UserError: a file is damaged; the message names it.
    """
    if not isinstance(weights, CheckpointWeights):
        return
    if faults := problems_of_all(weights.path, contents, group=group):
        raise UserError("\n  ".join([f"checkpoint {weights.path} is damaged; name another one:", *faults]))


class ReleasedWeights:
    """Weights in the released layout, checked against their ``config.json``; see :class:`Weights`."""

    def __init__(self, path: Path, filling: Filling | None = None) -> None:
        self.path = path
        self.filling = filling
        self.raw = read_json(path / CONFIG)
        self.model = read_released_config(self.raw, str(path / CONFIG))
        self.precision: Precision = read_precision(self.raw, str(path / CONFIG))
        self.sequence_length: int | None = None
        self.folder = ReleasedFolder(path)
        self.folder.check(self.expected, self.precision)

    @cached_property
    def expected(self) -> list[ReleasedTensor]:
        """Every tensor of the model."""
        return released_tensors(model_spec(self.model))

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (stored.shape, DTYPES[stored.dtype]) for name, stored in self.folder.tensors.items()}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self.folder.read(name) for name in names}

    def fit(self, spec: ModelSpec) -> Fit:
        return fit(self.path, {tensor.matrix.name: tensor.shape for tensor in self.expected}, spec, self.filling)

    @torch.no_grad()
    def load_into(self, model: ModelChunks, mesh: Mesh) -> None:
        found = self.fit(model.spec)
        stored = {tensor.matrix.name: tensor for tensor in self.expected}
        tensors = dict(model.logical_tensors())
        for parameter in model.spec.parameters():
            if parameter.name not in tensors or found.leaves_open(parameter.name):
                continue
            for part in shard(parameter, mesh.place).matrices:
                target = tensors[parameter.name].narrow(
                    1 if parameter.is_expert else 0, part.rows[0], part.rows[1] - part.rows[0]
                )
                target.copy_(self.folder.read(stored[part.matrix.name].name, _slices(part)))
        found.fill(tensors, model.spec, mesh.place, self.filling)


class CheckpointWeights:
    """The model of one of our checkpoints; see :class:`Weights`."""

    def __init__(self, path: Path, filling: Filling | None = None) -> None:
        self.path = path
        self.filling = filling
        self.model = read_model_config(path)
        self.sequence_length = read_sequence_length(path)
        self.stored = StoredMatrices(path)
        expected = logical_shapes(model_spec(self.model))
        problems = [f"{name} is missing" for name in expected if name not in self.stored.matrices]
        problems += [f"{name} is not part of the model" for name in self.stored.matrices if name not in expected]
        if problems:
            raise ConfigError(f"checkpoint {path} does not fit its own configuration", problems)
        embedding = self.stored.matrices["embedding.weight"].dtype
        self.precision: Precision = "bf16" if embedding is torch.bfloat16 else "fp32"

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return {tensor.name: tensor.matrix.name for tensor in released_tensors(model_spec(self.model))}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        stored = {name: self.stored.matrices[matrix] for name, matrix in self._by_name.items()}
        return {name: (matrix.shape, matrix.dtype) for name, matrix in stored.items()}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        matrices = self.stored.read(dict.fromkeys(self._by_name[name] for name in names))
        return {name: matrices[self._by_name[name]] for name in names}

    def fit(self, spec: ModelSpec) -> Fit:
        return fit(self.path, {name: matrix.shape for name, matrix in self.stored.matrices.items()}, spec, self.filling)

    def load_into(self, model: ModelChunks, mesh: Mesh) -> None:
        from steptron.checkpoint.loading import load_tensors
        from steptron.checkpoint.tensors import matrix_name, model_tensors

        found = self.fit(model.spec)
        tensors = model_tensors(model, mesh)
        load_tensors(self.path, {k: t for k, t in tensors.items() if not found.leaves_open(matrix_name(k))})
        found.fill(dict(model.logical_tensors()), model.spec, mesh.place, self.filling)


def _slices(part: MatrixShard) -> list[slice]:
    """The part of a whole matrix that a rank holds."""
    return [slice(None)] * part.axis + [slice(*part.range)]
