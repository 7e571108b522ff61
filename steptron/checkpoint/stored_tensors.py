"""The list of the tensors in a checkpoint: of the model, the optimizer and the random generators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from steptron.checkpoint.checksums import fault
from steptron.checkpoint.manifest import Manifest
from steptron.errors import UserError

LIST = ".metadata"
"""torch's file with the list."""


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, whichever processes have written its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """The tensors of one kind.

    Attributes:
        name: ``model``, ``optimizer.<kind>`` or ``random``.
        num_tensors, num_elements, num_bytes: how many.
        dtypes: as torch names them, by frequency.
    """

    name: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    dtypes: tuple[str, ...]


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key, those of the model first, in the order of the list.

    Raises:
        UserError: the list is missing, damaged, or cannot be read.
    """
    # It is a pickle: nothing but what was written is unpickled.
    expected = manifest.files.get(LIST)
    wrong = f"{LIST} is not in the manifest" if expected is None else fault(folder, LIST, expected)
    if wrong is not None:
        raise UserError(f"{folder}: the list of its tensors cannot be read: {wrong}")
    try:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(f"{folder / LIST}, its list of tensors, cannot be read: {type(error).__name__}") from error
    tensors = {
        key: StoredTensor(tuple(entry.size), entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return dict(sorted(tensors.items(), key=lambda item: _order(group_of(item[0]))))


def group_of(key: str) -> str:
    """The kind of a tensor: ``model``, ``optimizer.<kind>`` or ``random``."""
    parts = key.split(".")
    return ".".join(parts[: 2 if parts[0] == "optimizer" else 1])


def groups(tensors: Mapping[str, StoredTensor]) -> list[Group]:
    """How many tensors there are of each kind, in their order."""
    names = list(dict.fromkeys(map(group_of, tensors)))
    return [_group(name, [tensor for key, tensor in tensors.items() if group_of(key) == name]) for name in names]


def _group(name: str, tensors: list[StoredTensor]) -> Group:
    return Group(
        name,
        len(tensors),
        sum(tensor.num_elements for tensor in tensors),
        sum(tensor.num_bytes for tensor in tensors),
        tuple(_by_frequency(dtype_name(tensor.dtype) for tensor in tensors)),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _by_frequency(names: Iterable[str]) -> list[str]:
    listed = list(names)
    return sorted(set(listed), key=lambda name: (-listed.count(name), name))


def _order(group: str) -> tuple[int, str]:
    known = ("model", "optimizer", "random")
    head = group.split(".")[0]
    return (known.index(head) if head in known else len(known), group)
