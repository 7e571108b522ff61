"""Reading the logical matrices of a checkpoint whole, one by one, in any process and without the others.

Checkpoints are torch_dist: files of torch's distributed checkpoint, which holds every key as one tensor whatever
layout wrote it. A process that needs whole matrices reads them with torch alone; Megatron-Core is not imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from steptron.checkpoint.manifest import read_manifest
from steptron.errors import UserError

PREFIX = "model."

FAILURES = (Exception, CheckpointException)
"""A full disk, a lost folder, a truncated or missing shard show in as many forms as there are writers and readers;
torch's own, which gathers those of all ranks, is no ``Exception``."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as it lies in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors once, not for every reading."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def what_failed(error: BaseException) -> str:
    """The failure itself, in one line, of torch's exception that gathers those of all ranks.

    Raises:
        KeyboardInterrupt: an interruption, which torch gathers too.
    """
    failures = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    if any(isinstance(failure, KeyboardInterrupt) for failure in failures):
        raise KeyboardInterrupt from error
    failure = failures[0] if failures else error
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0]}" if text else type(failure).__name__


class StoredMatrices:
    """The logical matrices of a checkpoint's model.

    Args:
        folder: the checkpoint.

    Raises:
        UserError: it is no checkpoint of this format or its list of tensors cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        read_manifest(folder)
        self.folder = folder
        self._reader = _Reader(folder)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise UserError(
                f"{folder}/.metadata, its list of tensors, is missing or damaged: {type(error).__name__}"
            ) from error
        self.matrices: Mapping[str, StoredMatrix] = {
            key.removeprefix(PREFIX): StoredMatrix(tuple(entry.size), entry.properties.dtype)
            for key, entry in entries.items()
            if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        """By logical name."""

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole matrices by logical name, in the dtypes that are stored.

        Raises:
            UserError: a file is missing, truncated or damaged.
        """
        tensors = {
            PREFIX + name: torch.empty(self.matrices[name].shape, dtype=self.matrices[name].dtype) for name in names
        }
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=self._reader, no_dist=True)
        except FAILURES as error:
            raise UserError(f"{self.folder} cannot be loaded: {what_failed(error)}{self._files(tensors)}") from error
        return {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}

    def _files(self, keys: Iterable[str]) -> str:
        """Says which files hold some tensors: one of them is missing, truncated or damaged."""
        wanted, places = set(keys), self._reader.read_metadata().storage_data or {}
        names = sorted({place.relative_path for index, place in places.items() if index.fqn in wanted})
        return f" (a file is missing, truncated or damaged: {', '.join(names[:8])})" if names else ""
