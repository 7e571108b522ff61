"""The native linear cross entropy against the plain one in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.linear_cross_entropy import plain
from steptron_kernels.linear_cross_entropy.native import LinearCrossEntropy
from steptron_kernels.packed_weights import PackedWeights, Products
from tests.model.helpers import relative_error

extension.require()

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
FACTOR = 0.37


def make(tokens: int, hidden: int, vocab: int, kept: float = 1.0, scale: float = 0.3, seed: int = 0) -> Inputs:
    """h, w, labels and mask; labels of tokens that do not count lie outside the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator)
    w = scale * torch.randn(vocab, hidden, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator) < kept
    return h, w, labels.masked_fill(~mask, -(10**12)), mask


def differentiate(function: LinearCrossEntropy, inputs: Inputs, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    """Value and gradients of FACTOR times the loss."""
    h, w = (t.detach().to(dtype).requires_grad_() for t in inputs[:2])
    loss = function(h, w, *inputs[2:])
    return loss.detach(), *torch.autograd.grad(FACTOR * loss, [h, w])


def check(inputs: Inputs, tolerance: float = 1.5e-6) -> None:
    own = differentiate(LinearCrossEntropy(PackedWeights("fp32")), inputs)
    expected = differentiate(plain.linear_cross_entropy, inputs, torch.float64)
    assert own[0].shape == () and own[0].dtype is torch.float32
    assert own[0].item() == pytest.approx(expected[0].item(), rel=3e-7, abs=1e-6)
    for a, b in zip(own[1:], expected[1:], strict=True):
        assert a.shape == b.shape and relative_error(a, b) <= tolerance
    assert torch.count_nonzero(own[1][~inputs[3]]) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 130]),
    hidden=st.sampled_from([1, 2, 7, 32, 65, 130]),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 127, 513, 1030]),
    kept=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    seed=st.integers(0, 99),
)
def test_equals_the_plain_loss(tokens: int, hidden: int, vocab: int, kept: float, seed: int) -> None:
    check(make(tokens, hidden, vocab, kept, seed=seed))


@pytest.mark.parametrize("kept", [1.0, 0.8])
@pytest.mark.parametrize("tokens, hidden, vocab", [(1300, 24, 150), (700, 5, 9000), (300, 600, 700), (80, 2100, 200)])
def test_several_chunks_groups_and_depths(tokens: int, hidden: int, vocab: int, kept: float) -> None:
    """More tokens than a chunk, more panels than a group, more hidden units than a step of the depth."""
    check(make(tokens, hidden, vocab, kept, scale=1 / math.sqrt(hidden)))


def test_labels_at_the_borders_of_panels_and_groups() -> None:
    h, w, _, _ = make(12, 8, 1030)
    labels = torch.tensor([0, 63, 64, 127, 128, 511, 512, 513, 1023, 1024, 1028, 1029])
    check((h, w, labels, torch.ones(12, dtype=torch.bool)))


def test_a_strided_h_and_weight_and_mask() -> None:
    h, w, labels, mask = make(50, 33, 70, 0.7)
    wide = torch.randn(50, 80)
    wide[:, 10:43] = h
    columns = h.t().contiguous().t()
    for strided in (wide[:, 10:43], columns, h.flip(0).flip(0)):
        check((strided, w, labels, mask))
    check((h, w.t().contiguous().t(), labels, mask))
    check((h, w, torch.stack([labels, labels], 1)[:, 0], torch.stack([mask, mask], 1)[:, 0]))


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    h, w, labels, mask = make(40, 16, 600, scale=1.0)
    own = differentiate(LinearCrossEntropy(PackedWeights("fp32")), (1000 * h, w, labels, mask))
    expected = differentiate(plain.linear_cross_entropy, (1000 * h, w, labels, mask), torch.float64)
    assert own[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    assert relative_error(own[1], expected[1]) < 1e-3 and own[2].isfinite().all()


def test_a_tiny_loss_is_not_rounded_to_zero() -> None:
    """The label's logit is far above the others: log(1 + small) must keep the small."""
    w = torch.tensor([[300.0], [290.0], [280.0]])
    own, _, _ = differentiate(
        LinearCrossEntropy(PackedWeights("fp32")),
        (torch.ones(1, 1), w, torch.tensor([0]), torch.ones(1, dtype=torch.bool)),
    )
    assert own.item() == pytest.approx(math.log1p(math.exp(-10) + math.exp(-20)), rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 63, 700])
def test_a_logit_that_is_not_finite_makes_the_loss_nan(value: float, column: int) -> None:
    h, w, labels, mask = make(70, 8, 701)
    w[column, 3] = value
    loss, _, _ = differentiate(LinearCrossEntropy(PackedWeights("fp32")), (h.abs(), w, labels, mask))
    assert loss.isnan()
    with torch.no_grad():
        assert LinearCrossEntropy(PackedWeights("fp32"))(h.abs(), w, labels, mask).isnan()


