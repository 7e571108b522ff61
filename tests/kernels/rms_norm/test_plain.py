"""Zero-centred RMSNorm in torch operations: value and gradients against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from steptron_kernels.rms_norm.plain import rms_norm
from tests.model.helpers import relative_error

EPS = 1e-5


def weight_of(size: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.5).to(dtype)


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * (1.0 + weight)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def backward(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of ``function(x, weight)``, from fresh leaves."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = function(x, weight)
    d_x, d_weight = torch.autograd.grad(y, [x, weight], dy)
    return y.detach(), d_x, d_weight


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weight = weight_of(5, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ours, (x, weight), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("shape", [(7, 2, 64), (5, 2, 3, 32)])
def test_equals_the_formula_in_float64(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    dy = torch.randn(shape, dtype=torch.float64, generator=generator)
    weight = weight_of(shape[-1], torch.float64)
    for actual, expected in zip(backward(ours, x, weight, dy), backward(formula, x, weight, dy), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_float32_is_as_exact_as_torch() -> None:
    generator = torch.Generator().manual_seed(4)
    x, dy = torch.randn(256, 4, 64, generator=generator), torch.randn(256, 4, 64, generator=generator)
    weight = weight_of(64, torch.float32)
    exact = backward(formula, x.double(), weight.double(), dy.double())
    torchs = backward(lambda x, w: F.rms_norm(x, (64,), 1.0 + w, EPS), x, weight, dy)
    for actual, other, truth in zip(backward(ours, x, weight, dy), torchs, exact, strict=True):
        assert relative_error(actual, truth) <= 2 * relative_error(other, truth)


def test_bfloat16_is_rounded_once() -> None:
    """Statistics, (1 + w) and the products in float32: the same as rounding the float32 result."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(64, 48, generator=generator).bfloat16() for _ in range(2))
    weight = weight_of(48, torch.bfloat16)
    narrow, wide = backward(ours, x, weight, dy), backward(ours, x.float(), weight.float(), dy.float())
    for actual, truth in zip(narrow, wide, strict=True):
        assert actual.dtype is torch.bfloat16
        assert torch.equal(actual, truth.bfloat16())


def test_any_strides() -> None:
    """Inputs that are slices or transposes, and gradients without memory of their own."""
    wide = torch.randn(4, 6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    weight = weight_of(8, torch.float64)
    for x in (wide[..., 4:12], wide[..., 4:12].transpose(0, 1), wide[..., ::2][..., :8]):
        for dy in (
            torch.ones(1, 1, 1, dtype=torch.float64).expand(x.shape),
            x.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            for actual, expected in zip(backward(ours, x, weight, dy), backward(formula, x, weight, dy), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_epsilon_is_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-4, dtype=torch.float64)
    expected = 1e-4 / (1e-8 + EPS) ** 0.5
    actual = ours(x, torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(actual, torch.full_like(x, expected), rtol=1e-13, atol=0)
