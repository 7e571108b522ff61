"""The native linear product against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron_kernels import extension
from steptron_kernels.linear.native import Linear
from steptron_kernels.packed_weights import PackedWeights, Products, weights_changed
from tests.model.helpers import relative_error

extension.require()


def run(products: Products, x: torch.Tensor, weight: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.float().detach().requires_grad_() for t in (x, weight)]
    y = Linear(PackedWeights(products))(*leaves)
    return [y, *torch.autograd.grad(y, leaves, direction.float())]


def reference(x: torch.Tensor, weight: torch.Tensor, direction: torch.Tensor, bf16: bool) -> list[torch.Tensor]:
    """Exact sums over operands that are rounded first, if asked for."""

    def r(t: torch.Tensor) -> torch.Tensor:
        return t.float().bfloat16().double() if bf16 else t

    dy = direction.flatten(0, -2)
    return [r(x) @ r(weight).t(), r(direction) @ r(weight), r(dy).t() @ r(x).flatten(0, -2)]


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


PRODUCTS: list[Products] = ["fp32"] + (["bf16"] if extension.has_fast_bf16() else [])


@pytest.mark.parametrize("products", PRODUCTS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(0, 200), inputs=st.integers(1, 150), outputs=st.integers(1, 150))
def test_values_and_gradients(products: Products, rows: int, inputs: int, outputs: int) -> None:
    x, weight, direction = random((rows, inputs), 1), random((outputs, inputs), 2), random((rows, outputs), 3)
    own = run(products, x, weight, direction)
    for a, b in zip(own, reference(x, weight, direction, products == "bf16"), strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 1e-6


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("rows, inputs, outputs", [(2500, 70, 130), (3, 1100, 2), (64, 512, 513)])
def test_sizes_beyond_one_block(products: Products, rows: int, inputs: int, outputs: int) -> None:
    """More rows, depth or columns than a product takes in one step."""
    x, weight, direction = random((rows, inputs), 1), random((outputs, inputs), 2), random((rows, outputs), 3)
    own = run(products, x, weight, direction)
    for a, b in zip(own, reference(x, weight, direction, products == "bf16"), strict=True):
        assert relative_error(a, b) < 1e-6


def test_leading_dimensions_and_strides() -> None:
    wide = random((5, 7, 40), 1)
    x, weight, direction = wide[..., 4:36], random((9, 32), 2), random((7, 9, 5), 3).permute(2, 0, 1)
    own = run("fp32", x, weight, direction)
    for a, b in zip(own, reference(x, weight, direction, False), strict=True):
        assert relative_error(a, b) < 1e-6


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    linear = Linear(PackedWeights("fp32"))
    x, weight = torch.randn(5, 8), torch.randn(3, 8)
    linear(x, weight.clone().requires_grad_()).sum().backward()
    leaf = x.clone().requires_grad_()
    linear(leaf, weight).sum().backward()
    assert leaf.grad is not None and relative_error(leaf.grad, weight.sum(0).double().expand(5, 8)) < 1e-6


@pytest.mark.parametrize("products", PRODUCTS)
def test_threads_change_no_bit(products: Products) -> None:
    x, weight, direction = random((1500, 70), 1), random((300, 70), 2), random((1500, 300), 3)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run(products, x, weight, direction))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("products", PRODUCTS)
def test_a_row_does_not_depend_on_its_neighbours(products: Products) -> None:
    x, weight = random((100, 64), 1).float(), random((70, 64), 2).float()
    linear = Linear(PackedWeights(products))
    assert torch.equal(linear(x, weight)[37:41], linear(x[37:41], weight))


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_come_through(products: Products, value: float) -> None:
    x, weight = torch.ones(70, 33), torch.ones(5, 33)
    x[66, 32] = value
    y = Linear(PackedWeights(products))(x, weight)
    assert not y[66].isfinite().any() and y[:66].isfinite().all() and y[67:].isfinite().all()


def test_bf16_rounds_to_nearest_even() -> None:
    if "bf16" not in PRODUCTS:
        pytest.skip("this processor has no bfloat16 products")
    one_plus = 1 + torch.tensor([2**-9, 2**-8, 3 * 2**-8, 2**-8 + 2**-20])  # ties go to the even neighbour
    y = Linear(PackedWeights("bf16"))(one_plus[:, None], torch.ones(1, 1))
    assert y.flatten().tolist() == one_plus.bfloat16().float().tolist()


def test_weights_are_packed_once_per_change() -> None:
    packed = PackedWeights("fp32")
    weight = torch.nn.Parameter(torch.randn(6, 4))
    first = packed.transposed(weight)
    assert packed.transposed(weight) is first
    with torch.no_grad():
        weight.add_(1.0)
    second = packed.transposed(weight)
    assert second is not first and not torch.equal(first, second)


def test_a_new_storage_and_what_the_counter_does_not_see() -> None:
    packed = PackedWeights("fp32")
    linear, x = Linear(packed), torch.ones(1, 4)
    weight = torch.nn.Parameter(torch.ones(2, 4))
    assert linear(x, weight).tolist() == [[4.0, 4.0]]
    weight.data = torch.full((2, 4), 2.0)
    assert linear(x, weight).tolist() == [[8.0, 8.0]]
    weight.data.mul_(2.0)  # behind the counter's back
    weights_changed([weight])
    assert linear(x, weight).tolist() == [[16.0, 16.0]]


def test_weights_without_a_version_are_not_cached() -> None:
    with torch.inference_mode():
        weight = torch.ones(2, 4)
        linear = Linear(PackedWeights("fp32"))
        assert linear(torch.ones(1, 4), weight).tolist() == [[4.0, 4.0]]
        weight.mul_(2.0)
        assert linear(torch.ones(1, 4), weight).tolist() == [[8.0, 8.0]]


@pytest.mark.parametrize("columns", [4, 100])
def test_misfits_are_refused(columns: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit the weight \(3, 8\)"):
        Linear(PackedWeights("fp32"))(torch.ones(5, columns), torch.ones(3, 8))
    ops = torch.ops.steptron_kernels
    with pytest.raises(RuntimeError, match="x: expected"):
        ops.linear(torch.ones(5, columns), ops.pack_weight(torch.ones(3, 8), True, False), 8, 3)
    with pytest.raises(RuntimeError, match="packed: not a matrix"):
        ops.linear(torch.ones(5, 9), ops.pack_weight(torch.ones(3, 8), True, False), 9, 3)
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.linear_plain(torch.ones(5, columns), torch.ones(8, 3))
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.linear_weight_gradient(torch.ones(4, 3), torch.ones(5, 8), False)


@pytest.mark.parametrize("products", PRODUCTS)
def test_a_sum_of_nothing_is_zero(products: Products) -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.empty(0, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(Linear(PackedWeights(products))(x, weight), [x], torch.empty(5, 0))
    assert torch.count_nonzero(dx) == 0


def test_transposed_operands() -> None:
    x, weight, direction = random((32, 7), 1).t(), random((32, 9), 2).t(), random((7, 9), 3)
    own = run("fp32", x, weight, direction)
    for a, b in zip(own, reference(x, weight, direction, False), strict=True):
        assert relative_error(a, b) < 1e-6
