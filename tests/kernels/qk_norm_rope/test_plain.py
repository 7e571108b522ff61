"""The plain version against norms, rotations and slices written out number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steptron_kernels.qk_norm_rope.plain import qk_norm_rope
from tests.kernels.against_plain import random

S, B, HEADS, GROUPS, HEAD_DIM, EPS = 3, 2, 3, 2, 6, 0.1
COLUMNS = (HEADS + 2 * GROUPS) * HEAD_DIM


def arguments(pairs: int, gated: bool) -> list[Tensor]:
    angles = 3 * random(S, B, 1, pairs, seed=3).double()
    projected = random(S, B, COLUMNS + (HEADS if gated else 0)).double()
    return [projected, random(HEAD_DIM, seed=1).double(), random(HEAD_DIM, seed=2).double(), angles.cos(), angles.sin()]


def head_by_hand(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> list[float]:
    """One head: x / sqrt(mean x^2 + eps) (1 + w), then pairs (m, m + R) turned as complex numbers."""
    root = math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + EPS)
    y = [float(v) / root * (1 + float(w)) for v, w in zip(x, weight, strict=True)]
    pairs = len(cos)
    for m in range(pairs):
        turned = complex(y[m], y[m + pairs]) * complex(float(cos[m]), float(sin[m]))
        y[m], y[m + pairs] = turned.real, turned.imag
    return y


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pairs", [0, 1, 2, 3])
def test_equals_the_formulas(pairs: int, gated: bool) -> None:
    projected, query_weight, key_weight, cos, sin = arguments(pairs, gated)
    q, k, v, gate = qk_norm_rope(projected, query_weight, key_weight, cos, sin, HEADS, GROUPS, EPS, gated)
    assert q.is_contiguous() and k.is_contiguous()
    for s in range(S):
        for b in range(B):
            heads = projected[s, b, :COLUMNS].view(-1, HEAD_DIM)
            expected = [
                head_by_hand(x, query_weight if h < HEADS else key_weight, cos[s, b, 0], sin[s, b, 0])
                for h, x in enumerate(heads[: HEADS + GROUPS])
            ]
            actual = torch.cat([q[s, b], k[s, b]])
            torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
            assert torch.equal(v[s, b], heads[HEADS + GROUPS :])
    if gated:
        assert gate is not None and torch.equal(gate, projected[..., COLUMNS:])
    else:
        assert gate is None


def test_gradients_are_those_of_finite_differences() -> None:
    projected, query_weight, key_weight, cos, sin = arguments(2, gated=True)
    leaves = [t.requires_grad_() for t in (projected, query_weight, key_weight)]
    assert torch.autograd.gradcheck(
        lambda p, a, b: qk_norm_rope(p, a, b, cos, sin, HEADS, GROUPS, EPS, True), leaves, atol=1e-8, rtol=1e-6
    )


def test_the_dtype_is_kept() -> None:
    tensors = [t.bfloat16() for t in arguments(3, gated=True)]
    for y in qk_norm_rope(*tensors, HEADS, GROUPS, EPS, True):
        assert y is not None and y.dtype is torch.bfloat16


def test_parts_that_do_not_add_up_are_refused() -> None:
    projected, *others = arguments(3, gated=True)
    with pytest.raises(ValueError, match=r"has 45 columns, but 3 heads and 2 groups of 6 without gates need 42"):
        qk_norm_rope(projected, *others, HEADS, GROUPS, EPS, False)
