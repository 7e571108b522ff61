"""Megatron-Core's plans of who writes what of a checkpoint, and copies of what is to be written."""

from __future__ import annotations

import functools
import inspect
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from steptron.checkpoint.matrices import FAILURES, what_failed
from steptron.errors import UserError
from steptron.platform.distributed import gather_to_all

Buckets = Sequence[tuple[str, str, tuple[Sequence[tuple[Any, Any]], Sequence[tuple[Any, torch.Tensor]]]]]
"""What Megatron-Core's planner gives a process to write: path, name, and (plan's item, data) of objects and tensors."""


class Planner:
    """Megatron-Core's plans of who writes what. Planned anew only when other tensors are saved than the last time."""

    def __init__(self) -> None:
        self._strategy: TorchDistSaveShardedStrategy | None = None
        self._planned: list[Any] = []

    def plan(self, tensors: Mapping[str, ShardedTensor], folder: Path) -> AsyncRequest:
        """The request that one of Megatron-Core's own writers would carry out. Collective.

        Raises:
            UserError: the folder cannot be written.
        """
        described = [_description(tensor) for tensor in tensors.values()]
        # Megatron-Core keeps to what it has planned without a look at what it is given.
        is_new = not all(gather_to_all(self._strategy is not None and described == self._planned))
        if self._strategy is None or is_new:
            self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
            self._planned = described
        results = results_of_this_process()
        while not results.empty():  # of a save that failed elsewhere
            results.get()
        # 0.19 knows another package's writers, and would take them.
        strategy = {"async_strategy": "mcore"} if "async_strategy" in _SAVE_PARAMETERS else {}
        try:
            request = dist_checkpointing.save(
                dict(tensors),
                str(folder),
                self._strategy,
                validate_access_integrity=is_new,
                async_sharded_save=True,
                **strategy,
            )
        except FAILURES as error:
            self._strategy = None
            raise UserError(f"checkpoint not written: {folder}: {what_failed(error)}") from error
        assert request is not None
        return request


_SAVE_PARAMETERS = inspect.signature(dist_checkpointing.save).parameters


def _description(tensor: ShardedTensor) -> tuple[Any, ...]:
    return tensor.key, tensor.dtype, tensor.local_shape, tensor.global_shape, tensor.global_offset, tensor.replica_id


def staged(request: AsyncRequest, tensors: Mapping[str, ShardedTensor]) -> Buckets:
    """What this process writes, copied to its own memory where it is one of the given tensors."""
    if request.async_fn is None or request.preload_fn is None:
        return []
    live = {sharded.data.untyped_storage().data_ptr() for sharded in tensors.values()}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        # Megatron-Core has copied views, and what lay on a GPU.
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return [
        (path, name, (objects, [(item, copied(tensor)) for item, tensor in held]))
        for path, name, (objects, held) in request.preload_fn()
    ]


@functools.cache
def results_of_this_process() -> queue.SimpleQueue[Any]:
    """Where Megatron-Core looks for what its writers wrote.

    It would start a manager process for that queue: seconds for the first save, a save that hangs when the manager
    dies, and a process left over when a rank is killed.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    filesystem_async._results_queue = results
    return results
