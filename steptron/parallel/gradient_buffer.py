"""Flat fp32 gradient buffers, reduced over the ranks that share their parameters while the backward runs.

A stage's experts are shared by the expert-data ranks; parameters that tensor parallelism cuts by the
context x data ranks; all others by the tensor x context x data ranks, each of which has used them on its own
tokens or heads. Gradients are sums (losses are divided by global token counts before the backward), so all are
reduced by plain addition and nothing is rescaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from steptron.model.assembly import StepModel
from steptron.model.parameter_shards import Cut, cut_of
from steptron.parallel.buckets import bucket_runs
from steptron.parallel.factored_group import FactoredGroup, Reduction
from steptron.parallel.mesh import Mesh


class _Bucket:
    """A slice of the buffer that is reduced at once, when all its gradients are there."""

    def __init__(self, data: torch.Tensor, num_parameters: int) -> None:
        self.data = data
        self.num_parameters = num_parameters
        self.num_ready = 0
        self.work: dist.Work | Reduction | None = None
        self.streams: set[torch.cuda.Stream] = set()


class GradientBuffer:
    """Accumulates the gradients of some parameters in fp32 and adds them up over a group.

    Every parameter gets ``main_grad``, a view of the buffer in its own shape. Parameters lie in
    reverse order, the order in which the backward reaches them; buckets are reduced strictly in
    that order, so that all ranks issue the same collectives.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup | FactoredGroup) -> None:
        self.group = group
        self.sync_enabled = True
        total = sum(parameter.numel() for parameter in parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.data = torch.zeros(total, dtype=torch.float32, device=device)
        self._buckets: list[_Bucket] = []
        self._next = 0
        ordered = parameters[::-1]
        offset = 0
        for index, (first, stop) in enumerate(bucket_runs([parameter.numel() for parameter in ordered])):
            start = offset
            for parameter in ordered[first:stop]:
                end = offset + parameter.numel()
                parameter.main_grad = self.data[offset:end].view(parameter.shape)  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(lambda p, b=index: self._accumulate(p, b))
                offset = end
            self._buckets.append(_Bucket(self.data[start:offset], stop - first))

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each reduction."""
        return [bucket.data.numel() for bucket in self._buckets]

    def zero(self) -> None:
        """Clears the gradients before a step."""
        self.data.zero_()
        for bucket in self._buckets:
            bucket.num_ready, bucket.work = 0, None
            bucket.streams.clear()
        self._next = 0

    def finish(self) -> None:
        """Reduces what has not been reduced yet and waits for all of it."""
        if self.group.size() == 1:
            return
        while self._next < len(self._buckets):
            self._reduce_next()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()

    def _accumulate(self, parameter: torch.nn.Parameter, bucket_index: int) -> None:
        assert parameter.grad is not None
        bucket = self._buckets[bucket_index]
        if bucket.work is not None:
            raise RuntimeError(
                f"a gradient of shape {list(parameter.shape)} arrived after its bucket was reduced: "
                "only the last micro-batch's backward may run outside no_sync(), and once"
            )
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if self.data.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(self.data.device))
        if self.sync_enabled and self.group.size() > 1:
            bucket.num_ready += 1
            while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
                self._reduce_next()

    @staticmethod
    def _is_ready(bucket: _Bucket) -> bool:
        return bucket.num_ready == bucket.num_parameters

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        # A backward runs on the stream of its forward, and the shared expert's may be another one: the
        # reduction waits for the stream that it is started on, and so for all that have added to the bucket.
        for stream in bucket.streams:
            torch.cuda.current_stream(self.data.device).wait_stream(stream)
        if isinstance(self.group, FactoredGroup):
            bucket.work = self.group.reduce(bucket.data)
        else:
            bucket.work = dist.all_reduce(bucket.data, group=self.group, async_op=True)
        self._next += 1


class DataParallel(MegatronModule):
    """A model chunk with its gradient buffers, behind the interface that Megatron's schedules drive.

    Attributes:
        buffers: one for each set of ranks that share parameters, and one for the experts.
        norm_gradients: the gradients that count in the global norm, by how parameters are cut: all but that of
            the last stage's copy of the embedding, which the first stage counts.
    """

    def __init__(self, module: StepModel, mesh: Mesh) -> None:
        super().__init__(module.config)
        self.module = module
        cuts = {parameter.name: cut_of(parameter.role) for parameter in module.spec.parameters()}
        by_group: dict[tuple[bool, dist.ProcessGroup | FactoredGroup], list[torch.nn.Parameter]] = {}
        by_cut: dict[Cut, list[torch.nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                cut = cuts[name]
                by_group.setdefault((cut is Cut.EXPERTS, mesh.replicas(cut)), []).append(parameter)
                if not (module.embedding_is_copy and parameter is module.embedding.weight):
                    by_cut.setdefault(cut, []).append(parameter)
        self.buffers = [GradientBuffer(parameters, group) for (_, group), parameters in by_group.items()]
        self.norm_gradients: dict[Cut, list[torch.Tensor]] = {
            cut: [p.main_grad for p in parameters]  # type: ignore[attr-defined]
            for cut, parameters in by_cut.items()
        }

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes accumulate and do not reduce (all but the last micro-batch)."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def zero_grad_buffer(self) -> None:
        """Clears the gradients before a step."""
        for buffer in self.buffers:
            buffer.zero()

    def start_grad_sync(self, *unused: object) -> None:
        """Reductions start by themselves as gradients arrive; part of Megatron's interface."""

    def finish_grad_sync(self, **unused: object) -> None:
        """Completes the reduction of every gradient."""
        for buffer in self.buffers:
            buffer.finish()

    def _set_sync(self, enabled: bool) -> None:
        for buffer in self.buffers:
            buffer.sync_enabled = enabled
