"""Weights that can be compared, read piece by piece under their released names, complete or not.

Unlike ``steptron.checkpoint.weights``, which refuses what does not fit its configuration, this takes a folder as it
is: what is missing, has another shape or another dtype is for the comparison to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from steptron.checkpoint.folder import MANIFEST, resolve
from steptron.checkpoint.manifest import read_model_config
from steptron.checkpoint.matrices import StoredMatrices, StoredMatrix
from steptron.checkpoint.released.folder import CONFIG, INDEX, SINGLE, ReleasedFolder, StoredTensor, read_json
from steptron.checkpoint.released.model_config import read_model_config as read_released_config
from steptron.checkpoint.released.names import released_tensors
from steptron.checkpoint.released.transformers_names import FUSED_AXIS, released_names
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError, UserError
from steptron.model.layer_spec import LayerSpec, ModelSpec, model_spec

Kind = Literal["released layout", "transformers layout", "checkpoint"]

READ_AHEAD_BYTES = 1 << 26

_SAFETENSORS_NAMES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_TORCH_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Header:
    """Shape and dtype of a tensor, the dtype as bf16, fp32, fp16, fp64 or by the name that the file has for it."""

    shape: tuple[int, ...]
    dtype: str


class Source(Protocol):
    """One side of a comparison.

    Attributes:
        path: where it lies.
        kind: what it is.
        model: the architecture, None where nothing says it.
        tensors: what it holds, by released name; what the released layout has no name for, by the name it has here.
    """

    path: Path
    kind: Kind
    model: ModelConfig | None
    tensors: Mapping[str, Header]

    def pieces(self, name: str, length: int) -> Iterator[torch.Tensor]:
        """A tensor in runs of ``length`` along axis 0, the last one shorter; one without axes in one piece.

        Raises:
            UserError: a file cannot be read.
        """


def open_source(path: Path) -> Source:
    """A folder in the released layout, one that transformers saved, a checkpoint, or a run's newest checkpoint.

    Raises:
        UserError: the folder is none of these, or a file in it is damaged.
    """
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return FolderSource(path)
    if (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
        return CheckpointSource(resolve(path))
    raise UserError(
        f"{path} holds no weights: expected safetensors ({SINGLE} or {INDEX}), a checkpoint ({MANIFEST}) or a run's "
        "folder (checkpoints/step_*)"
    )


@dataclass(frozen=True)
class _Place:
    """Where a folder holds a released tensor; ``run`` is its part of axis 1, None for all."""

    stored: str
    run: tuple[int, int] | None


class FolderSource:
    """A folder of safetensors files with released names, or with those of transformers' ``Step3p7TextModel``.

    ``config.json`` may be missing; where it is there it must be readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = ReleasedFolder(path)
        self.model: ModelConfig | None = None
        if (path / CONFIG).is_file():
            self.model = read_released_config(read_json(path / CONFIG), str(path / CONFIG))
        is_transformers = bool(self.folder.tensors) and not any(
            name.startswith("model.") for name in self.folder.tensors
        )
        self.kind: Kind = "transformers layout" if is_transformers else "released layout"
        self._places: dict[str, _Place] = {}
        self._headers: dict[str, Header] = {}
        self.tensors: Mapping[str, Header] = self._headers
        problems: list[str] = []
        for name, stored in self.folder.tensors.items():
            problems += self._add(name, stored, (released_names(name) if is_transformers else ()) or (name,))
        if problems:
            raise ConfigError(str(path), problems)

    def pieces(self, name: str, length: int) -> Iterator[torch.Tensor]:
        place, shape = self._places[name], self.tensors[name].shape
        if not shape:
            yield self.folder.read(place.stored)
            return
        columns = [] if place.run is None else [slice(*place.run)]
        for start in range(0, shape[0], length):
            yield self.folder.read(place.stored, [slice(start, min(start + length, shape[0])), *columns])

    def _add(self, name: str, stored: StoredTensor, released: tuple[str, ...]) -> Iterator[str]:
        dtype = _SAFETENSORS_NAMES.get(stored.dtype, stored.dtype)
        if len(released) == 1:
            self._places[released[0]] = _Place(name, None)
            self._headers[released[0]] = Header(stored.shape, dtype)
            return
        if len(stored.shape) <= FUSED_AXIS or stored.shape[FUSED_AXIS] % len(released):
            yield (
                f"{name} has shape {list(stored.shape)}: axis {FUSED_AXIS} must hold {' and '.join(released)}, "
                "equally long"
            )
            return
        width = stored.shape[FUSED_AXIS] // len(released)
        shape = (*stored.shape[:FUSED_AXIS], width, *stored.shape[FUSED_AXIS + 1 :])
        for index, part in enumerate(released):
            self._places[part] = _Place(name, (index * width, (index + 1) * width))
            self._headers[part] = Header(shape, dtype)


class CheckpointSource:
    """The model of one of our checkpoints.

    A tensor is read whole: the largest one must fit into memory. Small ones are read together with those that follow,
    because every reading starts with the checkpoint's list of tensors.
    """

    kind: Kind = "checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelConfig | None = read_model_config(path)
        self.stored = StoredMatrices(path)
        self._matrices = {
            name: matrix for name, matrix in _matrices(model_spec(self.model)).items() if matrix in self.stored.matrices
        }
        named = set(self._matrices.values())
        self._matrices |= {matrix: matrix for matrix in self.stored.matrices if matrix not in named}
        self.tensors: Mapping[str, Header] = {
            name: _header(self.stored.matrices[matrix]) for name, matrix in self._matrices.items()
        }
        self._ahead: dict[str, torch.Tensor] = {}

    def pieces(self, name: str, length: int) -> Iterator[torch.Tensor]:
        matrix = self._matrices[name]
        if matrix not in self._ahead:
            self._ahead = self.stored.read(self._batch(name))
        tensor = self._ahead.pop(matrix)
        yield from tensor.split(length) if tensor.ndim else [tensor]

    def _batch(self, name: str) -> list[str]:
        """The matrix of a tensor and the next ones, as long as all of them are small."""
        matrices, size = list(self._matrices.values()), 0
        start = list(self._matrices).index(name)
        for stop in range(start, len(matrices)):
            stored = self.stored.matrices[matrices[stop]]
            size += math.prod(stored.shape) * stored.dtype.itemsize
            if size > READ_AHEAD_BYTES:
                return matrices[start : max(stop, start + 1)]
        return matrices[start:]


def _header(stored: StoredMatrix) -> Header:
    return Header(stored.shape, _TORCH_NAMES.get(stored.dtype, str(stored.dtype).removeprefix("torch.")))


def _matrices(spec: ModelSpec) -> dict[str, str]:
    """Logical matrices by released name. Sinks, for which the layout has no names, are left out."""

    def without_sink(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, sink=False))

    plain = replace(
        spec,
        layers=tuple(map(without_sink, spec.layers)),
        mtp=tuple(replace(depth, layer=without_sink(depth.layer)) for depth in spec.mtp),
    )
    return {tensor.name: tensor.matrix.name for tensor in released_tensors(plain)}
