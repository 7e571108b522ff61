"""Results computed again in the backward pass: the same gradients, bit by bit, from memory that was really freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from steptron_kernels.recompute import not_kept, recomputed
from tests.live_memory import LiveMemory, is_alive, memory_of


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Counted:
    """A function that keeps several intermediate results, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        return (x.sigmoid() * x.exp() * weight).tanh() + x


class KeepsInput(torch.autograd.Function):
    """y = x W^T, as a function of our own saves its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": torch.nn.functional.linear,
    "own function": KeepsInput.apply,
    "reshaped": lambda y, w: torch.nn.functional.linear(y.reshape(-1, y.shape[-1]), w),
    "column views": lambda y, w: y[..., :3].sin() * y[..., 3:] * w.sum(),
    "rows from the third on": lambda y, w: torch.nn.functional.linear(y[2:], w).exp(),
    "transposed": lambda y, w: w @ y[:, 1].t() * y.pow(2).sum(),
    "two readers": lambda y, w: torch.nn.functional.linear(y, w).tanh() + torch.nn.functional.linear(y.sin(), w),
}


def backward(reader: Callable[[Tensor, Tensor], Tensor], again: bool) -> tuple[list[Tensor], int, bool]:
    """Output and gradients, calls of the function, and whether its result was in memory before the backward."""
    x, w, matrix, function = values(4, 3, 6), values(6, seed=1), values(5, 6, seed=2), Counted()
    y = recomputed(function, x, w, when=again)
    with not_kept(y):
        z = reader(y, matrix)
    memory = memory_of(y)
    del y
    alive = is_alive(memory)
    (z * values(*z.shape, seed=3).detach()).sum().backward()
    gradients = [x.grad, w.grad, matrix.grad]
    assert all(gradient is not None for gradient in gradients)
    return [z.detach(), *gradients], function.calls, alive  # type: ignore[list-item]


@pytest.mark.parametrize("reader", READERS)
def test_same_gradients_from_freed_memory(reader: str) -> None:
    expected, calls, alive = backward(READERS[reader], again=False)
    assert calls == 1 and alive, "this reader keeps nothing: it shows nothing"
    own, calls, alive = backward(READERS[reader], again=True)
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    assert calls == 2 and not alive


def kept(again: bool, hidden: bool) -> int:
    """Bytes that live between forward and backward, without the results at both ends."""
    x, w, matrix = values(64, 6), values(6, seed=1), values(5, 6, seed=2)
    live = LiveMemory(x, w, matrix)
    with live:
        y = recomputed(Counted(), x, w, when=again)
        with not_kept(y) if hidden else torch.enable_grad():
            z = torch.nn.functional.linear(y, matrix)
        del y
    return live.bytes() - z.untyped_storage().nbytes()


def test_nothing_but_the_inputs_is_kept() -> None:
    assert kept(again=True, hidden=True) == 0
    assert kept(again=True, hidden=False) == 64 * 6 * 4, "a reader outside keeps the result, not what led to it"
    assert kept(again=False, hidden=True) > 4 * 64 * 6 * 4


def test_results_of_the_second_run_are_freed_by_the_backward() -> None:
    x, w, matrix = values(64, 6), values(6, seed=1), values(5, 6, seed=2)
    y = recomputed(Counted(), x, w)
    with not_kept(y):
        z = torch.nn.functional.linear(y, matrix)
    del y
    live = LiveMemory(x, w, matrix)
    with live:
        z.sum().backward(retain_graph=True)
    gradients = sum(t.grad.untyped_storage().nbytes() for t in (x, w, matrix) if t.grad is not None)
    assert live.bytes() == gradients


def test_backward_twice() -> None:
    x, w, matrix, function = values(4, 6), values(6, seed=1), values(5, 6, seed=2), Counted()
    y = recomputed(function, x, w)
    with not_kept(y):
        z = torch.nn.functional.linear(y, matrix).sum()
    first, second = (torch.autograd.grad(z, [x, w, matrix], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert function.calls == 3


class Parts(NamedTuple):
    rows: Tensor
    numbers: Tensor
    weights: Tensor
    rest: Callable[[], str]


def test_a_tuple_of_which_not_all_are_tensors_with_gradients() -> None:
    calls = 0

    def split(x: Tensor, w: Tensor) -> Parts:
        nonlocal calls
        calls += 1
        return Parts(x.flip(0).exp(), torch.arange(4), w * w, lambda: "rest")

    def run(again: bool, use_weights: bool) -> list[Tensor | None]:
        x, w, matrix = values(4, 6), values(4, seed=1), values(5, 6, seed=2)
        parts = Parts(*recomputed(split, x, w, when=again))
        assert torch.equal(parts.numbers, torch.arange(4)) and not parts.numbers.requires_grad
        assert parts.rest() == "rest"
        with not_kept(parts.rows):
            z = torch.nn.functional.linear(parts.rows, matrix)
        if use_weights:
            z = z * parts.weights.unsqueeze(-1)
        z.sum().backward()
        return [x.grad, w.grad, matrix.grad]

    for use_weights in (True, False):
        own, expected = run(True, use_weights), run(False, use_weights)
        assert (own[1] is None) == (not use_weights)
        for a, b in zip(own, expected, strict=True):
            assert a is b is None or torch.equal(a, b)  # type: ignore[arg-type]
    assert calls == 2 * (2 + 1)


def test_results_made_from_results() -> None:
    """The inner input is read again from the outer call, so that neither result is kept.

    Gradients of what a function reads several times are added up in it first: another order, but for rounding the same.
    """

    def run(again: bool) -> tuple[list[Tensor], list[int], list[bool]]:
        x, w, matrix, outer, inner = values(4, 6), values(6, seed=1), values(5, 6, seed=2), Counted(), Counted()
        y = recomputed(outer, x, w, when=again)
        with not_kept(y):
            z = recomputed(inner, y, w, when=again)
            with not_kept(z):
                loss = torch.nn.functional.linear(z, matrix).sum()
            loss = loss + (y * y).sum()
        memory = [memory_of(y), memory_of(z)]
        del y, z
        alive = [is_alive(m) for m in memory]
        loss.backward()
        return [x.grad, w.grad, matrix.grad], [outer.calls, inner.calls], alive  # type: ignore[list-item]

    own, calls, alive = run(True)
    expected, _, kept_alive = run(False)
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
    assert calls == [2, 2] and alive == [False, False] and kept_alive == [True, True]


def test_without_rows_the_function_runs_again_all_the_same() -> None:
    """Where it communicates, other processes wait for this one."""
    x, matrix, calls = values(0, 6), values(5, 6, seed=2), 0

    def exchange(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    y = recomputed(exchange, x)
    with not_kept(y):
        z = KeepsInput.apply(y, matrix)
    z.sum().backward()
    assert calls == 2 and x.grad is not None and x.grad.shape == (0, 6)


def test_inputs_without_gradient() -> None:
    x, w, matrix = values(4, 6).detach(), values(6, seed=1), values(5, 6, seed=2)
    y = recomputed(Counted(), x, w)
    with not_kept(y):
        torch.nn.functional.linear(y, matrix).sum().backward()
    assert x.grad is None and w.grad is not None


def test_without_a_backward_it_is_a_call() -> None:
    function = Counted()
    with torch.no_grad():
        y = recomputed(function, values(4, 6), values(6))
        with not_kept(y):
            assert torch.equal(y, function(values(4, 6), values(6)))
    assert not y.requires_grad and function.calls == 2
