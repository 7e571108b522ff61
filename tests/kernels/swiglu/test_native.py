"""The native SwiGLU against the plain one in float64, and against torch's own rules at the edges."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.swiglu.native import swiglu
from steptron_kernels.swiglu.plain import swiglu as plain
from tests.kernels.against_plain import assert_near, assert_threads_change_no_bit, evaluate, random
from tests.model.helpers import relative_error

extension.require()

CLIPS = [(None, True), (7.0, True), (7.0, False), (0.3, True), (0.3, False), (0.0, True)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(0, 60), width=st.integers(0, 150), clip=st.sampled_from(CLIPS), scale=st.floats(0.1, 12))
def test_values_and_gradients(rows: int, width: int, clip: tuple[float | None, bool], scale: float) -> None:
    x = scale * random(2, rows, 2 * width)
    expected = evaluate(plain, [x], clip, dtype=torch.float64)
    assert_near(evaluate(swiglu, [x], clip), expected, tolerance=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
def test_as_exact_as_the_plain_version(clip: tuple[float | None, bool]) -> None:
    x = 3 * torch.randn(200, 1408, generator=torch.Generator().manual_seed(3))
    truth = evaluate(plain, [x], clip, dtype=torch.float64)
    for own, other, exact in zip(evaluate(swiglu, [x], clip), evaluate(plain, [x], clip), truth, strict=True):
        assert relative_error(own, exact) <= 1.5 * relative_error(other, exact)


def test_gate_is_the_first_half() -> None:
    x = torch.tensor([5.0, -5.0, 1.0, 1.0])
    assert swiglu(x, None).tolist() == pytest.approx([4.966536, -0.0334643], rel=1e-5)


def gradient_of(gate: float, up: float, limit: float, after_silu: bool) -> list[float]:
    x = torch.tensor([gate, up]).requires_grad_()
    (gradient,) = torch.autograd.grad(swiglu(x, limit, after_silu).sum(), x)
    return gradient.tolist()


def next_above(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))


@pytest.mark.parametrize("after_silu", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_up_passes_gradients_at_its_limit_and_none_beyond(sign: float, after_silu: bool) -> None:
    assert gradient_of(0.5, sign * 2.0, 2.0, after_silu)[1] != 0
    assert gradient_of(0.5, sign * next_above(2.0), 2.0, after_silu)[1] == 0


def test_gate_passes_gradients_at_its_limit_and_none_beyond() -> None:
    assert gradient_of(2.0, 1.0, 2.0, after_silu=False)[0] != 0
    assert gradient_of(next_above(2.0), 1.0, 2.0, after_silu=False)[0] == 0
    silu = swiglu(torch.tensor([3.0, 1.0]), None).item()  # the limit is what the operation itself makes of 3
    assert gradient_of(3.0, 1.0, silu, after_silu=True)[0] != 0
    below = float(torch.nextafter(torch.tensor(silu), torch.tensor(0.0)))
    assert gradient_of(3.0, 1.0, below, after_silu=True)[0] == 0


def test_gate_is_not_clipped_from_below() -> None:
    """silu's minimum is -0.2785: with a limit below that, a two-sided clamp would show."""
    assert swiglu(torch.tensor([-1.2784645, 1.0]), 0.1).item() == pytest.approx(-0.2784645 * 0.1, rel=1e-6)
    assert gradient_of(-1.0, 0.05, 0.1, after_silu=True)[0] != 0


EXTREMES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, 90.0, -90.0, 200.0, -200.0, 3e38, -3e38]


@pytest.mark.parametrize("clip", CLIPS)
def test_extremes_behave_as_in_torch(clip: tuple[float | None, bool]) -> None:
    """NaN where torch has NaN, infinity where torch has infinity, in values and gradients."""
    pairs = torch.tensor(list(itertools.product(EXTREMES, EXTREMES)))
    for x in (pairs, pairs.t().reshape(1, -1)):  # one pair a row; and one long row, which takes the vector loop
        for own, other in zip(evaluate(swiglu, [x], clip), evaluate(plain, [x], clip), strict=True):
            assert torch.equal(own.isnan(), other.isnan())
            torch.testing.assert_close(own, other, rtol=2e-6, atol=1e-37, equal_nan=True)


def test_any_strides() -> None:
    wide = 3 * random(6, 5, 40)
    for x in (wide[..., 4:24], wide.transpose(0, 1), wide[..., ::2]):
        leaf = x.detach().requires_grad_()
        y, expected = swiglu(leaf, 2.0), plain(leaf, 2.0)
        dy = torch.ones(1).expand(y.shape)
        assert_near(torch.autograd.grad(y, leaf, dy), torch.autograd.grad(expected, leaf, dy), 2e-6)


def test_threads_change_no_bit() -> None:
    x = 3 * random(500, 180)
    assert_threads_change_no_bit(lambda: evaluate(swiglu, [x], [2.0, True]))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(RuntimeError, match="as many gate as up columns"):
        swiglu(random(3, 7), None)
    with pytest.raises(RuntimeError, match="limit: expected a number from 0 on, got -1"):
        swiglu(random(3, 8), -1.0)
