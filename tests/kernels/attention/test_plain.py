"""Chunked attention against explicit masks and explicit loops: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steptron_kernels.attention import plain
from steptron_kernels.attention.plain import attention, visible_keys
from steptron_kernels.head_gate.plain import head_gate
from tests.kernels.attention.cases import Case, dense, ragged_documents, relative_error

EXACT = dict(rtol=0.0, atol=1e-12)


def attended(
    window: int | None, documents: Tensor | None, first_keys: list[int] | None = None
) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        return attention(q, k, v, window=window, sink_n=sink, documents_BT=documents, first_keys=first_keys)

    return function


def assert_equal_to_dense(case: Case, window: int | None, documents: Tensor | None, sink: bool) -> None:
    ours = case.run(attended(window, documents), sink)
    expected = case.run(dense(window, documents), sink)
    for actual, truth in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, truth, **EXACT)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks even for small tensors, so that what happens between chunks is tested."""
    monkeypatch.setattr(plain, "_CHUNK_SCORES", 4096)


# ------------------------------------------------------------------------- the plain reference


@pytest.mark.parametrize("sink", [False, True])
def test_dense_reference_equals_the_definition(sink: bool) -> None:
    """One score at a time: the meaning of window, document, group and sink, spelled out."""
    S, B, n, g, D, window = 7, 2, 6, 2, 4, 3
    case = Case.random(S, B, n, g, D)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0]])
    expected = torch.zeros(S, B, n, D, dtype=torch.float64)
    for i in range(S):
        for b in range(B):
            for head in range(n):
                group = head // (n // g)
                top = torch.zeros(D, dtype=torch.float64)
                bottom = math.exp(case.sink[head]) if sink else 0.0
                for j in range(S):
                    if 0 <= i - j < window and documents[b, i] == documents[b, j]:
                        weight = math.exp(float(case.q[i, b, head] @ case.k[j, b, group]) / math.sqrt(D))
                        top, bottom = top + weight * case.v[j, b, group], bottom + weight
                expected[i, b, head] = top / bottom
    actual = dense(window, documents)(case.q, case.k, case.v, case.sink if sink else None)
    torch.testing.assert_close(actual, expected, **EXACT)


# ------------------------------------------------------------------------ equality with dense


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("S, window", [(70, 1), (70, 2), (64, 16), (70, 17), (70, 69), (70, 70), (70, 99), (70, None)])
@pytest.mark.usefixtures("small_chunks")
def test_equals_dense(S: int, window: int | None, ragged: bool, sink: bool) -> None:
    documents = ragged_documents(S, 3, seed=S) if ragged else None
    assert_equal_to_dense(Case.random(S, 3, 6, 2, 8), window, documents, sink)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 90),
    B=st.integers(1, 3),
    g=st.integers(1, 3),
    r=st.integers(1, 4),
    D=st.sampled_from([1, 4, 5]),
    window=st.none() | st.integers(1, 100),
    documents_seed=st.none() | st.integers(0, 1000),
    sink=st.booleans(),
    chunk_scores=st.sampled_from([1, 3000, 1 << 20]),
)
def test_equals_dense_for_any_shape(
    S: int,
    B: int,
    g: int,
    r: int,
    D: int,
    window: int | None,
    documents_seed: int | None,
    sink: bool,
    chunk_scores: int,
) -> None:
    documents = None if documents_seed is None else ragged_documents(S, B, documents_seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_CHUNK_SCORES", chunk_scores)
        assert_equal_to_dense(Case.random(S, B, g * r, g, D), window, documents, sink)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [64, None])
def test_float32_is_as_exact_as_dense(window: int | None, sink: bool) -> None:
    """At most twice the error of dense float32 attention, both against float64."""
    exact = Case.random(256, 2, 6, 2, 32)
    documents = ragged_documents(256, 2, seed=5)
    truth = exact.to(torch.float32).to(torch.float64).run(dense(window, documents), sink)
    ours = exact.to(torch.float32).run(attended(window, documents), sink)
    theirs = exact.to(torch.float32).run(dense(window, documents), sink)
    for actual, other, expected in zip(ours, theirs, truth, strict=True):
        assert actual.dtype is torch.float32
        assert relative_error(actual, expected) <= 2 * relative_error(other, expected)


