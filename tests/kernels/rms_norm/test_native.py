"""The native norm against the plain one in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.rms_norm.native import rms_norm
from steptron_kernels.rms_norm.plain import rms_norm as plain
from tests.kernels.against_plain import assert_near, assert_threads_change_no_bit, evaluate, random
from tests.model.helpers import relative_error

extension.require()

EPS = 1e-5


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.integers(0, 150), size=st.integers(1, 150), eps=st.sampled_from([0.0, 1e-5, 0.3]))
def test_values_and_gradients(rows: int, size: int, eps: float) -> None:
    tensors = [random(rows, size), random(size, seed=1)]
    assert_near(
        evaluate(rms_norm, tensors, [eps]), evaluate(plain, tensors, [eps], dtype=torch.float64), tolerance=2e-6
    )


def test_as_exact_as_the_plain_version() -> None:
    tensors = [torch.randn(700, 256, generator=torch.Generator().manual_seed(3)), random(256, seed=1) * 0.3]
    truth = evaluate(plain, tensors, [EPS], dtype=torch.float64)
    for own, other, exact in zip(
        evaluate(rms_norm, tensors, [EPS]), evaluate(plain, tensors, [EPS]), truth, strict=True
    ):
        assert relative_error(own, exact) <= 1.5 * relative_error(other, exact)


@pytest.mark.parametrize("shape", [(4, 0, 5), (0, 7), (9,), (2, 3, 4, 5)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    tensors = [random(*shape), random(shape[-1], seed=1)]
    assert_near(evaluate(rms_norm, tensors, [EPS]), evaluate(plain, tensors, [EPS], dtype=torch.float64), 2e-6)


def test_any_strides() -> None:
    wide, weight = random(6, 5, 40), random(40, seed=1)
    for x, w in ((wide[..., 4:24], weight[::2]), (wide.transpose(0, 1), weight), (wide[..., ::2], weight[20:])):
        leaf, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        dy = torch.ones(1).expand(x.shape)
        gradients = torch.autograd.grad(rms_norm(leaf, w, EPS), [leaf, w], dy)
        expected = torch.autograd.grad(plain(leaf, w, EPS), [leaf, w], dy)
        assert_near(gradients, expected, 2e-6)


def test_threads_change_no_bit() -> None:
    tensors = [random(500, 96), random(96, seed=1)]
    assert_threads_change_no_bit(lambda: evaluate(rms_norm, tensors, [EPS]))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = random(100, 70), random(70, seed=1)
    assert torch.equal(rms_norm(x, weight, EPS)[37:41], rms_norm(x[37:41], weight, EPS))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_come_through(value: float) -> None:
    x, weight = random(40, 37), random(37, seed=1)
    x[33, 36] = value
    y, dx, d_weight = evaluate(rms_norm, [x, weight], [EPS])
    assert y[33, 36].isnan() and dx[33].isnan().all() and d_weight[36].isnan()
    others = [i for i in range(40) if i != 33]
    assert y[others].isfinite().all() and dx[others].isfinite().all()


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight: expected one number per column"):
        rms_norm(random(3, 8), random(4), EPS)
