"""What the context of a micro-batch becomes when attention is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from steptron.model import attention_core
from steptron.model.attention_core import attend
from steptron.model.sequence import SequenceContext
from steptron.parallel.key_exchange import plan_exchange
from steptron.parallel.sequence_shard import SequenceShard
from steptron_kernels import extension
from steptron_kernels.attention.native import Attention
from steptron_kernels.attention.plain import attention as plain_attention
from steptron_kernels.attention.plain import dense_masked_attention, visible_keys
from tests.worker_pool import WorkerPool

extension.require()

S, B = 24, 2
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 10 + [-1] * 7, [0] * 9 + [1] * 15])


def context_of(documents_BS: Tensor | None) -> SequenceContext:
    return SequenceContext(torch.arange(S).expand(B, S), documents_BS, SequenceShard.whole(S))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


class Recorder:
    """An attention operation that notes its keyword arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.calls.append(options)
        return q


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [5, None])
def test_tokens_see_their_own_document(window: int | None, documents: Tensor | None) -> None:
    q, k, v = tensors()
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    expected = dense_masked_attention(q, k, v, visible_keys(S, S, window, documents), sink)
    actual = attend(q, k, v, context_of(documents), window, sink)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-12)


def test_the_given_operation_is_called() -> None:
    operation = Recorder()
    sink = torch.zeros(4)
    q, k, v = tensors()
    assert attend(q, k, v, context_of(DOCUMENTS), 5, sink, operation) is q
    assert attend(q, k, v, context_of(DOCUMENTS), None, None, operation) is q
    sliding, full = operation.calls
    assert sliding["window"] == 5 and sliding["sink_n"] is sink and torch.equal(sliding["documents_BT"], DOCUMENTS)
    assert full["window"] is None and full["sink_n"] is None
    # From place 9 on, row 0 is in the document of 7 and row 1 in the one of 9.
    assert full["first_keys"] == [0] * 9 + [7] * 8 + [9] * 7


@pytest.mark.parametrize("documents", [None, torch.zeros(B, S), torch.full((B, S), 3)])
def test_one_document_in_every_row_needs_no_mask(documents: Tensor | None) -> None:
    operation = Recorder()
    attend(*tensors(), context_of(documents), 5, None, operation)
    assert operation.calls[0].get("documents_BT") is None


def test_masks_are_prepared_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = attention_core._first_keys
    monkeypatch.setattr(attention_core, "_first_keys", lambda documents: calls.append(1) or original(documents))
    context = context_of(DOCUMENTS)
    for _ in range(3):
        attend(*tensors(), context, None)
    assert len(calls) == 1


def test_documents_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context.documents_BS has shape \(2, 23\), expected \(2, 24\): whole rows"):
        attend(*tensors(), context_of(DOCUMENTS[:, 1:]), None)


def test_a_context_of_other_tokens_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"queries have 23 tokens, but context\.shard holds 24"):
        attend(q[1:], k[1:], v[1:], context_of(None), None)


# ----------------------------------------------------------------------- a part of each sequence

LENGTH = 48  # chunks of 12, 8 and 6 tokens on 2, 3 and 4 ranks
WHOLE_ROWS = {
    "one document": None,
    # Borders at shard borders (12, 24; 6, 30, 36 on four ranks), one place off them, and inside chunks.
    "several documents": torch.tensor(
        [[0] * 12 + [1] * 5 + [2] * 7 + [3] * 12 + [4] * 12, [0] * 6 + [1] * 1 + [2] * 22 + [3] * 1 + [4] * 18]
    ),
    # Padding from within a chunk on over several ranks' chunks; padding of just the last chunk.
    "padding": torch.tensor([[0] * 9 + [1] * 11 + [-1] * 28, [0] * 23 + [1] * 19 + [-1] * 6]),
}
# One; within a chunk; a chunk of each size and its neighbours; over several chunks; the whole row; all.
WINDOWS = [1, 2, 5, 6, 7, 8, 9, 12, 13, 19, 30, 47, 48, 100, None]


