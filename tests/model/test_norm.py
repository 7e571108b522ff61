"""ZeroCentredRMSNorm: value and gradients against float64 formulas and transformers' norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm

from steptron.model.norm import ZeroCentredRMSNorm
from tests.model.helpers import relative_error

EPS = 1e-5


def make(size: int, dtype: torch.dtype, seed: int = 0) -> ZeroCentredRMSNorm:
    norm = ZeroCentredRMSNorm(size, EPS, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.5)
    return norm


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * (1.0 + weight)


def backward(
    function: torch.nn.Module | object, x: Tensor, weight: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of ``function(x, weight)``, from fresh leaves."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = function(x, weight)  # type: ignore[operator]
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def test_starts_as_plain_rms_normalisation() -> None:
    norm = ZeroCentredRMSNorm(6, EPS)
    assert torch.equal(norm.weight, torch.zeros(6))
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    torch.testing.assert_close(norm.double()(x), formula(x, torch.zeros(6, dtype=torch.float64)), rtol=1e-14, atol=0)


def test_gradients_are_those_of_finite_differences() -> None:
    norm = make(5, torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    call = torch.func.functional_call
    assert torch.autograd.gradcheck(
        lambda x, w: call(norm, {"weight": w}, (x,)), (x, norm.weight.detach().requires_grad_()), atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("shape", [(7, 2, 64), (5, 2, 3, 32)])
def test_equals_the_formula_in_float64(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    dy = torch.randn(shape, dtype=torch.float64, generator=generator)
    norm = make(shape[-1], torch.float64)
    ours = backward(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), x, norm.weight, dy)
    for actual, expected in zip(ours, backward(formula, x, norm.weight, dy), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_float32_is_as_exact_as_torch() -> None:
    generator = torch.Generator().manual_seed(4)
    x, dy = torch.randn(256, 4, 64, generator=generator), torch.randn(256, 4, 64, generator=generator)
    norm = make(64, torch.float32)
    exact = backward(formula, x.double(), norm.weight.double(), dy.double())
    ours = backward(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), x, norm.weight, dy)
    torchs = backward(lambda x, w: F.rms_norm(x, (64,), 1.0 + w, EPS), x, norm.weight, dy)
    for actual, other, truth in zip(ours, torchs, exact, strict=True):
        assert relative_error(actual, truth) <= 2 * relative_error(other, truth)


def test_bfloat16_is_rounded_once() -> None:
    """Statistics, (1 + w) and the products in float32: the same as rounding the float32 result."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(64, 48, generator=generator).bfloat16() for _ in range(2))
    narrow = make(48, torch.bfloat16)
    wide = make(48, torch.float32)
    with torch.no_grad():
        wide.weight.copy_(narrow.weight)
    functional = torch.func.functional_call
    ours = backward(lambda x, w: functional(narrow, {"weight": w}, (x,)), x, narrow.weight, dy)
    expected = backward(lambda x, w: functional(wide, {"weight": w}, (x,)), x.float(), wide.weight, dy.float())
    for actual, truth in zip(ours, expected, strict=True):
        assert actual.dtype is torch.bfloat16
        assert torch.equal(actual, truth.bfloat16())


def test_any_strides() -> None:
    """Inputs that are slices or transposes, and gradients without memory of their own."""
    generator = torch.Generator().manual_seed(6)
    wide = torch.randn(4, 6, 20, dtype=torch.float64, generator=generator)
    norm = make(8, torch.float64)
    for x in (wide[..., 4:12], wide[..., 4:12].transpose(0, 1), wide[..., ::2][..., :8]):
        for dy in (
            torch.ones(1, 1, 1, dtype=torch.float64).expand(x.shape),
            x.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            ours = backward(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), x, norm.weight, dy)
            for actual, expected in zip(ours, backward(formula, x, norm.weight, dy), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_equals_transformers() -> None:
    norm, theirs = make(32, torch.float32), Step3p7RMSNorm(32, eps=EPS)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()), rtol=0.008, atol=0)


def test_epsilon_is_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-4, dtype=torch.float64)
    expected = 1e-4 / (1e-8 + EPS) ** 0.5
    torch.testing.assert_close(ZeroCentredRMSNorm(4, EPS).double()(x), torch.full_like(x, expected), rtol=1e-13, atol=0)


def test_can_be_built_without_memory() -> None:
    with torch.device("meta"):
        norm = ZeroCentredRMSNorm(4096, EPS, torch.bfloat16)
    assert norm.weight.is_meta and norm.weight.dtype is torch.bfloat16
