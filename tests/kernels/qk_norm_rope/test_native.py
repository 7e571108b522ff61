"""Norm and rotation of queries and keys in C++ against the plain version in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.qk_norm_rope.native import qk_norm_rope
from steptron_kernels.qk_norm_rope.plain import qk_norm_rope as plain
from tests.kernels.against_plain import assert_near, assert_threads_change_no_bit, evaluate, random
from tests.model.helpers import relative_error

extension.require()

EPS = 1e-5
# Head sizes and pairs: those that the code is specialised for (first six), and others.
SIZES = [(32, 16), (32, 8), (64, 32), (64, 16), (128, 64), (128, 32), (32, 7), (8, 2), (5, 0), (5, 2), (48, 24), (1, 0)]


class Case:
    """Arguments of one call: tensors with a gradient, tables, the rest."""

    def __init__(
        self, tokens: int, batch: int, heads: int, groups: int, head_dim: int, pairs: int, gated: bool
    ) -> None:
        columns = (heads + 2 * groups) * head_dim + (heads if gated else 0)
        self.tensors = [random(tokens, batch, columns), random(head_dim, seed=1), random(head_dim, seed=2)]
        angles = 3 * random(tokens, batch, 1, pairs, seed=3)
        self.tables = [angles.cos(), angles.sin()]
        self.options: list[Any] = [heads, groups, EPS, gated]

    def evaluate(self, function: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """q, k, v, (gate,) d_projected, d_query_weight, d_key_weight."""
        return evaluate(function, self.tensors, self.options, self.tables, dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 40),
    batch=st.integers(1, 3),
    heads_per_group=st.integers(1, 7),
    groups=st.integers(1, 3),
    size=st.sampled_from(SIZES),
    gated=st.booleans(),
)
def test_values_and_gradients(
    tokens: int, batch: int, heads_per_group: int, groups: int, size: tuple[int, int], gated: bool
) -> None:
    case = Case(tokens, batch, heads_per_group * groups, groups, *size, gated)
    assert_near(case.evaluate(qk_norm_rope), case.evaluate(plain, torch.float64), tolerance=2e-6)


def test_as_exact_as_the_plain_version() -> None:
    case = Case(256, 4, 12, 2, 32, 16, gated=True)
    truth = case.evaluate(plain, torch.float64)
    own, other = case.evaluate(qk_norm_rope), case.evaluate(plain)
    for a, b, exact in zip(own, other, truth, strict=True):
        assert relative_error(a, exact) <= max(1.5 * relative_error(b, exact), 4e-7)


def test_queries_and_keys_are_new_and_contiguous() -> None:
    case = Case(9, 2, 4, 2, 32, 16, gated=True)
    q, k, v, gate = qk_norm_rope(*case.tensors, *case.tables, *case.options)
    assert q.is_contiguous() and k.is_contiguous()
    assert v.shape == (9, 2, 2, 32) and gate is not None and gate.shape == (9, 2, 4)


def test_each_norm_has_its_own_weight() -> None:
    case = Case(5, 1, 2, 2, 32, 16, gated=False)
    case.tensors[1].fill_(-1.0)  # gamma = 0
    q, k, _, _ = qk_norm_rope(*case.tensors, *case.tables, *case.options)
    assert (q == 0).all() and (k != 0).any()


def test_unused_outputs_have_no_gradient() -> None:
    """Each output's gradient lands in its own columns; the rest of the projection's gradient is zero, not garbage."""
    case = Case(9, 2, 4, 2, 32, 16, gated=True)
    columns = [0, 4 * 32, 6 * 32, 8 * 32, 8 * 32 + 4]
    for part in range(4):
        leaf = case.tensors[0].clone().requires_grad_()
        outputs = qk_norm_rope(leaf, *case.tensors[1:], *case.tables, *case.options)
        y = outputs[part]
        assert y is not None
        (gradient,) = torch.autograd.grad(y, leaf, random(*y.shape, seed=5))
        inside = torch.zeros_like(gradient, dtype=torch.bool)
        inside[..., columns[part] : columns[part + 1]] = True
        assert (gradient[inside] != 0).all() and (gradient[~inside] == 0).all()


def test_a_value_that_is_used_twice() -> None:
    case = Case(5, 1, 2, 1, 8, 4, gated=True)
    leaf = case.tensors[0].requires_grad_()
    _, _, v, gate = qk_norm_rope(leaf, *case.tensors[1:], *case.tables, *case.options)
    assert gate is not None
    (gradient,) = torch.autograd.grad((v * v).sum() + (3 * v).sum() + gate.sum(), leaf)
    torch.testing.assert_close(gradient[..., 24:32], (2 * v + 3).flatten(2).detach())
    assert torch.equal(gradient[..., 32:], torch.ones(5, 1, 2))


def test_any_strides() -> None:
    """A projection, tables and gradients that are slices, transposed, expanded."""
    case = Case(6, 3, 4, 2, 32, 8, gated=True)
    wide = random(3, 6, case.tensors[0].shape[-1] + 7, seed=7)
    case.tensors[0] = wide.transpose(0, 1)[..., 4:-3]
    case.tensors[1] = random(64, seed=8)[::2]
    tables = [
        [t.transpose(0, 1).contiguous().transpose(0, 1) for t in case.tables],
        [t[:, :1].expand(-1, 3, -1, -1) for t in case.tables],
        [case.tables[0], torch.stack([case.tables[1]] * 2, dim=-1)[..., 0]],
    ]
    for cos, sin in tables:
        leaves = [t.detach().requires_grad_() for t in case.tensors]
        results = []
        for function in (qk_norm_rope, plain):
            q, k, v, gate = function(*leaves, cos, sin, *case.options)
            assert gate is not None
            directions = [
                torch.ones(1).expand(q.shape),
                random(*k.transpose(2, 3).shape).transpose(2, 3),
                random(*v.transpose(0, 1).shape).transpose(0, 1),
                random(*gate.shape, 2)[..., 0],
            ]
            results.append(torch.autograd.grad([q, k, v, gate], leaves, directions))
        assert_near(*results, tolerance=2e-6)


def test_threads_change_no_bit() -> None:
    case = Case(150, 3, 6, 2, 32, 16, gated=True)
    assert_threads_change_no_bit(lambda: case.evaluate(qk_norm_rope))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    case = Case(50, 2, 3, 1, 32, 8, gated=True)
    whole = qk_norm_rope(*case.tensors, *case.tables, *case.options)
    projected, *weights = case.tensors
    part = qk_norm_rope(projected[17:20], *weights, *(t[17:20] for t in case.tables), *case.options)
    for a, b in zip(whole, part, strict=True):
        assert a is not None and b is not None and torch.equal(a[17:20], b)


@pytest.mark.parametrize("size", [(32, 16), (32, 8), (5, 2)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_values_come_through(value: float, size: tuple[int, int]) -> None:
    """A bad number spoils its own head and the norm's weight, nothing else."""
    case = Case(20, 2, 3, 1, *size, gated=True)
    head_dim = size[0]
    case.tensors[0][7, 1, 2 * head_dim - 1] = value  # the last of the second query head
    q, k, v, gate, d_projected, d_query_weight, d_key_weight = case.evaluate(qk_norm_rope)
    assert q[7, 1, 1].isnan().any() and d_projected[7, 1, head_dim : 2 * head_dim].isnan().all()
    assert d_query_weight[-1].isnan() and d_key_weight.isfinite().all()
    q[7, 1, 1] = 0
    d_projected[7, 1, head_dim : 2 * head_dim] = 0
    assert all(t.isfinite().all() for t in (q, k, v, gate, d_projected))


def test_misfits_are_refused() -> None:
    case = Case(5, 1, 2, 1, 8, 4, gated=True)
    heads, groups, eps, _ = case.options
    with pytest.raises(ValueError, match="has 34 columns, but 2 heads and 1 groups of 8 without gates need 32"):
        qk_norm_rope(*case.tensors, *case.tables, heads, groups, eps, False)
    with pytest.raises(ValueError, match="rotate 10 dimensions, but a head has 8"):
        qk_norm_rope(*case.tensors, random(5, 1, 1, 5), random(5, 1, 1, 5), *case.options)
    with pytest.raises(RuntimeError, match="cos, sin: expected"):
        qk_norm_rope(*case.tensors, *(t[:, 0:0] for t in case.tables), *case.options)
    with pytest.raises(RuntimeError, match="key_weight: expected"):
        qk_norm_rope(*case.tensors[:2], random(4), *case.tables, *case.options)
