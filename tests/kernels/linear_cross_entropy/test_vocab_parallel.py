"""The linear cross entropy over ranks that share the vocabulary, against the whole one in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptron_kernels.linear_cross_entropy import plain
from steptron_kernels.linear_cross_entropy.plain import linear_cross_entropy
from tests.model.helpers import relative_error
from tests.worker_pool import WorkerPool

TOKENS, VOCAB, HIDDEN = 23, 32, 16
FACTOR = 0.37

MASKS = {
    "all": [True] * TOKENS,
    "some": [t % 3 != 1 for t in range(TOKENS)],
    "one": [t == 7 for t in range(TOKENS)],
    "none": [False] * TOKENS,
}


@dataclass(frozen=True)
class Case:
    """Whole inputs, and how many tokens a chunk has (the default size when None)."""

    h: torch.Tensor
    w: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    chunk_rows: int | None = None


@dataclass(frozen=True)
class Result:
    value: torch.Tensor
    grad_h: torch.Tensor
    grad_w: torch.Tensor


def inputs(dtype: torch.dtype = torch.float32, mask: str = "all", chunk_rows: int | None = None) -> Case:
    """Random inputs; among the labels are the first and the last row of every rank."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    w = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[:8] = torch.tensor([0, 7, 8, 15, 16, 23, 24, 31])
    return Case(h, w, labels, torch.tensor(MASKS[mask]), chunk_rows)


def compute(case: Case, group: dist.ProcessGroup | None, rank: int, size: int) -> Result:
    h = case.h.clone().requires_grad_()
    w = case.w.chunk(size)[rank].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if case.chunk_rows is not None:
            patch.setattr(plain, "_CHUNK_ELEMENTS", case.chunk_rows * w.shape[0])
            patch.setattr(plain, "_FEWEST_ROWS", {"cpu": 1})
        value = linear_cross_entropy(h, w, case.labels, case.mask, group)
    (FACTOR * value).backward()
    return Result(value.detach(), h.grad, w.grad)


def on_ranks(rank: int, size: int, cases: list[Case]) -> list[Result]:
    return [compute(case, dist.group.WORLD, rank, size) for case in cases]


def whole(results: list[Result]) -> Result:
    """One result from those of all ranks, whose values have the same bits."""
    for result in results:
        assert result.value.dim() == 0
        assert torch.equal(result.value.view(-1).view(torch.uint8), results[0].value.view(-1).view(torch.uint8))
    grad_h = torch.stack([result.grad_h.double() for result in results]).sum(0)
    return Result(results[0].value, grad_h, torch.cat([result.grad_w for result in results]))


def run(pool: WorkerPool, size: int, cases: list[Case]) -> list[Result]:
    by_rank = pool.run(size, on_ranks, cases)
    return [whole([results[i] for results in by_rank]) for i in range(len(cases))]


def reference(case: Case) -> Result:
    h, w = case.h.double().requires_grad_(), case.w.double().requires_grad_()
    value = (F.cross_entropy(h @ w.t(), case.labels, reduction="none") * case.mask).sum()
    return Result(value.detach(), *torch.autograd.grad(FACTOR * value, [h, w]))


def assert_close(own: Result, expected: Result, tolerance: float) -> None:
    assert abs(own.value.item() - expected.value.item()) <= tolerance * max(abs(expected.value.item()), 1)
    assert relative_error(own.grad_h, expected.grad_h) <= tolerance
    assert relative_error(own.grad_w, expected.grad_w) <= tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("size", [2, 4])
def test_value_and_gradients(pool: WorkerPool, size: int, dtype: torch.dtype, tolerance: float) -> None:
    """Every mask, with chunk borders in the middle, at the end, and none."""
    cases = [inputs(dtype, mask, rows) for mask in MASKS for rows in (1, 4, 23, None)]
    for case, own in zip(cases, run(pool, size, cases), strict=True):
        assert own.value.dtype is dtype
        assert_close(own, reference(case), tolerance)
        assert torch.count_nonzero(own.grad_h[~case.mask]) == 0


