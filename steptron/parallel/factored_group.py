"""A data-parallel group as a product of two: ranks of one node, and ranks of the same place on every node.

Links within a node are an order of magnitude faster than those between nodes. A sum over the group is then
made of three steps, of which the middle one, over the slow links, carries only a node-th of the bytes:
reduce-scatter within the node, all-reduce between nodes, all-gather within the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from steptron.parallel.factors import Factor, split_by_node
from steptron.parallel.traffic import Kind, Traffic, wire_bytes

# Names from torch 2.13 on, and before.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Reduction(Protocol):
    """A sum on its way."""

    def wait(self) -> Any:
        """Returns when the sum is there (on CUDA: when what the current stream does next will find it)."""


class FactoredGroup:
    """A process group whose sums go within nodes first, then between them.

    Every member must start the same reductions in the same order. On CUDA they pipeline by themselves: while one
    is between nodes, the next one is within them. On gloo a reduction's second and third step start when it, or a
    later one, is waited for.

    Results have the same bits on all members; the order of additions differs from that of one all-reduce over
    the whole group, so that sums of floats may differ from its by rounding. With one member per node, or all
    members on one node, nothing is left to factor: sums are one all-reduce, counted for that factor.

    Must be constructed by every member of ``group``, in the same order as its other groups; other processes
    need not take part.

    Args:
        group: the whole group, on gloo or NCCL.
        node_size: ranks per node.
        timeout: longest wait for other members; as that of the other groups.

    Attributes:
        intra, inter: the factors; one of them is ``group`` itself where there is nothing to factor, the other
            one None.
        traffic: what this rank has handed to each factor's collectives so far.

    Raises:
        ValueError: nodes have different numbers of members.
    """

    def __init__(self, group: dist.ProcessGroup, node_size: int, timeout: timedelta) -> None:
        self.whole = group
        self.traffic = dict.fromkeys(Factor, Traffic())
        nodes = split_by_node(dist.get_process_group_ranks(group), node_size)
        self.intra = group if len(nodes) == 1 else None
        self.inter = group if len(nodes[0]) == 1 and len(nodes) > 1 else None
        self._queue: list[_Staged] = []
        self._streams: list[torch.cuda.Stream] = []
        if self.intra is not None or self.inter is not None:
            return
        rank = dist.get_rank()
        (node,) = (members for members in nodes if rank in members)
        column = [members[node.index(rank)] for members in nodes]

        def create(ranks: list[int], purpose: str) -> dist.ProcessGroup:
            created = dist.new_group(ranks, timeout, use_local_synchronization=True, group_desc=purpose)
            assert isinstance(created, dist.ProcessGroup)
            return created

        self.intra = create(node, "intra-node reduce-scatter")
        self.inter = create(column, "inter-node all-reduce")
        # Gathers have a group of their own. Each group then carries one kind of operation, in the order of the
        # reductions, and its ranks agree on it however far each is with the other groups.
        self._gather_group = create(node, "intra-node all-gather")

    def size(self) -> int:
        """Members of the whole group."""
        return self.whole.size()

    def rank(self) -> int:
        """This process's place in the whole group."""
        return self.whole.rank()

    def group_names(self, name: str) -> dict[str, str]:
        """Names of the factors, "NAME.intra" and "NAME.inter", by torch's ``group_name``."""
        if self.intra is None or self.inter is None:
            factor = Factor.INTER if self.intra is None else Factor.INTRA
            return {self.whole.group_name: f"{name}.{factor}"}
        return {
            self.intra.group_name: f"{name}.{Factor.INTRA}",
            self._gather_group.group_name: f"{name}.{Factor.INTRA}",
            self.inter.group_name: f"{name}.{Factor.INTER}",
        }

    def reduce(self, data: torch.Tensor) -> Reduction:
        """Starts to add up a tensor over the whole group, in place.

        The tensor must neither be used nor freed before ``wait()`` of what is returned.

        Args:
            data: contiguous, of the same shape and dtype on all members.
        """
        if not data.is_contiguous():
            raise ValueError(f"only contiguous tensors are reduced in place; strides are {data.stride()}")
        if self.inter is None or self.intra is None:
            factor = Factor.INTER if self.intra is None else Factor.INTRA
            self._count(factor, Kind.ALL_REDUCE, data, self.whole)
            work = dist.all_reduce(data, group=self.whole, async_op=True)
            assert work is not None
            return work
        parts = self.intra.size()
        flat = data.view(-1)
        padded = flat
        if flat.numel() % parts:
            padded = flat.new_zeros(-(-flat.numel() // parts) * parts)
            padded[: flat.numel()] = flat
        own = padded.chunk(parts)[self.intra.rank()] if padded.numel() else padded
        self._count(Factor.INTRA, Kind.REDUCE_SCATTER, padded, self.intra)
        self._count(Factor.INTER, Kind.ALL_REDUCE, own, self.inter)
        self._count(Factor.INTRA, Kind.ALL_GATHER, padded, self.intra)
        buffers = _Buffers(flat, padded, own)
        if data.is_cuda:
            return self._chain_on_streams(buffers)
        self._queue.append(_Staged(self, buffers))
        return self._queue[-1]

    def complete(self, staged: _Staged) -> None:
        """Waits for a reduction and for those that were started before it, step by step over all of them, so
        that they overlap."""
        last = self._queue.index(staged)
        for _ in _STEPS:
            for earlier in self._queue[: last + 1]:
                earlier.next_step()
        del self._queue[: last + 1]

    def start_step(self, index: int, buffers: _Buffers, async_op: bool) -> dist.Work | None:
        """Starts one of the steps of a reduction; on CUDA without ``async_op``, on the current stream."""
        kind = _STEPS[index]
        if kind is Kind.REDUCE_SCATTER:
            return _reduce_scatter(buffers.own, buffers.padded, group=self.intra, async_op=async_op)
        if kind is Kind.ALL_REDUCE:
            return dist.all_reduce(buffers.own, group=self.inter, async_op=async_op)
        return _all_gather(buffers.padded, buffers.own, group=self._gather_group, async_op=async_op)

    def _chain_on_streams(self, buffers: _Buffers) -> Reduction:
        """One stream per step: each runs the reductions in their order, and waits only for the step before."""
        if not self._streams:
            self._streams = [torch.cuda.Stream(buffers.flat.device) for _ in _STEPS]
        before = torch.cuda.current_stream(buffers.flat.device)
        for index, stream in enumerate(self._streams):
            stream.wait_event(before.record_event())
            with torch.cuda.stream(stream):
                self.start_step(index, buffers, async_op=False)
            before = stream
        return _OnStream(buffers, before.record_event())

    def _count(self, factor: Factor, kind: Kind, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        payload = tensor.numel() * tensor.element_size()
        self.traffic[factor] += Traffic(1, payload, wire_bytes(kind, payload, group.size()))


_STEPS = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_GATHER)


@dataclass(frozen=True)
class _Buffers:
    """What a reduction works on: the tensor, flat; the same with padding (or itself); the rank's own part of it."""

    flat: torch.Tensor
    padded: torch.Tensor
    own: torch.Tensor

    def unpad(self) -> None:
        if self.padded is not self.flat:
            self.flat.copy_(self.padded[: self.flat.numel()])


class _Staged:
    """A reduction on a backend without streams: the second and third step start when it is waited for."""

    def __init__(self, group: FactoredGroup, buffers: _Buffers) -> None:
        self._group = group
        self._buffers = buffers
        self._started = 1
        self._work = group.start_step(0, buffers, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._group.complete(self)

    def next_step(self) -> None:
        """Waits for the step that has been started last, and starts the next one."""
        assert self._work is not None
        self._work.wait()
        if self._started < len(_STEPS):
            self._work = self._group.start_step(self._started, self._buffers, async_op=True)
            self._started += 1
        else:
            self._work = None
            self._buffers.unpad()


class _OnStream:
    """A reduction whose steps have been put on streams."""

    def __init__(self, buffers: _Buffers, end: torch.cuda.Event) -> None:
        self._buffers = buffers
        self._end = end

    def wait(self) -> None:
        torch.cuda.current_stream(self._buffers.flat.device).wait_event(self._end)
        self._buffers.unpad()