@dataclass(frozen=True)
class Results:
    """Output and gradients of one call, of the tokens that a rank holds."""

    output: Tensor
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_sink: Tensor | None

    def assert_near(self, other: Results, tolerance: float, what: str) -> None:
        for field in fields(self):
            actual, expected = getattr(self, field.name), getattr(other, field.name)
            assert (actual is None) == (expected is None)
            if expected is not None:
                error = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1.0))
                assert error <= tolerance, f"{field.name} of {what}: {error:.2e}"


def leaves_of_whole_rows() -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values, sink; and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, B, 4, 8), (LENGTH, B, 2, 8), (LENGTH, B, 2, 8), (4,), (LENGTH, B, 4, 8)]
    *leaves, d_output = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return leaves, d_output


def run(function: Callable[..., Tensor], leaves: list[Tensor], d_output: Tensor, sink: bool) -> Results:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = function(*leaves[:3], leaves[3] if sink else None)
    output.backward(d_output)
    return Results(output.detach(), *(leaf.grad for leaf in leaves))


def expected_results(window: int | None, documents: Tensor | None, sink: bool) -> Results:
    visible = visible_keys(LENGTH, LENGTH, window, documents)
    return run(lambda q, k, v, b: dense_masked_attention(q, k, v, visible, b), *leaves_of_whole_rows(), sink)


def shard_context(rank: int, size: int, documents: Tensor | None) -> SequenceContext:
    shard = SequenceShard.balanced(LENGTH, rank, size)
    return SequenceContext(torch.arange(LENGTH).expand(B, LENGTH), documents, shard, dist.group.WORLD)


