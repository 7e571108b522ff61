"""The plain linear cross entropy against torch's cross entropy of full logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptron_kernels.linear_cross_entropy import plain
from steptron_kernels.linear_cross_entropy.plain import linear_cross_entropy
from tests.model.helpers import relative_error

TOKENS, VOCAB, HIDDEN = 23, 31, 16

MASKS = {
    "all": [True] * TOKENS,
    "some": [t % 3 != 1 for t in range(TOKENS)],
    "one": [t == 7 for t in range(TOKENS)],
    "none": [False] * TOKENS,
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return h, w, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def reference(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, w = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    value = (F.cross_entropy(h @ w.t(), labels, reduction="none") * mask).sum()
    return value.detach(), *torch.autograd.grad(factor * value, [h, w])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 23, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_value_and_gradients(
    monkeypatch: pytest.MonkeyPatch, mask: list[bool], chunk_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Chunk borders anywhere: in the middle, at the end, none."""
    monkeypatch.setattr(plain, "_CHUNK_ELEMENTS", chunk_rows * VOCAB)
    monkeypatch.setattr(plain, "_FEWEST_ROWS", {"cpu": 1})
    h, w, labels = inputs(dtype)
    mask_T = torch.tensor(mask)
    value = linear_cross_entropy(h, w, labels, mask_T)
    (0.37 * value).backward()
    expected, grad_h, grad_w = reference(h, w, labels, mask_T, 0.37)
    assert value.dim() == 0 and value.dtype is dtype
    assert abs(value.item() - expected.item()) <= tolerance * max(abs(expected.item()), 1)
    assert relative_error(h.grad, grad_h) <= tolerance and relative_error(w.grad, grad_w) <= tolerance
    assert torch.count_nonzero(h.grad[~mask_T]) == 0


def test_large_logits_do_not_overflow() -> None:
    h, w, labels = inputs()
    mask = torch.ones(TOKENS, dtype=torch.bool)
    h = (1000 * h.detach()).requires_grad_()
    value = linear_cross_entropy(h, w, labels, mask)
    value.backward()
    expected, grad_h, _ = reference(h, w, labels, mask, 1.0)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert h.grad.isfinite().all() and relative_error(h.grad, grad_h) < 1e-4


def test_a_mask_equals_leaving_tokens_out() -> None:
    h, w, labels = inputs()
    mask = torch.tensor(MASKS["some"])
    (masked,) = torch.autograd.grad(linear_cross_entropy(h, w, labels, mask), w)
    everything = torch.ones(int(mask.sum()), dtype=torch.bool)
    (left_out,) = torch.autograd.grad(linear_cross_entropy(h[mask], w, labels[mask], everything), w)
    assert torch.equal(masked, left_out)


def test_labels_of_masked_tokens_are_not_read() -> None:
    h, w, labels = inputs()
    mask = torch.tensor(MASKS["some"])
    wild = labels.masked_fill(~mask, 10**9)
    assert torch.equal(linear_cross_entropy(h, w, labels, mask), linear_cross_entropy(h, w, wild, mask))


def test_gradient_of_one_input_alone() -> None:
    h, w, labels = inputs()
    mask = torch.ones(TOKENS, dtype=torch.bool)
    _, grad_h, grad_w = reference(h, w, labels, mask, 1.0)
    linear_cross_entropy(h.detach(), w, labels, mask).backward()
    assert h.grad is None and relative_error(w.grad, grad_w) < 2e-6
    linear_cross_entropy(h, w.detach(), labels, mask).backward()
    assert relative_error(h.grad, grad_h) < 2e-6


def test_bf16_differs_from_fp32_by_rounding_alone() -> None:
    """Inputs and gradients are bf16; logits, softmax, sum and the scaling of gradients are not."""
    torch.manual_seed(1)
    h = torch.randn(512, 64).bfloat16().requires_grad_()
    w = (0.2 * torch.randn(300, 64)).bfloat16().requires_grad_()
    labels, mask = torch.randint(0, 300, (512,)), torch.ones(512, dtype=torch.bool)
    factor = 0.3 / 8191  # not a bf16 number: rounded to one it would be 0.25 % too large
    value = linear_cross_entropy(h, w, labels, mask)
    (factor * value).backward()
    expected, grad_h, grad_w = reference(h, w, labels, mask, factor)
    assert value.dtype is torch.float32 and h.grad.dtype is torch.bfloat16 and w.grad.dtype is torch.bfloat16
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    for own, exact in ((h.grad.double(), grad_h), (w.grad.double(), grad_w)):
        assert relative_error(own, exact) < 6e-3
        scale = float((own * exact).sum() / exact.square().sum())
        assert abs(scale - 1) < 3e-4, "every element is off by the same factor"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made, and the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.products: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        if "mm" in str(function):
            self.products.append(str(function))
        return result


def test_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_CHUNK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(plain, "_FEWEST_ROWS", {"cpu": 1})
    tokens, vocab = 4096, 1000
    h, w = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    labels, mask = torch.randint(0, vocab, (tokens,)), torch.rand(tokens) < 0.9
    with Largest() as largest:
        linear_cross_entropy(h, w, labels, mask).backward()
    assert largest.numel <= max(1 << 14, tokens * 8, vocab * 8)
    assert largest.numel < tokens * vocab / 50


def test_the_chunk_size_of_a_large_vocabulary_is_bounded() -> None:
    """The default size, at a vocabulary of which too few rows of logits would fit for a product."""
    h, w = torch.randn(300, 2, requires_grad=True), torch.randn(100_000, 2)
    with Largest() as largest:
        linear_cross_entropy(h, w, torch.zeros(300, dtype=torch.int64), torch.ones(300, dtype=torch.bool)).backward()
    assert largest.numel == 128 * 100_000


def test_evaluation_computes_no_gradients() -> None:
    h, w, labels = inputs()
    mask = torch.ones(TOKENS, dtype=torch.bool)
    with torch.no_grad(), Largest() as evaluation:
        value = linear_cross_entropy(h, w, labels, mask)
    assert evaluation.products == ["aten.mm.default"]
    assert not value.requires_grad and torch.equal(value, linear_cross_entropy(h, w, labels, mask).detach())
