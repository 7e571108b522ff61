"""The head-wise gate against its formula and the plain version in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.head_gate.native import head_gate
from steptron_kernels.head_gate.plain import head_gate as plain
from tests.kernels.against_plain import assert_near, assert_threads_change_no_bit, evaluate, random
from tests.model.helpers import relative_error

extension.require()


def make(tokens: int, batch: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    return [random(tokens, batch, heads, head_dim), 4 * random(tokens, batch, heads, seed=1)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tokens=st.integers(0, 60), batch=st.integers(0, 3), heads=st.integers(1, 20), head_dim=st.integers(1, 70))
def test_values_and_gradients(tokens: int, batch: int, heads: int, head_dim: int) -> None:
    tensors = make(tokens, batch, heads, head_dim)
    assert_near(evaluate(head_gate, tensors), evaluate(plain, tensors, dtype=torch.float64), tolerance=1e-6)


def test_plain_is_the_formula() -> None:
    o, gate = (t.double() for t in make(2, 1, 3, 4))
    y = plain(o, gate)
    for s, h, m in ((0, 0, 0), (1, 2, 3)):
        assert y[s, 0, h, m].item() == pytest.approx(o[s, 0, h, m].item() / (1 + math.exp(-gate[s, 0, h])), rel=1e-14)


def test_gates_of_one_column_each() -> None:
    """A head's gate acts on that head alone, at that token alone."""
    o, gate = torch.ones(3, 2, 4, 8), torch.full((3, 2, 4), -200.0)
    gate[1, 1, 2] = 200.0
    y = head_gate(o, gate)
    assert torch.equal(y[1, 1, 2], torch.ones(8)) and y.sum() == 8


def test_saturated_gates_keep_exact_gradients() -> None:
    """sigmoid(g) (1 - sigmoid(g)) is e^-g for a large g; 1 - sigmoid(g) by subtraction would be 0."""
    gate = torch.tensor([17.0, 30.0, 60.0, -60.0]).view(1, 1, 4)
    gate.requires_grad_()
    (own,) = torch.autograd.grad(head_gate(torch.ones(1, 1, 4, 8), gate).sum(), gate)
    torch.testing.assert_close(own.double(), 8 * torch.exp(-gate.detach().double().abs()), rtol=1e-6, atol=0)


def test_as_exact_as_the_plain_version() -> None:
    tensors = make(256, 2, 12, 32)
    truth = evaluate(plain, tensors, dtype=torch.float64)
    for own, other, exact in zip(evaluate(head_gate, tensors), evaluate(plain, tensors), truth, strict=True):
        assert relative_error(own, exact) <= 1.5 * relative_error(other, exact)


def test_any_strides() -> None:
    """Gates that are columns of a projection; outputs and gradients that are transposed or expanded."""
    projected, o = 3 * random(5, 2, 30), random(2, 5, 3, 8).transpose(0, 1)
    for gate in (projected[..., 27:], projected[..., 0:6:2], projected[:, :1, 3:6].expand(5, 2, 3)):
        for dy in (torch.ones(1).expand(o.shape), o.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)):
            leaves = [o.detach().requires_grad_(), gate.detach().requires_grad_()]
            own = torch.autograd.grad(head_gate(*leaves), leaves, dy)
            assert_near(own, torch.autograd.grad(plain(*leaves), leaves, dy), 2e-6)


def test_threads_change_no_bit() -> None:
    tensors = make(300, 2, 12, 32)
    assert_threads_change_no_bit(lambda: evaluate(head_gate, tensors))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_come_through(value: float) -> None:
    o, gate = make(20, 1, 3, 8)
    o[7, 0, 1, 5] = value
    y, d_o, d_gate = evaluate(head_gate, [o, gate])
    assert not y[7, 0, 1, 5].isfinite() and not d_gate[7, 0, 1].isfinite()
    assert int((~y.isfinite()).sum()) == 1 and int((~d_gate.isfinite()).sum()) == 1 and d_o.isfinite().all()
    o, gate = make(20, 1, 3, 8)
    gate[7, 0, 1] = value
    y, d_o, d_gate = evaluate(head_gate, [o, gate])
    if math.isnan(value):
        assert y[7, 0, 1].isnan().all() and d_o[7, 0, 1].isnan().all() and d_gate[7, 0, 1].isnan()
    else:
        assert torch.equal(y[7, 0, 1], o[7, 0, 1] if value > 0 else torch.zeros(8)) and d_gate[7, 0, 1] == 0


def test_a_gate_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="gate: expected one logit per head"):
        head_gate(random(3, 2, 4, 8), random(3, 2, 5))