def test_a_masked_token_may_hold_nan() -> None:
    """Hidden states of padding are not read."""
    h, w, labels, mask = make(40, 8, 30, 0.5)
    expected = differentiate(LinearCrossEntropy(PackedWeights("fp32")), (h, w, labels, mask))
    h[~mask] = math.nan
    for a, b in zip(
        differentiate(LinearCrossEntropy(PackedWeights("fp32")), (h, w, labels, mask)), expected, strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("label", [-1, 30])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    h, w, labels, mask = make(20, 8, 30)
    labels[7] = label
    with pytest.raises(IndexError, match=f"token 7 has label {label}, which is not in a vocabulary of 30"):
        LinearCrossEntropy(PackedWeights("fp32"))(h, w, labels, mask)


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_gradient_of_one_input_alone(products: Products) -> None:
    inputs = make(90, 20, 130, 0.8)
    function = LinearCrossEntropy(PackedWeights(products))
    _, both_h, both_w = differentiate(function, inputs)
    h, w = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    (FACTOR * function(h.detach(), w, *inputs[2:])).backward()
    assert h.grad is None and torch.equal(w.grad, both_w)
    w.grad = None
    (FACTOR * function(h, w.detach(), *inputs[2:])).backward()
    assert w.grad is None and torch.equal(h.grad, both_h)


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_evaluation_keeps_no_gradients(products: Products) -> None:
    inputs = make(90, 20, 1300, 0.8)
    packed = PackedWeights(products)
    h, w = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    with torch.no_grad():
        evaluated = LinearCrossEntropy(packed)(h, w, *inputs[2:])
    trained = LinearCrossEntropy(packed)(h, w, *inputs[2:])
    assert not evaluated.requires_grad and torch.equal(evaluated, trained.detach())


def test_a_second_differentiation_is_an_error() -> None:
    """Its gradients would be scaled twice."""
    h, w, labels, mask = make(20, 8, 30)
    loss = LinearCrossEntropy(PackedWeights("fp32"))(h.requires_grad_(), w, labels, mask)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_the_same_bits_on_one_and_two_threads(products: Products, kept: float) -> None:
    inputs = make(1100, 40, 1030, kept)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(differentiate(LinearCrossEntropy(PackedWeights(products)), inputs))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_leaving_masked_tokens_out_changes_no_bit() -> None:
    h, w, labels, mask = make(700, 24, 200, 0.6)
    function = LinearCrossEntropy(PackedWeights("fp32"))
    masked = differentiate(function, (h, w, labels, mask))
    everything = torch.ones(int(mask.sum()), dtype=torch.bool)
    left_out = differentiate(function, (h[mask], w, labels[mask], everything))
    assert torch.equal(masked[0], left_out[0]) and torch.equal(masked[2], left_out[2])
    assert torch.equal(masked[1][mask], left_out[1])


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([1, 17, 64, 130, 600]),
    hidden=st.sampled_from([1, 7, 32, 65]),
    vocab=st.sampled_from([1, 2, 63, 65, 129, 515]),
    kept=st.sampled_from([1.0, 0.6]),
)
def test_bf16_operands_with_exact_sums(tokens: int, hidden: int, vocab: int, kept: float) -> None:
    """h, W and the gradients of the logits are rounded; logits, softmax, sums and the scaling are not."""
    h, w, labels, mask = make(tokens, hidden, vocab, kept, seed=tokens)
    loss, grad_h, grad_w = differentiate(LinearCrossEntropy(PackedWeights("bf16")), (h, w, labels, mask))
    h64, w64 = rounded(h), rounded(w)
    logits = h64 @ w64.t()
    one_hot = torch.nn.functional.one_hot(labels.masked_fill(~mask, 0), vocab)
    counts = mask.double().unsqueeze(1)
    expected = ((logits.logsumexp(dim=1, keepdim=True) - (logits * one_hot).sum(dim=1, keepdim=True)) * counts).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    exact = (logits.softmax(dim=1) - one_hot) * counts
    # A gradient within rounding of a border between two bf16 numbers may fall to the other side: 1e-4 allows for few.
    assert relative_error(grad_h, FACTOR * rounded(exact) @ w64) < 1e-4
    assert relative_error(grad_w, FACTOR * rounded(exact).t() @ h64) < 1e-4


def test_the_weight_that_changed_is_packed_anew() -> None:
    h, w, labels, mask = make(30, 8, 40)
    function = LinearCrossEntropy(PackedWeights("bf16"))
    first = differentiate(function, (h, w, labels, mask))
    leaf = w.clone().requires_grad_()
    before = function(h, leaf, labels, mask)
    with torch.no_grad():
        leaf.mul_(2.0)
    after = function(h, leaf, labels, mask)
    assert torch.equal(before.detach(), first[0])
    assert torch.equal(after.detach(), differentiate(function, (h, 2.0 * w, labels, mask))[0])


def resident(field: str) -> int:
    """Bytes of this process's memory, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_memory_of_a_large_vocabulary_is_bounded() -> None:
    """Logits of 256 tokens at a time, however many there are."""
    tokens, vocab = 2048, 60_000
    inputs = make(tokens, 2, vocab)
    function = LinearCrossEntropy(PackedWeights("fp32"))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    differentiate(function, inputs)
    assert resident("VmHWM") - before < 1.5 * 4 * 256 * vocab + (8 << 20)
