"""The element-wise building blocks of the C++ sources, compiled alone: exp, sigmoid, sums, rows of SwiGLU."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import steptron_kernels
from steptron_kernels.swiglu.plain import swiglu
from tests.kernels.against_plain import random

Floats = npt.NDArray[np.float32]

SOURCE = """
#include "swiglu.h"
using namespace steptron;
extern "C" {
void exp_all(int64_t n, const float* x, float* y) { for (int64_t j = 0; j < n; ++j) y[j] = exp_of(x[j]); }
void sigmoid_all(int64_t n, const float* x, float* y) { for (int64_t j = 0; j < n; ++j) y[j] = sigmoid_of(x[j]); }
float sum_all(int64_t n, const float* x) { return sum_over(n, [&](int64_t j) { return x[j]; }); }
void row(int64_t f, const float* gate, const float* up, float limit, bool after, float weight, float* hidden) {
  swiglu_row(f, gate, up, limit, after, weight, hidden);
}
float row_backward(int64_t f, const float* gate, const float* up, float limit, bool after, float weight,
                   const float* d_hidden, float* d_gate, float* d_up, float* hidden) {
  return swiglu_row_backward(f, gate, up, limit, after, weight, d_hidden, d_gate, d_up, hidden);
}
}
"""
# As the library is built, and as a compiler does it that does not vectorise or fuse anything.
BUILDS = {
    "native": ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"],
    "scalar": ["-O1", "-ffp-contract=off"],
}


@pytest.fixture(scope="module", params=list(BUILDS))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("simd")
    (folder / "simd.cpp").write_text(SOURCE)
    headers = Path(steptron_kernels.__file__).parent / "csrc"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", f"-I{headers}", *BUILDS[request.param]]
    subprocess.run([*command, "simd.cpp", "-o", "simd.so"], cwd=folder, check=True, timeout=120)
    built = ctypes.CDLL(str(folder / "simd.so"))
    built.sum_all.restype = built.row_backward.restype = ctypes.c_float
    return built


def pointer(x: Floats | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.ctypes.data)


def apply(function: ctypes._CFuncPtr, x: Floats) -> Floats:
    y = np.empty_like(x)
    function(ctypes.c_int64(x.size), pointer(x), pointer(y))
    return y


@pytest.fixture(scope="module")
def every_kind_of_float() -> Floats:
    """Every 997th float of all, both infinities, and every float around the places where exp changes its ways."""
    bits = np.arange(0, 2**32, 997, dtype=np.uint64).astype(np.uint32)
    numbers = bits.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    edges = [
        (np.float32(v).view(np.uint32) + np.arange(-2000, 2000)).astype(np.uint32).view(np.float32)
        for v in (-87.336544, -86.643397, 88.376266, 88.722839, -0.34657359, 0.34657359)
    ]
    return np.concatenate([numbers, *edges, np.float32([np.inf, -np.inf, 0.0, -0.0])])


def ulps(actual: Floats, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distance in units of the last place of a float at the exact value."""
    return np.abs(actual - exact) / np.exp2(np.floor(np.log2(exact)) - 23)


SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def test_exp(library: ctypes.CDLL, every_kind_of_float: Floats) -> None:
    x = every_kind_of_float
    y = apply(library.exp_all, x)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
    normal = (exact >= SMALLEST * (1 + 1e-6)) & (exact <= LARGEST * (1 - 1e-6))
    assert ulps(y[normal], exact[normal]).max() < 1.1
    assert (y[exact < SMALLEST * (1 - 1e-6)] == 0).all()
    assert np.isposinf(y[exact > LARGEST * (1 + 1e-6)]).all()
    # At the edges themselves: 0 or the smallest normal number, the largest or infinity.
    low, high = (np.abs(exact - edge) <= 1e-6 * edge for edge in (SMALLEST, LARGEST))
    assert ((y[low] == 0) | (y[low] > SMALLEST * (1 - 1e-6))).all()
    assert (y[high] > LARGEST * (1 - 1e-6)).all()


def test_sigmoid(library: ctypes.CDLL, every_kind_of_float: Floats) -> None:
    x = every_kind_of_float
    y = apply(library.sigmoid_all, x)
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    normal = exact >= SMALLEST
    assert ulps(y[normal], exact[normal]).max() < 2.6
    assert (np.abs(y[~normal] - exact[~normal]) < SMALLEST).all()
    assert ((y >= 0) & (y <= 1)).all()


@pytest.mark.parametrize("name", ["exp_all", "sigmoid_all"])
def test_nan_stays_nan(library: ctypes.CDLL, name: str) -> None:
    payloads = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF] * 20, dtype=np.uint32)
    assert np.isnan(apply(getattr(library, name), payloads.view(np.float32))).all()


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 4099])
def test_sum(library: ctypes.CDLL, n: int) -> None:
    def total(x: Floats) -> float:
        return float(library.sum_all(ctypes.c_int64(n), pointer(x)))

    integers = np.arange(1, n + 1, dtype=np.float32)
    assert total(integers) == n * (n + 1) / 2  # exact: every element counts once
    x = random(n).numpy()
    assert total(x) == pytest.approx(float(x.astype(np.float64).sum()), abs=1e-6 * math.sqrt(n))


@pytest.mark.parametrize("limit, after", [(math.inf, True), (1.0, True), (1.0, False)])
@pytest.mark.parametrize("f", [0, 1, 15, 16, 80, 83])
def test_weighted_rows_of_swiglu(library: ctypes.CDLL, f: int, limit: float, after: bool) -> None:
    gate_up, d_hidden, weight = 2 * random(2 * f), random(f, seed=1), 0.7
    leaves = [gate_up.double().requires_grad_(), torch.tensor(weight, dtype=torch.float64, requires_grad=True)]
    expected = swiglu(leaves[0], None if math.isinf(limit) else limit, after) * leaves[1]
    d_gate_up, d_weight = torch.autograd.grad(expected, leaves, d_hidden.double())

    gate, up, d = gate_up[:f].numpy().copy(), gate_up[f:].numpy().copy(), d_hidden.numpy()
    hidden, again, d_gate, d_up = (np.full(f, np.nan, dtype=np.float32) for _ in range(4))
    head = (ctypes.c_int64(f), pointer(gate), pointer(up), ctypes.c_float(limit), after, ctypes.c_float(weight))
    library.row(*head, pointer(hidden))
    own_d_weight = library.row_backward(*head, pointer(d), pointer(d_gate), pointer(d_up), pointer(again))

    close = dict(rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(hidden, expected.detach().numpy(), **close)
    np.testing.assert_allclose(np.concatenate([d_gate, d_up]), d_gate_up.numpy(), **close)
    assert own_d_weight == pytest.approx(float(d_weight), rel=1e-6, abs=1e-5)
    assert np.array_equal(hidden, again)

    # In place, and without the hidden row.
    assert library.row_backward(*head, pointer(d), pointer(gate), pointer(up), None) == own_d_weight
    assert np.array_equal(gate, d_gate) and np.array_equal(up, d_up)