@pytest.mark.parametrize("window", [20, None])
def test_bfloat16_computes_in_float32(window: int | None) -> None:
    """Scores are not rounded to bfloat16: only inputs, output and (through it) the backward are."""
    case = Case.random(96, 2, 4, 2, 16).to(torch.bfloat16)
    truth = case.to(torch.float64).run(dense(window, None), sink=True)
    ours = case.run(attended(window, None), sink=True)
    assert all(tensor.dtype is torch.bfloat16 for tensor in ours)
    assert torch.equal(ours[0], case.to(torch.float32).run(attended(window, None), sink=True)[0].bfloat16())
    for actual, expected in zip(ours, truth, strict=True):
        assert relative_error(actual, expected) < 4e-3


def test_the_fused_form_of_plain_causal_attention_equals_dense() -> None:
    """What full layers without documents, sink or earlier keys run on CUDA."""
    case = Case.random(33, 2, 6, 2, 8)
    fused = case.run(lambda q, k, v, _: plain._fused_causal_attention(q, k, v), sink=False)
    for actual, truth in zip(fused, case.run(dense(None, None), sink=False), strict=True):
        torch.testing.assert_close(actual, truth, **EXACT)


# ---------------------------------------------------------------------- ways to get it wrong


@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_a_window_is_w_keys_with_the_token_itself(window: int) -> None:
    """Query i reads exactly keys i-W+1 .. i: one more or one fewer changes what it reads."""
    S = 48
    zeros = torch.zeros(S, 1, 1, 1, dtype=torch.float64)
    one_hot_values = torch.eye(S, dtype=torch.float64).view(S, 1, 1, S)
    queries, keys = zeros.expand(S, 1, 1, S), zeros.expand(S, 1, 1, S)
    weights_ST = attended(window, None)(queries, keys, one_hot_values, None)[:, 0, 0]
    for i in range(S):
        seen = torch.nonzero(weights_ST[i]).flatten().tolist()
        assert seen == list(range(max(0, i - window + 1), i + 1))
        torch.testing.assert_close(weights_ST[i, seen], torch.full((len(seen),), 1 / len(seen), dtype=torch.float64))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_window_would_be_seen(wrong: int) -> None:
    case = Case.random(40, 1, 2, 1, 8)
    ours = attended(9, None)(case.q, case.k, case.v, None)
    assert (ours - dense(9 + wrong, None)(case.q, case.k, case.v, None)).abs().max() > 0.01