def shard_results(
    rank: int, size: int, windows: list[int | None], documents: Tensor | None, sink: bool
) -> list[tuple[Results, Results]]:
    """For each window, this rank's results in float64 by the plain operation and in float32 by the native one."""
    leaves, d_output = leaves_of_whole_rows()
    context = shard_context(rank, size, documents)
    own = context.shard.take(torch.arange(LENGTH)[None])[0]
    leaves = [*(leaf[own] for leaf in leaves[:3]), leaves[3]]
    pairs = []
    for window in windows:
        pair = []
        for operation, dtype in ((plain_attention, torch.float64), (Attention("fp32"), torch.float32)):
            pair.append(
                run(
                    lambda q, k, v, b, w=window, op=operation: attend(q, k, v, context, w, b, op),
                    [leaf.to(dtype) for leaf in leaves],
                    d_output[own].to(dtype),
                    sink,
                )
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def whole_rows(parts: list[Results]) -> Results:
    """The ranks' tokens in the order of the rows; the sink's gradient added up over the ranks."""
    size = len(parts)
    ranges = [r for rank in range(size) for r in SequenceShard.balanced(LENGTH, rank, size).ranges]
    order = torch.cat([torch.arange(*r) for r in ranges]).argsort()
    names = ("output", "d_q", "d_k", "d_v")
    tokens = [torch.cat([getattr(part, name) for part in parts])[order] for name in names]
    if parts[0].d_sink is None:
        return Results(*tokens, None)
    return Results(*tokens, torch.stack([part.d_sink for part in parts]).sum(dim=0))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("rows", WHOLE_ROWS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_together_are_attention_of_whole_rows(pool: WorkerPool, size: int, rows: str, sink: bool) -> None:
    documents = WHOLE_ROWS[rows]
    by_rank = pool.run(size, shard_results, WINDOWS, documents, sink)
    for i, window in enumerate(WINDOWS):
        expected = expected_results(window, documents, sink)
        whole_rows([results[i][0] for results in by_rank]).assert_near(expected, 1e-14, f"plain, window {window}")
        whole_rows([results[i][1] for results in by_rank]).assert_near(expected, 2e-6, f"native, window {window}")


class Watcher:
    """An attention operation that notes what it was asked, and does it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.documents: list[list[list[int]] | None] = []
        self.first_keys: list[list[int] | None] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.calls.append((len(q), len(k), options["query_offset"]))
        documents = options.get("documents_BT")
        self.documents.append(None if documents is None else documents.tolist())
        self.first_keys.append(options.get("first_keys"))
        return plain_attention(q, k, v, **options)


def watched(rank: int, size: int, windows: list[int | None], documents: Tensor | None) -> Watcher:
    q, k, v, _ = leaves_of_whole_rows()[0]
    context, operation = shard_context(rank, size, documents), Watcher()
    own = context.shard.take(torch.arange(LENGTH)[None])[0]
    for window in windows:
        attend(q[own], k[own], v[own], context, window, None, operation)
    return operation


def test_each_range_meets_just_the_keys_that_it_sees(pool: WorkerPool) -> None:
    early, late = pool.run(2, watched, [5, 14, None], WHOLE_ROWS["one document"])
    # Chunks of 12; the late one of rank 1 begins at 24, of rank 0 at 36.
    assert early.calls == [(12, 12, 0), (12, 16, 4), (12, 12, 0), (12, 25, 13), (12, 12, 0), (12, 48, 36)]
    assert late.calls == [(12, 16, 4), (12, 16, 4), (12, 24, 12), (12, 25, 13), (12, 24, 12), (12, 36, 24)]


def test_documents_and_first_keys_are_those_of_the_range(pool: WorkerPool) -> None:
    documents = WHOLE_ROWS["several documents"]
    for rank, watcher in enumerate(pool.run(2, watched, [5, None], documents)):
        stops = [stop for _, stop in SequenceShard.balanced(LENGTH, rank, 2).ranges]
        for stop, (_, keys, _), given in zip(stops * 2, watcher.calls, watcher.documents, strict=True):
            here = documents[:, stop - keys : stop]
            assert given == here.tolist()
        assert watcher.first_keys[:2] == [None, None], "a window needs no first keys"
        for stop, first_keys in zip(stops, watcher.first_keys[2:], strict=True):
            begins = [[row.tolist().index(row[t]) for row in documents] for t in range(stop)]
            assert first_keys == [min(row_begins) for row_begins in begins]


def test_a_range_within_one_document_needs_no_mask(pool: WorkerPool) -> None:
    documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 18 + [1] * 30])
    _, late = pool.run(2, watched, [5, None], documents)
    # The window of [24, 36) begins at 20, where both rows are in their second document.
    assert [given is None for given in late.documents] == [False, True, False, False]


def kept_for_the_backward(rank: int, size: int, window: int | None, native: bool) -> dict[str, int]:
    """Elements of the storages that attention keeps, besides those of queries and outputs."""
    q, k, v, _ = (leaf.float().requires_grad_() for leaf in leaves_of_whole_rows()[0])
    context = shard_context(rank, size, None)
    own = context.shard.take(torch.arange(LENGTH)[None])[0]
    q, k, v = (x[own] for x in (q, k, v))
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[2:] == (2, 8):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = attend(q, k, v, context, window, None, Attention("fp32") if native else plain_attention)
    assert output.requires_grad
    return {"storages": len(storages), "elements": sum(storages.values())}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("window", [5, None])
def test_keys_and_values_are_kept_once(pool: WorkerPool, window: int | None, native: bool) -> None:
    for rank, kept in enumerate(pool.run(4, kept_for_the_backward, window, native)):
        seen = plan_exchange(LENGTH, 4, rank, window).seen_rows
        assert kept == {"storages": 1, "elements": seen * B * 2 * 2 * 8}


def refusals(rank: int, size: int) -> list[str]:
    shard = SequenceShard.balanced(LENGTH, rank, size)
    group = dist.group.WORLD
    positions = torch.arange(LENGTH).expand(B, LENGTH)
    own_documents = torch.zeros(B, shard.size, dtype=torch.int64)
    contexts = [
        SequenceContext(positions, None, shard),
        SequenceContext(positions, None, SequenceShard.balanced(LENGTH, 1 - rank, size), group),
        SequenceContext(positions, own_documents, shard, group),
    ]
    q, k, v, _ = (leaf[: shard.size] for leaf in leaves_of_whole_rows()[0])
    messages = []
    for context in contexts:
        with pytest.raises(ValueError) as error:
            attend(q, k, v, context, 5)
        messages.append(str(error.value))
    return messages


def test_a_context_that_does_not_fit_its_group_is_refused(pool: WorkerPool) -> None:
    alone, other, documents = pool.run(2, refusals)[0]
    assert "token ranges ((0, 12), (36, 48)) of 48 only, but context.context_group is None" in alone
    assert other == "context.shard ((12, 24), (24, 36)) is not SequenceShard.balanced of rank 0 of 2"
    assert documents == "context.documents_BS has shape (2, 24), expected (2, 48): whole rows"
