"""Attention in C++ against the plain version in float64: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.attention import plain
from steptron_kernels.attention.native import Attention
from steptron_kernels.attention.plain import dense_masked_attention, visible_keys
from steptron_kernels.packed_weights import Products
from tests.kernels.against_plain import assert_threads_change_no_bit
from tests.kernels.attention.cases import Case, dense, ragged_documents, relative_error

extension.require()

# Relative error of a tensor. The worst of 4700 random cases: 1.2e-6 (a gradient that is zero), 1.4e-2 (of a sink).
TOLERANCE: dict[Products, float] = {"fp32": 2e-6, "bf16": 2e-2}


def native(
    window: int | None, documents: Tensor | None = None, products: Products = "fp32", offset: int = 0
) -> Callable[..., Tensor]:
    attention = Attention(products)

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        return attention(q, k, v, window=window, sink_n=sink, documents_BT=documents, query_offset=offset)

    return function


def definition(window: int | None, documents: Tensor | None, offset: int = 0) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        return plain.attention(q, k, v, window=window, sink_n=sink, documents_BT=documents, query_offset=offset)

    return function


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Norm of each error within the tolerance, in units of the expected norm or of that of elements of 1/2.

    The gradient of a sink is a sum over all tokens, of terms that cancel: it counts as so many elements.
    """
    tokens = actual[0].shape[0] * actual[0].shape[1]
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype is torch.float32 and a.shape == b.shape
        scale = max(float(b.norm()), math.sqrt(b.numel() * (tokens if b.dim() == 1 else 1)) / 2)
        error = float((a.double() - b).norm()) / scale
        assert error <= tolerance, f"tensor {index}: {error:.2e}"


def assert_equals_the_definition(
    case: Case,
    window: int | None,
    documents: Tensor | None,
    sink: bool,
    products: Products = "fp32",
    offset: int = 0,
) -> None:
    case = case.to(torch.float32)
    ours = case.run(native(window, documents, products, offset), sink)
    truth = case.to(torch.float64).run(definition(window, documents, offset), sink)
    assert_near(ours, truth, TOLERANCE[products])


# ---------------------------------------------------------------------------------- equality


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 150),
    B=st.integers(1, 3),
    g=st.integers(1, 3),
    r=st.integers(1, 7),
    D=st.sampled_from([1, 2, 5, 16, 24, 32, 33]),
    window=st.none() | st.integers(1, 170),
    offset=st.sampled_from([0, 0, 1, 16, 37]),
    documents_seed=st.none() | st.integers(0, 1000),
    sink=st.booleans(),
    products=st.sampled_from(["fp32", "bf16"]),
)
def test_equals_the_definition_for_any_shape(
    S: int,
    B: int,
    g: int,
    r: int,
    D: int,
    window: int | None,
    offset: int,
    documents_seed: int | None,
    sink: bool,
    products: Products,
) -> None:
    T = offset + S
    documents = None if documents_seed is None else ragged_documents(T, B, documents_seed)
    assert_equals_the_definition(Case.random(S, B, g * r, g, D, keys=T), window, documents, sink, products, offset)


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "S, B, n, g, D, window",
    [
        (512, 2, 12, 2, 32, 64),
        (512, 2, 8, 2, 32, None),
        (700, 1, 8, 1, 128, 512),  # several steps of keys
        (300, 1, 64, 1, 16, 100),  # one group of many heads: the shortest step
        (1030, 1, 1, 1, 8, None),  # one group of one head: the longest blocks, several segments
    ],
)
def test_equals_the_definition_over_many_blocks(
    S: int, B: int, n: int, g: int, D: int, window: int | None, ragged: bool, products: Products
) -> None:
    documents = ragged_documents(S, B, seed=S) if ragged else None
    assert_equals_the_definition(Case.random(S, B, n, g, D), window, documents, True, products)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [64, None])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_float32_is_as_exact_as_dense(window: int | None, sink: bool, scale: float) -> None:
    """At most twice the error of dense float32 attention, both against float64, with large scores too."""
    case = Case.random(256, 2, 6, 2, 32).to(torch.float32)
    case = Case(case.q * scale, case.k, case.v, case.sink, case.d_output)
    documents = ragged_documents(256, 2, seed=5)
    truth = case.to(torch.float64).run(dense(window, documents), sink)
    ours, theirs = (case.run(f(window, documents), sink) for f in (native, dense))
    for actual, other, expected in zip(ours, theirs, truth, strict=True):
        assert relative_error(actual, expected) <= 2 * relative_error(other, expected)


