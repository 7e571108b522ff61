"""Residual sum and norm in one against the plain version in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.add_rms_norm.native import add_rms_norm
from steptron_kernels.add_rms_norm.plain import add_rms_norm as plain
from steptron_kernels.rms_norm.plain import rms_norm
from tests.kernels.against_plain import assert_near, assert_threads_change_no_bit, evaluate, random
from tests.model.helpers import relative_error

extension.require()

EPS = 1e-5


def make(rows: int, size: int) -> list[torch.Tensor]:
    """x, delta (smaller: their sum is not near zero) and weight."""
    return [random(rows, size), random(rows, size, seed=1) * 0.2, random(size, seed=2)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.integers(0, 150), size=st.integers(1, 150))
def test_values_and_gradients(rows: int, size: int) -> None:
    tensors = make(rows, size)
    expected = evaluate(plain, tensors, [EPS], dtype=torch.float64)
    assert_near(evaluate(add_rms_norm, tensors, [EPS]), expected, tolerance=2e-6)


def test_plain_is_sum_then_norm() -> None:
    x, delta, weight = (t.double() for t in make(5, 8))
    total, y = plain(x, delta, weight, 0.3)
    assert torch.equal(total, x + delta) and torch.equal(y, rms_norm(x + delta, weight, 0.3))


def test_as_exact_as_the_plain_version() -> None:
    tensors = make(700, 256)
    truth = evaluate(plain, tensors, [EPS], dtype=torch.float64)
    for own, other, exact in zip(
        evaluate(add_rms_norm, tensors, [EPS]), evaluate(plain, tensors, [EPS]), truth, strict=True
    ):
        assert relative_error(own, exact) <= 1.5 * relative_error(other, exact)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_uses(used: int) -> None:
    tensors = make(7, 20)
    leaves = [t.clone().requires_grad_() for t in tensors]
    own = torch.autograd.grad(add_rms_norm(*leaves, EPS)[used].square().sum(), leaves, allow_unused=True)
    leaves = [t.double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(plain(*leaves, EPS)[used].square().sum(), leaves, allow_unused=True)
    for a, b in zip(own, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_near([a], [b], 2e-6)


def test_each_addend_has_a_gradient_of_its_own() -> None:
    """The backward returns one tensor for both; accumulating into one must not change the other."""
    x, delta, weight = (t.requires_grad_() for t in make(7, 20))
    for _ in range(2):
        total, y = add_rms_norm(x, delta, weight, EPS)
        (total.sum() + y.sum()).backward()
    assert x.grad is not None and delta.grad is not None
    torch.testing.assert_close(x.grad, delta.grad, rtol=0, atol=0)
    before = delta.grad.clone()
    x.grad.zero_()
    assert torch.equal(delta.grad, before)


def test_the_same_tensor_twice() -> None:
    x, weight = random(7, 20), random(20, seed=1)
    own = evaluate(lambda x, w: add_rms_norm(x, x, w, EPS), [x, weight])
    assert_near(own, evaluate(lambda x, w: plain(x, x, w, EPS), [x, weight], dtype=torch.float64), 2e-6)


def test_any_strides() -> None:
    wide, weight = random(6, 5, 40), random(20, seed=1)
    x, delta = wide[..., :20], wide.flip(0)[..., ::2] * 0.2
    leaves = [t.detach().requires_grad_() for t in (x, delta, weight)]
    d_total, dy = torch.ones(1).expand(x.shape), x.transpose(0, 1).contiguous().transpose(0, 1)
    own = torch.autograd.grad(add_rms_norm(*leaves, EPS), leaves, [d_total, dy])
    assert_near(own, torch.autograd.grad(plain(*leaves, EPS), leaves, [d_total, dy]), 2e-6)


def test_threads_change_no_bit() -> None:
    tensors = make(500, 96)
    assert_threads_change_no_bit(lambda: evaluate(add_rms_norm, tensors, [EPS]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_values_come_through(value: float) -> None:
    tensors = make(40, 37)
    tensors[1][33, 36] = value
    total, y, dx, d_delta, d_weight = evaluate(add_rms_norm, tensors, [EPS])
    assert not total[33, 36].isfinite() and y[33, 36].isnan()
    assert dx[33].isnan().all() and d_delta[33].isnan().all() and d_weight[36].isnan()
    assert y[:33].isfinite().all() and dx[:33].isfinite().all()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(RuntimeError, match="delta: expected the shape of x"):
        add_rms_norm(random(3, 8), random(1, 8), random(8), EPS)