@pytest.mark.parametrize("window", [4, None])
def test_another_grouping_would_be_seen(window: int | None) -> None:
    """Head h reads group h // (n/g), not h mod g."""
    case = Case.random(12, 1, 6, 2, 8)
    ours = attended(window, None)(case.q, case.k, case.v, None)
    heads = torch.arange(6)
    for mapping, equal in ((heads // 3, True), (heads % 2, False)):
        every_head = dense(window, None)(case.q, case.k[:, :, mapping], case.v[:, :, mapping], None)
        assert torch.allclose(ours, every_head, rtol=0, atol=1e-12) == equal


@pytest.mark.parametrize("window", [6, None])
def test_documents_do_not_see_each_other(window: int | None) -> None:
    """Each document's output is what it would be alone, wherever it stands in the row."""
    case = Case.random(40, 1, 4, 2, 8)
    documents = torch.tensor([[0] * 13 + [1] * 17 + [2] * 4 + [-1] * 6])
    together = attended(window, documents)(case.q, case.k, case.v, None)
    assert torch.isfinite(together).all()
    for start, stop in ((0, 13), (13, 30), (30, 34), (34, 40)):
        alone = attended(window, None)(*(x[start:stop] for x in (case.q, case.k, case.v)), None)
        torch.testing.assert_close(together[start:stop], alone, **EXACT)
    assert not torch.allclose(together, attended(window, None)(case.q, case.k, case.v, None))


@pytest.mark.parametrize("window", [8, None])
def test_a_gate_equals_a_sink(window: int | None) -> None:
    """facts, head-wise gate and sink: a gate of logit g is a sink of logit log Z - g, and the reverse."""
    case = Case.random(30, 2, 6, 2, 8)
    visible = visible_keys(30, 30, window)
    scores = torch.einsum("sbnd,tbnd->bnst", case.q, case.k.repeat_interleave(3, dim=2)) / math.sqrt(8)
    log_z_SBn = scores.masked_fill(~visible[:, None], -math.inf).logsumexp(-1).permute(2, 0, 1)
    plain = attended(window, None)(case.q, case.k, case.v, None)
    gated = head_gate(plain, log_z_SBn - case.sink)
    torch.testing.assert_close(attended(window, None)(case.q, case.k, case.v, case.sink), gated, **EXACT)
    assert (gated - plain).abs().max() > 0.1
    for place in (0, 17):  # the reverse, at places where the sink is chosen from log Z of one head
        gate_logit = torch.linspace(-2, 2, 6, dtype=torch.float64)
        sink = log_z_SBn[place, 1] - gate_logit
        by_sink = attended(window, None)(case.q, case.k, case.v, sink)[place, 1]
        torch.testing.assert_close(by_sink, plain[place, 1] * torch.sigmoid(gate_logit)[:, None], **EXACT)


@pytest.mark.parametrize("window", [7, None])
@pytest.mark.parametrize("size", [1e3, 1e4])
def test_extreme_scores_and_sinks_stay_finite(window: int | None, size: float) -> None:
    case = Case.random(24, 1, 2, 1, 4)
    case = Case(case.q * size, case.k, case.v, torch.tensor([-size, size], dtype=torch.float64), case.d_output)
    for actual, truth in zip(case.run(attended(window, None), True), case.run(dense(window, None), True), strict=True):
        assert torch.isfinite(actual).all()
        torch.testing.assert_close(actual, truth, rtol=1e-9, atol=1e-12 * size)


# ------------------------------------------------------------------------- keys from elsewhere


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [1, 9, 16, 40, None])
@pytest.mark.parametrize("offset", [5, 16, 33])
@pytest.mark.usefixtures("small_chunks")
def test_keys_before_the_first_query(offset: int, window: int | None, ragged: bool, sink: bool) -> None:
    """The last queries of a longer sequence, given the keys before them."""
    S = 37
    case = Case.random(S, 2, 4, 2, 8, keys=offset + S)
    documents = ragged_documents(offset + S, 2, seed=offset) if ragged else None

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        return attention(q, k, v, window=window, sink_n=sink, documents_BT=documents, query_offset=offset)

    for actual, truth in zip(case.run(ours, sink), case.run(dense(window, documents), sink), strict=True):
        torch.testing.assert_close(actual, truth, **EXACT)


# ------------------------------------------------------------------------------------- cost


class _Sizes(TorchDispatchMode):
    """Elements of the largest tensor, and of all tensors, that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.total = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.total += tensor.numel()
        return result


def _sizes(S: int, window: int | None, documents: Tensor | None = None, first_keys: list[int] | None = None) -> _Sizes:
    case = Case.random(S, 1, 2, 1, 4).to(torch.float32)
    with _Sizes() as sizes:
        case.run(attended(window, documents, first_keys), sink=True)
    return sizes


@pytest.mark.parametrize("ragged", [False, True])
def test_a_window_costs_s_times_w(ragged: bool) -> None:
    """No S x S tensor, not even of one head, and twice the sequence is twice the work."""
    short, long = (_sizes(S, 16, ragged_documents(S, 1, S) if ragged else None) for S in (2048, 4096))
    assert long.largest <= 4096 * 2 * 32  # the scores of 2 heads with 2 W keys per query
    assert 1.8 < long.total / short.total < 2.2


@pytest.mark.parametrize("window", [64, None])
def test_scores_are_held_for_one_chunk_only(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_CHUNK_SCORES", 1 << 17)
    assert _sizes(2048, window).largest <= 1 << 17


def test_full_attention_skips_earlier_documents() -> None:
    """With ``first_keys``, which changes no result."""
    documents = torch.arange(2048)[None] // 128
    first_keys = [place // 128 * 128 for place in range(2048)]
    assert _sizes(2048, None, documents, first_keys).total < 0.3 * _sizes(2048, None).total
    case = Case.random(2048, 1, 2, 1, 4)
    for actual, truth in zip(
        case.run(attended(None, documents, first_keys), True), case.run(attended(None, documents), True), strict=True
    ):
        torch.testing.assert_close(actual, truth, **EXACT)


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k_TBgD=torch.zeros(9, 1, 2, 4)), r"expected \[8, 1, groups, 4\]"),
        (dict(v_TBgD=torch.zeros(8, 1, 1, 4)), r"expected \[8, 1, groups, 4\]"),
        (dict(k_TBgD=torch.zeros(8, 1, 4, 4), v_TBgD=torch.zeros(8, 1, 4, 4)), "6 query heads.*4 key-value groups"),
        (dict(window=0), "window is 0.*at least 1"),
        (dict(sink_n=torch.zeros(2)), r"sink has shape \(2,\), expected \(6,\)"),
        (dict(documents_BT=torch.zeros(2, 8)), r"documents have shape \(2, 8\), expected \(1, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(
        q_SBnD=torch.zeros(8, 1, 6, 4), k_TBgD=torch.zeros(8, 1, 2, 4), v_TBgD=torch.zeros(8, 1, 2, 4), window=None
    )
    with pytest.raises(ValueError, match=message):
        attention(**(arguments | change))
