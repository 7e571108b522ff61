"""A data-parallel group as a product of two: ranks of one node, and ranks of the same place on every node.

Links within a node are an order of magnitude faster than those between nodes. A sum over the group is then
made of three steps, of which the middle one, over the slow links, carries only a node-th of the bytes:
reduce-scatter within the node, all-reduce between nodes, all-gather within the node. A reduce-scatter over the whole
group is the same within the node and then between nodes; an all-gather goes between nodes and then within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from steptron.parallel.collectives import all_gather, reduce_scatter
from steptron.parallel.factors import Factor, ranks_by_cell, split_by_node
from steptron.parallel.replica_group import WholeGroup, Work
from steptron.parallel.traffic import Kind, Traffic, wire_bytes


class FactoredGroup:
    """A process group whose collectives go within nodes and between them, one after the other.

    Every member must start the same collectives in the same order, and as many before it waits. On CUDA they pipeline
    by themselves: while one is between nodes, the next one is within them. On gloo the second and third step of a
    collective start when it, or a later one, is waited for.

    Results have the same bits on all members; the order of additions differs from that of one all-reduce over
    the whole group, so that sums of floats may differ from its by rounding. With one member per node, or all
    members on one node, nothing is left to factor: collectives are those of the whole group, counted for that factor.

    Must be constructed by every member of ``group``, in the same order as its other groups; other processes
    need not take part.

    Args:
        group: the whole group, on gloo or NCCL.
        node_size: ranks per node.
        timeout: longest wait for other members; as that of the other groups.

    Attributes:
        intra, inter: the factors; one of them is ``group`` itself where there is nothing to factor, the other
            one None.
        ranks_by_cell: global rank of the owner of each cell.
        traffic: what this rank has handed to each factor's collectives so far; broadcasts, which go over the whole
            group, are left out.

    Raises:
        ValueError: nodes have different numbers of members.
    """

    def __init__(self, group: dist.ProcessGroup, node_size: int, timeout: timedelta) -> None:
        self.whole = group
        self.traffic = dict.fromkeys(Factor, Traffic())
        self._whole = WholeGroup(group)
        ranks = dist.get_process_group_ranks(group)
        self.ranks_by_cell = tuple(ranks_by_cell(ranks, node_size))
        nodes = split_by_node(ranks, node_size)
        self.intra = group if len(nodes) == 1 else None
        self.inter = group if len(nodes[0]) == 1 and len(nodes) > 1 else None
        self._queue: list[_Staged] = []
        self._streams: dict[dist.ProcessGroup, torch.cuda.Stream] = {}
        if self.intra is not None or self.inter is not None:
            return
        rank = dist.get_rank()
        (node,) = (members for members in nodes if rank in members)
        column = [members[node.index(rank)] for members in nodes]

        def create(ranks: list[int], purpose: str) -> dist.ProcessGroup:
            created = dist.new_group(ranks, timeout, use_local_synchronization=True, group_desc=purpose)
            assert isinstance(created, dist.ProcessGroup)
            return created

        # Each group carries operations in the order in which collectives were started (see _Step.turn), and its ranks
        # agree on it however far each is with the other groups. A sum's way between nodes and a gather's have groups of
        # their own, since they start at different turns.
        self.intra = create(node, "intra-node reduce-scatter")
        self.inter = create(column, "inter-node sums")
        self._gather_between = create(column, "inter-node all-gather")
        self._gather_within = create(node, "intra-node all-gather")

    def size(self) -> int:
        """Members of the whole group."""
        return self.whole.size()

    def rank(self) -> int:
        """This process's place in the whole group."""
        return self.whole.rank()

    @property
    def cell(self) -> int:
        """Which of the equal cells of a tensor this member owns: those of the first members of all nodes come first."""
        return self.ranks_by_cell.index(dist.get_rank())

    def group_names(self, name: str) -> dict[str, str]:
        """Names of the factors, "NAME.intra" and "NAME.inter", by torch's ``group_name``."""
        if self.intra is None or self.inter is None:
            factor = Factor.INTER if self.intra is None else Factor.INTRA
            return {self.whole.group_name: f"{name}.{factor}"}
        return {
            self.intra.group_name: f"{name}.{Factor.INTRA}",
            self._gather_within.group_name: f"{name}.{Factor.INTRA}",
            self.inter.group_name: f"{name}.{Factor.INTER}",
            self._gather_between.group_name: f"{name}.{Factor.INTER}",
        }

    def all_reduce(self, data: torch.Tensor) -> Work:
        """Starts to add up a tensor over the whole group, in place.

        Args:
            data: contiguous, of the same shape and dtype on all members.
        """
        flat = _flat(data)
        if self.inter is None or self.intra is None:
            self._count_whole(Kind.ALL_REDUCE, flat)
            return self._whole.all_reduce(data)
        parts = self.intra.size()
        padded = flat
        if flat.numel() % parts:
            padded = flat.new_zeros(-(-flat.numel() // parts) * parts)
            padded[: flat.numel()] = flat
        own = padded.chunk(parts)[self.intra.rank()] if padded.numel() else padded
        steps = (
            _Step(0, Kind.REDUCE_SCATTER, self.intra, padded, own),
            _Step(1, Kind.ALL_REDUCE, self.inter, own, own),
            _Step(2, Kind.ALL_GATHER, self._gather_within, padded, own),
        )
        return self._start(steps, flat, padded)

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        """Starts to add up a tensor over the whole group; this member's cell gets the sum.

        Args:
            data: contiguous, a multiple of the group's size long.
        """
        flat = _flat(data)
        if self.inter is None or self.intra is None:
            self._count_whole(Kind.REDUCE_SCATTER, flat)
            return self._whole.reduce_scatter(flat)
        part = _cell_of(flat, self.intra)
        own = _cell_of(part, self.inter)
        steps = (
            _Step(0, Kind.REDUCE_SCATTER, self.intra, flat, part),
            _Step(1, Kind.REDUCE_SCATTER, self.inter, part, own),
        )
        return self._start(steps, flat, flat)

    def all_gather(self, data: torch.Tensor) -> Work:
        """Starts to give every member's cell to all.

        Args:
            data: contiguous, a multiple of the group's size long.
        """
        flat = _flat(data)
        if self.inter is None or self.intra is None:
            self._count_whole(Kind.ALL_GATHER, flat)
            return self._whole.all_gather(flat)
        part = _cell_of(flat, self.intra)
        own = _cell_of(part, self.inter)
        steps = (
            _Step(0, Kind.ALL_GATHER, self._gather_between, part, own),
            _Step(2, Kind.ALL_GATHER, self._gather_within, flat, part),
        )
        return self._start(steps, flat, flat)

    def broadcast(self, data: torch.Tensor, cell: int) -> Work:
        """Starts to give the tensor of the member that owns ``cell`` to all, over the whole group at once."""
        return self._whole.broadcast(data, self._whole.ranks_by_cell.index(self.ranks_by_cell[cell]))

    def complete(self, staged: _Staged) -> None:
        """Waits for a collective and for those that were started before it, turn by turn over all of them, so
        that they overlap."""
        last = self._queue.index(staged)
        waiting = self._queue[: last + 1]
        for turn in range(1, _TURNS + 1):
            for earlier in waiting:
                earlier.take(turn)
        del self._queue[: last + 1]

    def _start(self, steps: Sequence[_Step], flat: torch.Tensor, padded: torch.Tensor) -> Work:
        for step in steps:
            factor = Factor.INTRA if step.group in (self.intra, self._gather_within) else Factor.INTER
            self._count(factor, step.kind, step.whole, step.group)
        if flat.is_cuda:
            return self._chain_on_streams(steps, flat, padded)
        self._queue.append(_Staged(self, steps, flat, padded))
        return self._queue[-1]

    def _chain_on_streams(self, steps: Sequence[_Step], flat: torch.Tensor, padded: torch.Tensor) -> Work:
        """A stream for each group: it runs the steps in their order, and waits only for the step before."""
        before = torch.cuda.current_stream(flat.device)
        for step in steps:
            if step.group not in self._streams:
                self._streams[step.group] = torch.cuda.Stream(flat.device)
            stream = self._streams[step.group]
            stream.wait_event(before.record_event())
            with torch.cuda.stream(stream):
                step.start(async_op=False)
            before = stream
        return _OnStream(flat, padded, before.record_event())

    def _count_whole(self, kind: Kind, tensor: torch.Tensor) -> None:
        self._count(Factor.INTER if self.intra is None else Factor.INTRA, kind, tensor, self.whole)

    def _count(self, factor: Factor, kind: Kind, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        payload = tensor.numel() * tensor.element_size()
        self.traffic[factor] += Traffic(1, payload, wire_bytes(kind, payload, group.size()))


_TURNS = 3


@dataclass(frozen=True)
class _Step:
    """One collective over one factor: of a tensor, and the rank's own part of it.

    ``turn`` says when it starts among the steps of what is waited for together. Whatever goes over one group has the
    same turn: otherwise a sum and a gather that one rank waits for together and another one after the other would meet
    in that group in different orders.
    """

    turn: int
    kind: Kind
    group: dist.ProcessGroup
    whole: torch.Tensor
    own: torch.Tensor

    def start(self, async_op: bool) -> dist.Work | None:
        """Starts it; on CUDA without ``async_op``, on the current stream."""
        if self.kind is Kind.REDUCE_SCATTER:
            return reduce_scatter(self.own, self.whole, group=self.group, async_op=async_op)
        if self.kind is Kind.ALL_REDUCE:
            return dist.all_reduce(self.own, group=self.group, async_op=async_op)
        return all_gather(self.whole, self.own, group=self.group, async_op=async_op)


class _Staged:
    """A collective on a backend without streams: all steps but the first start when it is waited for."""

    def __init__(self, group: FactoredGroup, steps: Sequence[_Step], flat: torch.Tensor, padded: torch.Tensor) -> None:
        self.steps = steps
        self._group = group
        self._flat, self._padded = flat, padded
        self._started = 1
        self._work = steps[0].start(async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._group.complete(self)

    def take(self, turn: int) -> None:
        """Waits for the step that has been started last, and starts the next one, if that is due."""
        if self._work is None or (self._started < len(self.steps) and self.steps[self._started].turn > turn):
            return
        self._work.wait()
        if self._started < len(self.steps):
            self._work = self.steps[self._started].start(async_op=True)
            self._started += 1
        else:
            self._work = None
            _unpad(self._flat, self._padded)


class _OnStream:
    """A collective whose steps have been put on streams."""

    def __init__(self, flat: torch.Tensor, padded: torch.Tensor, end: torch.cuda.Event) -> None:
        self._flat, self._padded = flat, padded
        self._end = end

    def wait(self) -> None:
        torch.cuda.current_stream(self._flat.device).wait_event(self._end)
        _unpad(self._flat, self._padded)


def _unpad(flat: torch.Tensor, padded: torch.Tensor) -> None:
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def _flat(data: torch.Tensor) -> torch.Tensor:
    if not data.is_contiguous():
        raise ValueError(f"collectives in place take contiguous tensors only; strides are {data.stride()}")
    return data.view(-1)


def _cell_of(data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's equal part of a tensor."""
    return data.chunk(group.size())[group.rank()]
