"""Attention to cached keys: the plain version against dense attention, the native one against the plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.attention.plain import dense_masked_attention, visible_keys
from steptron_kernels.cached_attention.native import CachedAttention
from steptron_kernels.cached_attention.plain import cached_attention as plain
from tests.kernels.against_plain import random
from tests.model.helpers import relative_error

extension.require()
native = CachedAttention("fp32")


@dataclass(frozen=True)
class Case:
    """Sequences in a pool whose rows are shuffled, with the keys that each had from its first place on."""

    q_RQnD: Tensor
    k_NgD: Tensor
    v_NgD: Tensor
    table_RL: Tensor
    first_R: Tensor
    places_RQ: Tensor
    window: int | None
    sink_n: Tensor | None

    def arguments(self, dtype: torch.dtype = torch.float32) -> list[object]:
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in fields]

    def dense(self) -> Tensor:
        """Sequence by sequence with an explicit mask over all places, float64."""
        outputs = []
        for r in range(len(self.q_RQnD)):
            last, Q = int(self.places_RQ[r, -1]), self.q_RQnD.shape[1]
            rows = self.table_RL[r, : last + 1 - int(self.first_R[r])]
            k_TBgD, v_TBgD = (x[rows].double()[:, None] for x in (self.k_NgD, self.v_NgD))
            sink = None if self.sink_n is None else self.sink_n.double()
            visible = visible_keys(Q, len(rows), self.window)
            outputs.append(
                dense_masked_attention(self.q_RQnD[r].double()[:, None], k_TBgD, v_TBgD, visible, sink)[:, 0]
            )
        return torch.stack(outputs)


def make(
    lengths: list[int], queries: int, groups: int, per_group: int, head_dim: int, window: int | None, sink: bool
) -> Case:
    """Sequences of so many places, the last ``queries`` of them the queries'."""
    lengths = [max(length, queries) for length in lengths]
    # What no query sees is given back: the tables begin later, by block of three, as a cache would have it.
    firsts = [0 if window is None else max(0, length - queries - window + 1) // 3 * 3 for length in lengths]
    held = [length - first for length, first in zip(lengths, firsts, strict=True)]
    N = sum(held) + 5
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    table_RL = torch.full((len(lengths), max(held)), int(order[-1]))
    begin = 0
    for row, count in enumerate(held):
        table_RL[row, :count] = order[begin : begin + count]
        begin += count
    ends_R1 = torch.tensor(lengths)[:, None]
    k_NgD, v_NgD = 2 * random(N, groups, head_dim, seed=1), random(N, groups, head_dim, seed=2)
    for x in (k_NgD, v_NgD):
        x[order[-1]] = float("nan")  # a row that no query sees
    return Case(
        random(len(lengths), queries, groups * per_group, head_dim),
        k_NgD,
        v_NgD,
        table_RL,
        torch.tensor(firsts),
        ends_R1 - queries + torch.arange(queries),
        window,
        random(groups * per_group, seed=3) if sink else None,
    )


cases = st.builds(
    make,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    queries=st.integers(1, 7),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 6),
    head_dim=st.sampled_from([1, 8, 15, 32]),
    window=st.sampled_from([None, 1, 4, 16, 100]),
    sink=st.booleans(),
)


def without_nan(case: Case) -> Case:
    return replace(case, k_NgD=case.k_NgD.nan_to_num(7.0), v_NgD=case.v_NgD.nan_to_num(7.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases)
def test_plain_is_dense_attention(case: Case) -> None:
    case = without_nan(case)
    torch.testing.assert_close(plain(*case.arguments(torch.float64)), case.dense(), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    assert relative_error(plain(*case.arguments()), case.dense()) < 3e-6  # type: ignore[arg-type]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases)
def test_native_is_dense_attention_and_reads_nothing_else(case: Case) -> None:
    output = native(*case.arguments())  # type: ignore[arg-type]
    assert output.isfinite().all() and relative_error(output, without_nan(case).dense()) < 3e-6


def test_as_exact_as_the_plain_version() -> None:
    case = without_nan(make([700, 400, 1000], 3, 2, 6, 32, None, False))
    exact = case.dense()
    own, other = (relative_error(f(*case.arguments()), exact) for f in (native, plain))  # type: ignore[operator]
    assert own <= 1.5 * other


def test_threads_change_no_bit() -> None:
    case = make([50, 300, 7, 120], 2, 2, 3, 16, None, False)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            outputs.append(native(*case.arguments()))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_a_window_ends_where_it_should() -> None:
    """The key at distance window - 1 is seen, the one at distance window is not."""
    case = without_nan(make([20], 1, 1, 1, 8, None, False))
    case = replace(case, window=5)
    seen, unseen = case.table_RL[0, 15], case.table_RL[0, 14]
    for f in (native, plain):
        before = f(*case.arguments())  # type: ignore[operator]
        for row, changes in ((seen, True), (unseen, False)):
            v_NgD = case.v_NgD.clone()
            v_NgD[row] += 1.0
            assert torch.equal(f(*replace(case, v_NgD=v_NgD).arguments()), before) != changes  # type: ignore[operator]


def test_large_scores_and_values_that_are_not_finite() -> None:
    case = without_nan(make([40, 30], 1, 2, 2, 16, None, False))
    huge = replace(case, q_RQnD=case.q_RQnD * 1e4)
    assert relative_error(native(*huge.arguments()), huge.dense()) < 1e-4  # type: ignore[arg-type]
    broken = replace(case, k_NgD=case.k_NgD.clone())
    broken.k_NgD[case.table_RL[1, 3]] = float("nan")
    output = native(*broken.arguments())  # type: ignore[arg-type]
    assert output[1].isnan().all() and output[0].isfinite().all()


def test_bf16_products_round_their_operands() -> None:
    case = without_nan(make([200, 90], 2, 2, 4, 32, None, False))
    rounded = replace(case, **{name: getattr(case, name).bfloat16().float() for name in ("q_RQnD", "k_NgD", "v_NgD")})
    in_bf16 = CachedAttention("bf16")
    assert torch.equal(in_bf16(*case.arguments()), in_bf16(*rounded.arguments()))  # type: ignore[arg-type]
    error = relative_error(in_bf16(*case.arguments()), rounded.dense())  # type: ignore[arg-type]
    assert 1e-5 < error < 4e-3, "probabilities are rounded, scores and sums are not"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table_RL": torch.tensor([[0, 1, 99]])}, "row 99 is outside of the pool's"),
        ({"table_RL": torch.tensor([[0, 1]])}, "do not hold what its queries see"),
        ({"first_R": torch.tensor([3])}, "do not hold what its queries see"),
        ({"table_RL": torch.zeros(1, 3, dtype=torch.int32)}, "table: expected contiguous int64"),
        ({"window": 0}, "window: expected at least 1"),
        ({"q_RQnD": torch.zeros(1, 1, 2, 5)}, "shapes do not fit together"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    case = make([3], 1, 1, 2, 8, None, False)
    with pytest.raises(RuntimeError, match=said):
        native(*replace(case, **changes).arguments())  # type: ignore[arg-type]