def on_padded_ranks(rank: int, size: int, vocab_size: int, case: Case) -> Result:
    """Every rank holds equally many rows; those beyond the vocabulary hold what must not be read."""
    padded = torch.full((size * -(-vocab_size // size), HIDDEN), torch.nan, dtype=case.w.dtype)
    padded[:vocab_size] = case.w[:vocab_size]
    h = case.h.clone().requires_grad_()
    w = padded.chunk(size)[rank].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        # A number for which a shorter last part, counted by itself, would be cut into other chunks.
        patch.setattr(plain, "_CHUNK_ELEMENTS", 5 * w.shape[0])
        patch.setattr(plain, "_FEWEST_ROWS", {"cpu": 1})
        value = linear_cross_entropy(h, w, case.labels, case.mask, dist.group.WORLD, vocab_size)
    (FACTOR * value).backward()
    return Result(value.detach(), h.grad, w.grad)


@pytest.mark.parametrize("size, vocab_size", [(2, 31), (4, 29), (4, 25)])
def test_rows_that_fill_the_last_rank_up_take_no_part(pool: WorkerPool, size: int, vocab_size: int) -> None:
    case = inputs(torch.float64, "some")
    case = replace(case, w=case.w[:vocab_size], labels=case.labels.clamp(max=vocab_size - 1))
    own = whole(pool.run(size, on_padded_ranks, vocab_size, case))
    assert torch.count_nonzero(own.grad_w[vocab_size:]) == 0
    assert_close(replace(own, grad_w=own.grad_w[:vocab_size]), reference(case), 1e-14)


def test_a_ranks_gradient_of_h_is_its_part_alone(pool: WorkerPool) -> None:
    case = inputs(torch.float64)
    logits = case.h @ case.w.t()
    grad_logits = logits.softmax(1) - F.one_hot(case.labels, VOCAB)
    for rank, (result,) in enumerate(pool.run(4, on_ranks, [case])):
        rows = slice(rank * VOCAB // 4, (rank + 1) * VOCAB // 4)
        assert relative_error(result.grad_h, FACTOR * grad_logits[:, rows] @ case.w[rows]) < 1e-14
        assert relative_error(result.grad_w, FACTOR * grad_logits[:, rows].t() @ case.h) < 1e-14


@pytest.mark.parametrize("size", [2, 4])
def test_large_logits_do_not_overflow(pool: WorkerPool, size: int) -> None:
    """Logits of thousands, whose largest one is on any rank."""
    case = replace(inputs(), h=1000 * inputs().h)
    (own,) = run(pool, size, [case])
    expected = reference(case)
    assert own.value.item() == pytest.approx(expected.value.item(), rel=1e-6)
    assert own.grad_h.isfinite().all() and relative_error(own.grad_h, expected.grad_h) < 1e-4
    assert relative_error(own.grad_w, expected.grad_w) < 1e-4


def test_infinite_logits_are_as_without_ranks(pool: WorkerPool) -> None:
    """Logits of +-inf, of the target or not, of one row or of all that a rank has, of tokens that count or not."""
    h = inputs().h
    h[:, 0] = 1.0
    labels = torch.full((TOKENS,), 9)
    cases = []
    for rows, value in (
        ([3], torch.inf),
        ([9], torch.inf),
        ([3], -torch.inf),
        ([9], -torch.inf),
        (range(8), -torch.inf),
    ):
        w = inputs().w
        w[list(rows)] = 0.0
        w[list(rows), 0] = value
        cases += [Case(h, w, labels, torch.tensor(MASKS[mask]), 4) for mask in ("some", "none")]
    infinite = 0
    for case, own in zip(cases, run(pool, 4, cases), strict=True):
        expected = compute(case, None, 0, 1)
        torch.testing.assert_close(own.value, expected.value, rtol=2e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(own.grad_h, expected.grad_h.double(), rtol=2e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(own.grad_w, expected.grad_w, rtol=2e-5, atol=1e-6, equal_nan=True)
        infinite += not own.value.isfinite()
    assert infinite == 3


def test_labels_of_masked_tokens_are_not_read(pool: WorkerPool) -> None:
    case = inputs(mask="some")
    wild = [replace(case, labels=case.labels.masked_fill(~case.mask, label)) for label in (10**9, -100)]
    expected, *others = run(pool, 2, [case, *wild])
    for other in others:
        assert torch.equal(other.value, expected.value)
        assert torch.equal(other.grad_h, expected.grad_h) and torch.equal(other.grad_w, expected.grad_w)


def label_outside(rank: int, size: int, label: int) -> str:
    case = inputs()
    case.labels[5] = label
    with pytest.raises(RuntimeError) as caught:
        compute(case, dist.group.WORLD, rank, size)
    return str(caught.value)


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_that_no_rank_has_is_refused(pool: WorkerPool, label: int) -> None:
    for message in pool.run(2, label_outside, label):
        assert "a label is not among the 32 rows of the vocabulary" in message


def test_no_tokens(pool: WorkerPool) -> None:
    case = inputs()
    empty = Case(case.h[:0], case.w, case.labels[:0], case.mask[:0])
    (own,) = run(pool, 2, [empty])
    assert own.value.item() == 0.0 and own.grad_h.shape == (0, HIDDEN)
    assert own.grad_w.shape == (VOCAB, HIDDEN) and torch.count_nonzero(own.grad_w) == 0


def test_bf16_differs_from_fp32_by_rounding_alone(pool: WorkerPool) -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(256, 64, generator=generator).bfloat16()
    w = (0.2 * torch.randn(304, 64, generator=generator)).bfloat16()
    labels = torch.randint(0, 304, (256,), generator=generator)
    case = Case(h, w, labels, torch.ones(256, dtype=torch.bool))
    (own,) = run(pool, 2, [case])
    expected = reference(case)
    assert own.value.dtype is torch.float32 and own.grad_w.dtype is torch.bfloat16
    assert own.value.item() == pytest.approx(expected.value.item(), rel=1e-3)
    for mine, exact in ((own.grad_h, expected.grad_h), (own.grad_w.double(), expected.grad_w)):
        assert relative_error(mine, exact) < 6e-3
        assert abs(float((mine * exact).sum() / exact.square().sum()) - 1) < 1e-3, "all elements are off by a factor"


def group_of_one(rank: int, size: int) -> list[bool]:
    case = inputs(mask="some", chunk_rows=4)
    alone, grouped = compute(case, None, 0, 1), compute(case, dist.group.WORLD, rank, size)
    return [torch.equal(getattr(alone, name), getattr(grouped, name)) for name in ("value", "grad_h", "grad_w")]


def test_a_group_of_one_is_no_group(pool: WorkerPool) -> None:
    assert pool.run(1, group_of_one) == [[True, True, True]]


class Recorder(TorchDispatchMode):
    """Elements of the largest tensor that is made, the products, and the elements that each collective sends."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        self.products += "mm" in str(function)
        if function.namespace == "c10d":
            self.sent.append((function._opname, args[1].numel()))
        return result


def recorded(rank: int, size: int, training: bool) -> tuple[int, int, list[tuple[str, int]]]:
    tokens, vocab = 1000, 500
    h = torch.randn(tokens, 8, requires_grad=training)
    w = torch.randn(vocab // size, 8, requires_grad=training)
    labels, mask = torch.randint(0, vocab, (tokens,)), torch.ones(tokens, dtype=torch.bool)
    for values in (h.data, labels):
        dist.broadcast(values, 0)
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(plain, "_CHUNK_ELEMENTS", 100_000)
        patch.setattr(plain, "_FEWEST_ROWS", {"cpu": 1})
        linear_cross_entropy(h, w, labels, mask, dist.group.WORLD)
    return recorder.largest, recorder.products, recorder.sent


def test_two_numbers_per_token_are_sent_once_a_chunk_and_full_logits_never_exist(pool: WorkerPool) -> None:
    """A chunk has as many rows as this rank's part of the vocabulary allows."""
    for largest, products, sent in pool.run(2, recorded, True):
        assert largest == 400 * 250
        assert products == 3 * 3
        assert [elements for _, elements in sent] == [2 * 400, 2 * 400, 2 * 200]
        assert {name for name, _ in sent} == {"_allgather_base_"}


def test_evaluation_computes_no_gradients(pool: WorkerPool) -> None:
    for _, products, sent in pool.run(2, recorded, False):
        assert products == 3 and len(sent) == 3
