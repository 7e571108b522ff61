"""Clamped SwiGLU against its formula, written out element by element in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels.swiglu.plain import swiglu

GRID = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64)


def formula(gate: float, up: float, limit: float | None, after_silu: bool) -> tuple[float, float, float]:
    """Value, d/d gate and d/d up of one element."""
    sigmoid = 1 / (1 + math.exp(-gate))
    silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    if limit is None:
        return silu * up, slope * up, silu
    if after_silu:
        if silu > limit:
            silu, slope = limit, 0.0
    elif gate > limit:
        silu, slope = limit / (1 + math.exp(-limit)), 0.0
    inside = -limit <= up <= limit
    clipped = max(-limit, min(limit, up))
    return silu * clipped, slope * clipped, silu if inside else 0.0


@pytest.mark.parametrize("limit", [None, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("after_silu", [True, False])
def test_value_and_gradient_are_those_of_the_formula(limit: float | None, after_silu: bool) -> None:
    gate, up = (grid.flatten() for grid in torch.meshgrid(GRID + 0.01, GRID + 0.02, indexing="ij"))
    x = torch.stack([gate, up], dim=-1).requires_grad_()
    y = swiglu(x, limit, after_silu)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = torch.tensor(
        [formula(g, u, limit, after_silu) for g, u in zip(gate.tolist(), up.tolist(), strict=True)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(y.flatten(), expected[:, 0], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, expected[:, 1:], rtol=1e-13, atol=1e-14)


def test_gate_is_clamped_from_above_only() -> None:
    """With a limit below 0.2785, -silu's minimum, a two-sided clamp would show."""
    x = torch.tensor([-1.2784645, 1.0], dtype=torch.float64)
    assert swiglu(x, 0.1).item() == pytest.approx(-0.2784645 * 0.1, rel=1e-6)


@pytest.mark.parametrize("gate, same", [(6.9, True), (7.003, False), (8.0, False)])
def test_the_two_positions_differ_above_the_limit(gate: float, same: bool) -> None:
    """silu(7) = 6.9936: after SiLU the gate saturates at 7, before at 6.9936 (facts: gap at most 6.4e-3)."""
    x = torch.tensor([gate, 1.0], dtype=torch.float64)
    after, before = swiglu(x, 7.0).item(), swiglu(x, 7.0, clamp_after_silu=False).item()
    assert (after == before) is same
    assert after - before <= 6.4e-3
    if gate == 8.0:
        assert (after, before) == (7.0, pytest.approx(7 / (1 + math.exp(-7)), rel=1e-12))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(0.1, 20))
def test_shape_and_dtype_are_kept_and_the_output_is_bounded(
    rows: int, width: int, dtype: torch.dtype, limit: float
) -> None:
    x = 30 * torch.randn(2, rows, 2 * width).to(dtype)
    y = swiglu(x, limit)
    assert y.shape == (2, rows, width) and y.dtype is dtype
    bound = limit * max(limit, 0.2785)
    assert y.abs().max() <= bound * 1.02


def test_gate_is_the_first_half() -> None:
    x = torch.tensor([5.0, -5.0, 1.0, 1.0])
    assert swiglu(x, None).tolist() == pytest.approx([4.966536, -0.0334643], rel=1e-5)
