"""Megatron-Core's plans of who writes what of a checkpoint, and its lists of what was written."""

from __future__ import annotations

import functools
import inspect
import os
import queue
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.storage import WriteResult

from steptron.platform.distributed import gather_to_all

Buckets = Sequence[tuple[str, tuple[Sequence[tuple[Any, Any]], Sequence[tuple[Any, torch.Tensor]]]]]
"""What a process is to write: a file's name, and (plan's item, data) of objects and tensors."""


class Planner:
    """Makes the plans of a run's saves, anew only when other tensors are saved than the last time."""

    def __init__(self) -> None:
        self._strategy: TorchDistSaveShardedStrategy | None = None
        self._planned: list[Any] = []

    def plan(self, tensors: Mapping[str, ShardedTensor]) -> Plan:
        """Collective."""
        described = [_description(tensor) for tensor in tensors.values()]
        # Megatron-Core keeps to what it has planned without a look at what it is given.
        is_new = not all(gather_to_all(self._strategy is not None and described == self._planned))
        if self._strategy is None or is_new:
            self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
            self._planned = described
        results = _results_of_this_process()
        while not results.empty():  # of a save that failed elsewhere
            results.get()
        # 0.19 knows another package's writers, and would take them.
        strategy = {"async_strategy": "mcore"} if "async_strategy" in _SAVE_PARAMETERS else {}
        folder = tempfile.TemporaryDirectory(prefix="steptron-plan-", dir=_memory())
        request = dist_checkpointing.save(
            dict(tensors),
            folder.name,
            self._strategy,
            validate_access_integrity=is_new,
            async_sharded_save=True,
            **strategy,
        )
        assert request is not None
        return Plan(request, folder)


class Plan:
    """Who writes what of one save, and the lists of it.

    Megatron-Core writes its own small files between its collectives. It gets a folder in memory for them: a process
    that failed there, for a full disk, would leave the others waiting.
    """

    def __init__(self, request: AsyncRequest, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._request = request
        self._folder = folder

    def staged(self, tensors: Mapping[str, ShardedTensor]) -> Buckets:
        """What this process writes, copied to its own memory where it is one of the given tensors."""
        if self._request.async_fn is None or self._request.preload_fn is None:
            return []
        live = {sharded.data.untyped_storage().data_ptr() for sharded in tensors.values()}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            # Megatron-Core has copied views, and what lay on a GPU.
            return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

        return [
            (name, (objects, [(item, copied(tensor)) for item, tensor in held]))
            for _, name, (objects, held) in self._request.preload_fn()
        ]

    def conclude(self, results: Mapping[int, list[WriteResult]]) -> None:
        """Makes the lists, from where each process has written its items, by file. Collective."""
        _results_of_this_process().put(results)
        for finalize in self._request.finalize_fns:
            finalize()

    def write_lists(self, folder: Path) -> None:
        """On the first process, after :meth:`conclude`: writes the lists into the checkpoint's folder.

        Raises:
            OSError: they cannot be written.
        """
        for file in Path(self._folder.name).iterdir():
            shutil.copyfile(file, folder / file.name)
        self._folder.cleanup()


_SAVE_PARAMETERS = inspect.signature(dist_checkpointing.save).parameters
_SHARED_MEMORY = "/dev/shm"


def _memory() -> str | None:
    """A folder whose files lie in memory; None, for the usual one of temporary files, where there is none."""
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None


def _description(tensor: ShardedTensor) -> tuple[Any, ...]:
    return tensor.key, tensor.dtype, tensor.local_shape, tensor.global_shape, tensor.global_offset, tensor.replica_id


@functools.cache
def _results_of_this_process() -> queue.SimpleQueue[Any]:
    """Where Megatron-Core looks for what its writers wrote.

    It would start a manager process for that queue: seconds for the first save, a save that hangs when the manager
    dies, and a process left over when a rank is killed.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    filesystem_async._results_queue = results
    return results