@pytest.mark.parametrize("window", [20, None])
def test_bf16_products_round_operands_only(window: int | None) -> None:
    """Outputs are not rounded to bfloat16, nor are scores: with few keys of large scores that would be seen."""
    case = Case.random(64, 1, 2, 1, 16).to(torch.bfloat16).to(torch.float32)
    case = Case(case.q * 8, case.k, case.v, case.sink, case.d_output)
    ours = native(window, None, "bf16")(case.q, case.k, case.v, None)
    exact = dense(window, None)(*(x.double() for x in (case.q, case.k, case.v)), None)
    assert relative_error(ours, exact) < 3e-3  # bfloat16 scores of about 30 would be off by 0.06, and e^s with them
    assert not torch.equal(ours, ours.bfloat16().float())


def test_bf16_products_make_gradients_of_scores_that_add_up_to_zero() -> None:
    """A single visible key has probability 1 whatever its score: no gradient for queries and keys."""
    case = Case.random(40, 2, 4, 2, 16).to(torch.float32)
    _, d_q, d_k, d_v = case.run(native(1, None, "bf16"), sink=False)
    assert d_q.abs().max() < 1e-5 and d_k.abs().max() < 1e-5 and d_v.abs().max() > 1


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_strided_tensors_are_read_as_they_are(products: Products) -> None:
    """Values cut out of the fused projection, and tensors whose last dimension is not contiguous."""
    S, B, n, g, D = 50, 2, 6, 2, 8
    case = Case.random(S, B, n, g, D).to(torch.float32)
    expected = case.run(native(9, None, products), sink=True)
    fused = torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in fused.split([n * D, g * D, g * D], dim=-1))
    d_output = case.d_output.transpose(0, 1).contiguous().transpose(0, 1)
    backwards = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, d_output)]
    pairs = torch.stack([case.sink, case.sink], dim=1)[:, 0]
    for q_, k_, v_, d_output_ in ((q, k, v, d_output), backwards):
        assert not v_.is_contiguous() and not d_output_.is_contiguous()
        leaves = [x.detach().requires_grad_() for x in (q_, k_, v_, pairs)]
        output = native(9, None, products)(*leaves)
        actual = [output, *torch.autograd.grad(output, leaves, d_output_)]
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_documents_of_any_integer_type(dtype: torch.dtype) -> None:
    documents = ragged_documents(60, 2, seed=3)
    case = Case.random(60, 2, 2, 1, 8).to(torch.float32)
    ours = [case.run(native(17, d), False) for d in (documents, documents.T.contiguous().T.to(dtype))]
    assert all(torch.equal(a, b) for a, b in zip(*ours, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 2, 1, 8), (4, 0, 2, 1, 8)])
@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_nothing_to_attend_to(shape: tuple[int, int, int, int, int], products: Products) -> None:
    S, B, n, g, D = shape
    case = Case.random(S, B, n, g, D).to(torch.float32)
    output, d_q, d_k, _, d_sink = case.run(native(None, None, products), sink=True)
    assert output.shape == d_q.shape == (S, B, n, D) and d_k.shape == (S, B, g, D)
    assert torch.equal(d_sink, torch.zeros(n))


