"""Results that are computed again in the backward pass instead of being kept for it.

    y = recomputed(f, x)
    with not_kept(y):
        z = g(y)

is ``z = g(f(x))``, but between the forward and the backward pass neither y nor anything that f alone needs is in
memory: the first reader of y in the backward pass has f run again on x. Unlike ``torch.utils.checkpoint`` around
both, g is not run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(function: Callable[..., Any], *inputs: Tensor, when: bool = True) -> Any:
    """``function(*inputs)``, run a second time in the backward pass.

    Of the call only the inputs are kept. Its result is kept by whatever reads it, unless that happens within
    :func:`not_kept`.

    Args:
        function: returns a new tensor, or a tuple whose tensors are new. It must compute the same both times, and
            every tensor that is to get a gradient must be among the inputs.
        inputs: tensors.
        when: otherwise the function is simply called.

    Returns:
        What the function returns; of a named tuple, a tuple.
    """
    return _Recomputed.apply(function, *inputs) if when else function(*inputs)


def not_kept(y: Tensor) -> AbstractContextManager[object]:
    """Within it, operations that read ``y``, a result of :func:`recomputed`, do not keep it for their backward.

    Neither do they keep views of it. A tensor that was not recomputed is kept as ever. Of two of these contexts the
    inner one alone has effect, as torch's hooks for saved tensors have it.
    """
    node: Any = y.grad_fn
    if not isinstance(getattr(node, "recomputation", None), _Recomputation):
        return contextlib.nullcontext()
    index, storage, first, dtype = y.output_nr, _storage(y), int(y.storage_offset()), y.dtype

    def pack(saved: Tensor) -> Tensor | _View:
        if _storage(saved) != storage or saved.dtype is not dtype:
            return saved
        return _View(node, index, saved.shape, saved.stride(), int(saved.storage_offset()) - first)

    def unpack(packed: Tensor | _View) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.read()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; unlike an address, also of an empty one."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _View:
    """Stands for a tensor that an operation saved: a view of an output of a recomputed call."""

    node: Any
    index: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        y = self.node.recomputation.result(self.node, self.index)
        return y.as_strided(self.shape, self.strides, y.storage_offset() + self.offset)


@dataclass
class _Pass:
    """The second run: its inputs, cut off from the graph of the first, and its outputs with their own graph."""

    inputs: list[Tensor]
    outputs: tuple[Any, ...]
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None


class _Recomputation:
    """Runs a function again once per backward pass, when the first reader of its results needs them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._again: _Pass | None = None

    def again(self, node: Any) -> _Pass:
        if self._again is None:
            needed = node.needs_input_grad[1:]
            inputs = [x.detach().requires_grad_(need) for x, need in zip(node.saved_tensors, needed, strict=True)]
            with torch.enable_grad():
                outputs = self._function(*inputs)
            stream = torch.cuda.current_stream(inputs[0].device) if inputs[0].is_cuda else None
            done = None if stream is None else stream.record_event()
            self._again = _Pass(inputs, outputs if isinstance(outputs, tuple) else (outputs,), stream, done)
        return self._again

    def result(self, node: Any, index: int) -> Tensor:
        again = self.again(node)
        y: Tensor = again.outputs[index].detach()
        if again.stream is not None and (reader := torch.cuda.current_stream(y.device)) != again.stream:
            assert again.done is not None
            reader.wait_event(again.done)
            y.record_stream(reader)
        return y

    def take(self, node: Any) -> _Pass:
        """The second run, for the last time."""
        again, self._again = self.again(node), None
        return again


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.recomputation = _Recomputation(function)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        again = ctx.recomputation.take(ctx)
        reached = [(y, grad) for y, grad in zip(again.outputs, grads, strict=True) if grad is not None]
        wanted = [x for x in again.inputs if x.requires_grad]
        found = iter(
            torch.autograd.grad([y for y, _ in reached], wanted, [grad for _, grad in reached], allow_unused=True)
            if reached
            else [None] * len(wanted)
        )
        return None, *(next(found) if x.requires_grad else None for x in again.inputs)
