"""Ranks that hold the same parameters, and the collectives that gradients and updated parameters take among them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from steptron.parallel.collectives import all_gather, reduce_scatter


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any:
        """Returns when the result is there (on CUDA: when what the current stream does next will find it)."""


class ReplicaGroup(Protocol):
    """Collectives, all in place and asynchronous, on contiguous tensors of the same shape and dtype on all members.

    The tensor must neither be used nor freed before ``wait()`` of what is returned.
    """

    @property
    def cell(self) -> int:
        """Which of the equal cells of a tensor this member owns."""

    @property
    def ranks_by_cell(self) -> tuple[int, ...]:
        """Global rank of the owner of each cell."""

    def size(self) -> int:
        """Members."""

    def all_reduce(self, data: torch.Tensor) -> Work:
        """Adds up."""

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        """Adds up; of the sum a member gets its own cell, and what the other cells hold afterwards has no meaning."""

    def all_gather(self, data: torch.Tensor) -> Work:
        """Gives every member's own cell to all."""

    def broadcast(self, data: torch.Tensor, cell: int) -> Work:
        """Gives the tensor of the member that owns ``cell`` to all."""


class WholeGroup:
    """A process group as it is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)

    @property
    def cell(self) -> int:
        return self.group.rank()

    @property
    def ranks_by_cell(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    def size(self) -> int:
        return self.group.size()

    def all_reduce(self, data: torch.Tensor) -> Work:
        return _started(dist.all_reduce(data, group=self.group, async_op=True))

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        return _started(reduce_scatter(data.chunk(self.size())[self.cell], data, group=self.group, async_op=True))

    def all_gather(self, data: torch.Tensor) -> Work:
        return _started(all_gather(data, data.chunk(self.size())[self.cell], group=self.group, async_op=True))

    def broadcast(self, data: torch.Tensor, cell: int) -> Work:
        return _started(dist.broadcast(data, src=self._ranks[cell], group=self.group, async_op=True))


def _started(work: dist.Work | None) -> Work:
    assert work is not None
    return work
