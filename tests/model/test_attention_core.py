"""What the context of a micro-batch becomes when attention is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steptron.model import attention_core
from steptron.model.attention_core import attend
from steptron.model.sequence import SequenceContext, SequenceShard
from steptron_kernels.attention.plain import dense_masked_attention, visible_keys

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


def test_a_part_of_a_sequence_is_refused() -> None:
    shard = SequenceShard(16, ((0, 4), (12, 16)))
    with pytest.raises(NotImplementedError, match=r"\(\(0, 4\), \(12, 16\)\) of 16.*parallel.context"):
        attend(*tensors(), SequenceContext(torch.zeros(1, 8), None, shard), None)


def test_documents_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context.documents_BS has shape \(2, 23\), expected \(2, 24\)"):
        attend(*tensors(), context_of(DOCUMENTS[:, 1:]), None)
