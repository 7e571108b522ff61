"""Updated parameters on their way from their owners to all ranks that hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from steptron.optim.buffer_plan import BufferPlan, Piece
from steptron.parallel.replica_group import ReplicaGroup, Work
from steptron_kernels.packed_weights import weights_changed


class ParameterBuffer:
    """The parameters of a gradient buffer, gathered as its plan says.

    Where gradients lie in cells, so do parameters: they move into one flat tensor of the same layout, and each span is
    gathered in place. Otherwise parameters stay where they are and every owner sends its pieces.

    Args:
        plan: the gradient buffer's.
        parameters: by name; their storage may move.
        group: the ranks that share them.

    Raises:
        ValueError: parameters of one buffer have different dtypes; the message names one.
    """

    def __init__(self, plan: BufferPlan, parameters: Mapping[str, torch.nn.Parameter], group: ReplicaGroup) -> None:
        self.plan = plan
        self._group = group
        self._held = [parameters[shard.parameter.name] for shard in plan.shards]
        self._data: torch.Tensor | None = None
        layout = plan.layout
        if layout.has_cells and group.size() > 1:
            self._data = self._held[0].new_zeros(layout.length, requires_grad=False)
            for shard, parameter, offset in zip(plan.shards, self._held, layout.offsets, strict=True):
                if parameter.dtype is not self._data.dtype:
                    raise ValueError(f"{shard.parameter.name} is {parameter.dtype} among {self._data.dtype}")
                view = self._data[offset : offset + parameter.numel()].view(parameter.shape)
                view.copy_(parameter.detach())
                parameter.data = view

    def transfers(self) -> list[Transfer]:
        """What brings updated parameters to all ranks; nothing where one rank has them alone."""
        if self._group.size() == 1:
            return []
        layout, data = self.plan.layout, self._data
        places = list(zip(self._held, layout.offsets, self.plan.order, strict=True))
        if data is None:
            by_name = {shard.parameter.name: place for shard, place in zip(self.plan.shards, places, strict=True)}
            sent = [(piece, by_name[piece.shard.parameter.name]) for piece in self.plan.pieces]
            return [Transfer(order, (p,), self._sending(p, piece)) for piece, (p, _, order) in sent]
        transfers = []
        for span in layout.spans:
            inside = [(p, order) for p, start, order in places if start < span.stop and span.start < start + p.numel()]
            if inside:
                parameters, orders = zip(*inside, strict=True)
                transfers.append(Transfer(max(orders), parameters, self._gathering(data[span.start : span.stop])))
        return transfers

    def _sending(self, parameter: torch.nn.Parameter, piece: Piece) -> Callable[[], Work]:
        run = parameter.detach().view(-1)[piece.start : piece.stop]
        return lambda: self._group.broadcast(run, piece.owner)

    def _gathering(self, span: torch.Tensor) -> Callable[[], Work]:
        return lambda: self._group.all_gather(span)


@dataclass(frozen=True)
class Transfer:
    """One collective that brings parameters to all ranks.

    Attributes:
        order: place in the backward pass of that parameter which a forward pass meets first.
        parameters: which have a part in it.
        start: starts it.
    """

    order: int
    parameters: tuple[torch.nn.Parameter, ...]
    start: Callable[[], Work]


class ParameterGather:
    """All parameters of a rank that are under way.

    Transfers start in the order in which a forward pass meets their parameters, and are waited for in that order
    alone: over several groups whose collectives have several steps, ranks that waited in orders of their own would
    wait for each other.
    """

    def __init__(self, buffers: Sequence[ParameterBuffer]) -> None:
        transfers = [transfer for buffer in buffers for transfer in buffer.transfers()]
        self._transfers = sorted(transfers, key=lambda transfer: -transfer.order)
        self._last = {p: index for index, transfer in enumerate(self._transfers) for p in transfer.parameters}
        self._under_way: deque[Work] = deque()

    def start(self) -> None:
        """Starts to gather what this rank's optimizer and others' have updated."""
        self.wait()
        self._under_way.extend(transfer.start() for transfer in self._transfers)

    def wait(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Returns when these parameters are complete, and all that come before them; or all when None."""
        if not self._under_way:
            return
        total = len(self._transfers)
        needed = total if parameters is None else max((self._last.get(p, -1) + 1 for p in parameters), default=0)
        while total - len(self._under_way) < needed:
            transfer = self._transfers[total - len(self._under_way)]
            self._under_way.popleft().wait()
            # Collectives write past torch's version counter, which packed copies of weights go by.
            weights_changed(transfer.parameters)
