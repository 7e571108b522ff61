"""Updated parameters on their way from their owners to all ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from steptron.optim.buffer_plan import BufferPlan
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

    def gather(self) -> list[tuple[Work, tuple[torch.nn.Parameter, ...]]]:
        """Starts to gather, in the order in which a forward pass meets the parameters.

        Returns:
            What is to be waited for, and which parameters each part belongs to.
        """
        if self._group.size() == 1:
            return []
        if self._data is None:
            return self._send_pieces()
        layout = self.plan.layout
        started = []
        for span in reversed(layout.spans):
            inside = tuple(
                parameter
                for parameter, offset in zip(self._held, layout.offsets, strict=True)
                if offset < span.stop and span.start < offset + parameter.numel()
            )
            started.append((self._group.all_gather(self._data[span.start : span.stop]), inside))
        return started

    def _send_pieces(self) -> list[tuple[Work, tuple[torch.nn.Parameter, ...]]]:
        by_name = {shard.parameter.name: p for shard, p in zip(self.plan.shards, self._held, strict=True)}
        started: list[tuple[Work, tuple[torch.nn.Parameter, ...]]] = []
        for piece in reversed(self.plan.pieces):
            parameter = by_name[piece.shard.parameter.name]
            run = parameter.detach().view(-1)[piece.start : piece.stop]
            started.append((self._group.broadcast(run, piece.owner), (parameter,)))
        return started


class ParameterGather:
    """All parameters of a rank that are under way."""

    def __init__(self, buffers: Sequence[ParameterBuffer]) -> None:
        self._buffers = list(buffers)
        self._pending: dict[torch.nn.Parameter, list[_Arrival]] = {}

    def start(self) -> None:
        """Starts to gather what this rank's optimizer and others' have updated."""
        self.wait()
        for buffer in self._buffers:
            for work, parameters in buffer.gather():
                arrival = _Arrival(work, parameters)
                for parameter in parameters:
                    self._pending.setdefault(parameter, []).append(arrival)

    def wait(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Returns when these parameters are complete, or all when None."""
        for parameter in list(self._pending) if parameters is None else parameters:
            for arrival in self._pending.pop(parameter, ()):
                arrival.wait()


class _Arrival:
    """Parameters of one collective; waiting twice is waiting once."""

    def __init__(self, work: Work, parameters: tuple[torch.nn.Parameter, ...]) -> None:
        self._work: Work | None = work
        self._parameters = parameters

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            # Collectives write past torch's version counter, which packed copies of weights go by.
            weights_changed(self._parameters)