# ---------------------------------------------------------------------- ways to get it wrong


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [1, 5, 15, 16, 17, 33, 64, None])
def test_a_window_is_w_keys_with_the_token_itself(window: int | None, products: Products) -> None:
    """Query i reads exactly keys i-W+1 .. i: one more or one fewer changes what it reads."""
    S = 100
    zeros, one_hot_values = torch.zeros(S, 1, 1, S), torch.eye(S).view(S, 1, 1, S)
    weights_ST = native(window, None, products)(zeros, zeros, one_hot_values, None)[:, 0, 0]
    for i in range(S):
        seen = torch.nonzero(weights_ST[i]).flatten().tolist()
        assert seen == list(range(max(0, i - (window or S) + 1), i + 1))


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("window", [9, 16, 64])
def test_another_window_would_be_seen(window: int, wrong: int) -> None:
    """In the output and in every gradient."""
    case = Case.random(130, 1, 2, 1, 8)
    ours = case.to(torch.float32).run(native(window), sink=False)
    for actual, other in zip(ours, case.run(dense(window + wrong, None), sink=False), strict=True):
        assert relative_error(actual, other) > 1e-3


@pytest.mark.parametrize("window", [4, None])
def test_another_grouping_would_be_seen(window: int | None) -> None:
    """Head h reads group h // (n/g), not h mod g."""
    case = Case.random(40, 1, 6, 2, 8).to(torch.float32)
    ours = native(window)(case.q, case.k, case.v, None)
    heads = torch.arange(6)
    for mapping, equal in ((heads // 3, True), (heads % 2, False)):
        every_head = dense(window, None)(case.q, case.k[:, :, mapping], case.v[:, :, mapping], None)
        assert torch.allclose(ours, every_head, rtol=0, atol=1e-5) == equal


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("border", [1, 15, 16, 17, 40, 63])
@pytest.mark.parametrize("window", [24, None])
def test_documents_do_not_see_each_other(window: int | None, border: int, products: Products) -> None:
    """No gradient crosses a border inside a block or between blocks, and each document's output is its own."""
    case = Case.random(64, 1, 4, 2, 8).to(torch.float32)
    documents = torch.tensor([[0] * border + [1] * (64 - border)])
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    output = native(window, documents, products)(*leaves, None)
    gradients = torch.autograd.grad(output[border:].sum(), leaves, retain_graph=True)
    assert all(torch.equal(g[:border], torch.zeros_like(g[:border])) for g in gradients)
    gradients = torch.autograd.grad(output[:border].sum(), leaves)
    assert all(torch.equal(g[border:], torch.zeros_like(g[border:])) for g in gradients)
    alone = native(window, None, products)(*(x[border:] for x in (case.q, case.k, case.v)), None)
    assert relative_error(output[border:].detach(), alone) < (1e-6 if products == "fp32" else 5e-3)


@pytest.mark.parametrize("window", [70, None])
def test_documents_need_not_stand_together(window: int | None) -> None:
    """Tokens of a document on both sides of another, and padding within, see each other."""
    S = 200
    documents = torch.cat([torch.arange(S)[None] // 50 % 2, torch.arange(S)[None] % 3 - 1])
    assert_equals_the_definition(Case.random(S, 2, 2, 1, 8), window, documents, sink=True)


def test_each_row_has_its_own_documents() -> None:
    documents = ragged_documents(80, 3, seed=7)
    assert not torch.equal(documents[0], documents[1])
    case = Case.random(80, 3, 2, 1, 8).to(torch.float32)
    ours = native(None, documents)(case.q, case.k, case.v, None)
    other = native(None, documents.roll(1, 0))(case.q, case.k, case.v, None)
    assert relative_error(ours, other) > 1e-2


@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize("window", [7, None])
def test_extreme_scores_and_sinks_stay_finite(window: int | None, size: float) -> None:
    """One key takes all, or the sink does: the score's own rounding, as large as its size, decides nothing else."""
    case = Case.random(24, 1, 2, 1, 4)
    case = Case(case.q * size, case.k, case.v, torch.tensor([-size, size], dtype=torch.float64), case.d_output)
    case = case.to(torch.float32)
    ours, theirs = (case.run(f(window, None), True) for f in (native, dense))
    for actual, other in zip(ours, theirs, strict=True):
        assert torch.isfinite(actual).all()
        torch.testing.assert_close(actual, other, rtol=2e-2, atol=1e-3 * size)


def test_large_equal_scores_are_averaged() -> None:
    """Scores of 1e5 and of -1e5 leave the weights equal: only differences matter."""
    v = torch.randn(40, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    mean = v.cumsum(0) / torch.arange(1, 41).view(-1, 1, 1, 1)
    for sign in (1.0, -1.0):
        q, k = torch.full((40, 1, 1, 8), 300.0), torch.full((40, 1, 1, 8), sign * 300.0)
        torch.testing.assert_close(native(None)(q, k, v, None), mean, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- NaN and infinity


def one_query_at_a_time(window: int) -> Callable[..., Tensor]:
    """Nothing but what a query sees is computed with, so that NaN is where it has to be and nowhere else."""

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        rows = []
        for i in range(len(q)):
            seen = slice(max(0, i - window + 1), i + 1)
            visible = visible_keys(1, i + 1 - seen.start)
            rows.append(dense_masked_attention(q[i : i + 1], k[seen], v[seen], visible, sink))
        return torch.cat(rows)

    return function


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_nan_and_infinity_come_out(which: int, value: float, products: Products) -> None:
    """Of the query, key, value or output gradient of token 70: not finite wherever it has to be, at least."""
    case = Case.random(100, 1, 2, 1, 8).to(torch.float32)
    [case.q, case.k, case.v, case.d_output][which][70, 0, 0, 3] = value
    ours = case.run(native(20, None, products), sink=True)
    truth = case.run(one_query_at_a_time(20), sink=True)
    assert sum(int((~x.isfinite()).sum()) for x in truth) > 20
    for actual, expected in zip(ours, truth, strict=True):
        assert not actual[~expected.isfinite()].isfinite().any()
    assert all(x[:30].isfinite().all() for x in ours[:4])  # what is far away stays as it was


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_a_nan_sink_comes_out(products: Products) -> None:
    case = Case.random(20, 1, 2, 1, 8).to(torch.float32)
    case.sink[1] = math.nan
    output, d_q, *_, d_sink = case.run(native(None, None, products), sink=True)
    assert output[:, :, 1].isnan().all() and d_q[:, :, 1].isnan().all() and d_sink[1].isnan()
    assert output[:, :, 0].isfinite().all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    case = Case.random(70, 1, 2, 1, 8).to(torch.float32)
    sink = torch.full((2,), -math.inf)
    assert torch.equal(native(9)(case.q, case.k, case.v, sink), native(9)(case.q, case.k, case.v, None))


# ------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [40, None])
@pytest.mark.parametrize("B", [1, 3])
def test_the_number_of_threads_changes_no_bit(B: int, window: int | None, products: Products) -> None:
    case = Case.random(260, B, 6, 2, 16).to(torch.float32)
    documents = ragged_documents(260, B, seed=1)
    assert_threads_change_no_bit(lambda: case.run(native(window, documents, products), sink=True))


# ---------------------------------------------------------------------------------- refusals


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k = torch.zeros(8, 1, 6, 4), torch.zeros(8, 1, 2, 4)
    with pytest.raises(ValueError, match="window is 0"):
        native(0)(q, k, k, None)
    with pytest.raises(ValueError, match=r"expected \[8, 1, groups, 4\]"):
        native(4)(q, k[1:], k[1:], None)


def test_other_dtypes_are_refused() -> None:
    q = torch.zeros(8, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        native(4)(q, q, q, None)
