"""Flat fp32 gradient buffers, reduced over the ranks that share their parameters while the backward runs.

A stage's experts are shared by the expert-data ranks; parameters that tensor parallelism cuts by the
context x data ranks; all others by the tensor x context x data ranks, each of which has used them on its own
tokens or heads. Gradients are sums (losses are divided by global token counts before the backward), so all are
reduced by plain addition and nothing is rescaled. How buffers are laid out, reduced and owned is planned by
``steptron.optim.buffer_plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.ownership import Reduction
from steptron.parallel.replica_group import ReplicaGroup, Work


class _Span:
    """A slice of a buffer that is reduced at once, when all its gradients are there."""

    def __init__(self, data: torch.Tensor, reduction: Reduction) -> None:
        self.data = data
        self.reduction = reduction
        self.num_parameters = 0
        self.last = 0
        """Place of its last parameter in the order of the backward pass."""
        self.num_ready = 0
        self.work: Work | None = None
        self.streams: set[torch.cuda.Stream] = set()

    @property
    def is_ready(self) -> bool:
        return self.num_ready == self.num_parameters

    def expect(self, order: int) -> None:
        self.num_parameters += 1
        self.last = max(self.last, order)

    def reduce(self, group: ReplicaGroup) -> None:
        # A backward runs on the stream of its forward, and the shared expert's may be another one: the
        # reduction waits for the stream that it is started on, and so for all that have added to the span.
        for stream in self.streams:
            torch.cuda.current_stream(self.data.device).wait_stream(stream)
        scatter = self.reduction is Reduction.REDUCE_SCATTER
        self.work = group.reduce_scatter(self.data) if scatter else group.all_reduce(self.data)

    def reset(self) -> None:
        self.num_ready, self.work = 0, None
        self.streams.clear()


class GradientBuffer:
    """The gradients of some parameters in fp32, as a plan lays them out.

    Every parameter gets ``main_grad``, a view of the buffer in its own shape. After a reduce-scatter only the
    elements that this rank owns hold a sum; the rest of ``main_grad`` has no meaning.

    Attributes:
        plan: its layout.
        data: fp32 [length].

    Raises:
        ValueError: a parameter has another shape than its spec gives it; the message names it.
    """

    def __init__(
        self, plan: BufferPlan, parameters: Mapping[str, torch.nn.Parameter], device: torch.device | None = None
    ) -> None:
        self.plan = plan
        held = [parameters[shard.parameter.name] for shard in plan.shards]
        for shard, parameter in zip(plan.shards, held, strict=True):
            if parameter.shape != shard.shape:
                raise ValueError(
                    f"{shard.parameter.name} has shape {list(parameter.shape)}, and {list(shard.shape)} by its spec"
                )
        layout = plan.layout
        self.data = torch.zeros(layout.length, dtype=torch.float32, device=device or held[0].device)
        self.spans = [_Span(self.data[span.start : span.stop], layout.reduction) for span in layout.spans]
        self.spans_of: dict[torch.nn.Parameter, list[_Span]] = {}
        for parameter, offset, order in zip(held, layout.offsets, plan.order, strict=True):
            end = offset + parameter.numel()
            parameter.main_grad = self.data[offset:end].view(parameter.shape)  # type: ignore[attr-defined]
            self.spans_of[parameter] = [
                own
                for own, span in zip(self.spans, layout.spans, strict=True)
                if span.start < end and offset < span.stop
            ]
            for span in self.spans_of[parameter]:
                span.expect(order)


class GradientBuffers:
    """All gradient buffers of a rank.

    Spans over the same ranks are reduced strictly in one order, that in which a backward pass completes them, so that
    all ranks issue the same collectives.

    Args:
        buffers: one for each plan.
        groups: by the plans' names.
    """

    def __init__(self, buffers: Sequence[GradientBuffer], groups: Mapping[str, ReplicaGroup]) -> None:
        self.buffers = list(buffers)
        self._queues: list[_Queue] = []
        for name in dict.fromkeys(buffer.plan.replicas for buffer in buffers):
            own = [buffer for buffer in buffers if buffer.plan.replicas == name]
            queue = _Queue(groups[name], sorted((s for b in own for s in b.spans), key=lambda span: span.last))
            self._queues.append(queue)
            for buffer in own:
                for parameter, spans in buffer.spans_of.items():
                    _accumulate_into(parameter, spans, queue)

    @property
    def sync_enabled(self) -> bool:
        """Whether gradients are reduced as they arrive; False while micro-batches only add to them."""
        return all(queue.is_enabled for queue in self._queues)

    @sync_enabled.setter
    def sync_enabled(self, enabled: bool) -> None:
        for queue in self._queues:
            queue.is_enabled = enabled

    def __iter__(self) -> Iterator[GradientBuffer]:
        return iter(self.buffers)

    def zero(self) -> None:
        """Clears the gradients before a step."""
        for buffer in self.buffers:
            buffer.data.zero_()
        for queue in self._queues:
            queue.reset()

    def finish(self) -> None:
        """Reduces what has not been reduced yet and waits for all of it."""
        for queue in self._queues:
            queue.finish()


def _accumulate_into(parameter: torch.nn.Parameter, spans: Sequence[_Span], queue: _Queue) -> None:
    """Has a parameter's gradients added to its buffer as they arrive.

    The hook holds on to no parameter: torch cannot collect a cycle that goes through its hooks, and a model that is
    built and dropped would stay in memory, with its process groups.
    """

    def accumulate(parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        if any(span.work is not None for span in spans):
            raise RuntimeError(
                f"a gradient of shape {list(parameter.shape)} arrived after its bucket was reduced: "
                "only the last micro-batch's backward may run outside no_sync(), and once"
            )
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if parameter.is_cuda:
            for span in spans:
                span.streams.add(torch.cuda.current_stream(parameter.device))
        if queue.is_enabled:
            queue.arrived(spans)

    parameter.register_post_accumulate_grad_hook(accumulate)


class _Queue:
    """The spans over one set of ranks, in the order of their reductions."""

    def __init__(self, group: ReplicaGroup, spans: Sequence[_Span]) -> None:
        self._group = group
        self._spans = spans
        self._next = 0
        self.is_enabled = True

    def arrived(self, spans: Sequence[_Span]) -> None:
        """One more parameter of these spans has all its gradients."""
        if self._group.size() == 1:
            return
        for span in spans:
            span.num_ready += 1
        while self._next < len(self._spans) and self._spans[self._next].is_ready:
            self._reduce_next()

    def finish(self) -> None:
        if self._group.size() == 1:
            return
        while self._next < len(self._spans):
            self._reduce_next()
        for span in self._spans:
            assert span.work is not None
            span.work.wait()

    def reset(self) -> None:
        self._next = 0
        for span in self._spans:
            span.reset()

    def _reduce_next(self) -> None:
        self._spans[self._next].reduce(self._group)
        self._next += 1
