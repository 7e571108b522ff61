"""A native operation against its plain version in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Float32 numbers of magnitude 0.5 to 1.5, so that no norm is near zero."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (torch.rand(shape, generator=generator) + 0.5) * signs


def evaluate(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    options: Sequence[Any] = (),
    constants: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Outputs of ``function(*tensors, *constants, *options)``, then the gradients of the tensors.

    The output gradients are random, the same for every version and dtype. Strides of the tensors are kept.
    """
    leaves = [_cast(t.detach(), dtype).requires_grad_() for t in tensors]
    outputs = function(*leaves, *(_cast(t, dtype) for t in constants), *options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
    directions = [random(*y.shape, seed=90 + i).to(dtype) for i, y in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, leaves, directions)
    assert all(g.shape == leaf.shape for g, leaf in zip(gradients, leaves, strict=True))
    return [y.detach() for y in outputs] + list(gradients)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x) if x.numel() else x.to(dtype)


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Every element within the tolerance, in units of the tensor's largest element or 1."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape
        if b.numel():
            error = float((a.double() - b.double()).abs().max()) / max(1.0, float(b.abs().max()))
            assert error <= tolerance, f"tensor {index}: {error:.2e} > {tolerance:.0e}"


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_threads_change_no_bit(evaluation: Callable[[], list[Tensor]]) -> None:
    with threads(1):
        one = evaluation()
    for count in (2, 5):
        with threads(count):
            assert all(torch.equal(a, b) for a, b in zip(one, evaluation(), strict=True)), f"{count} threads"
