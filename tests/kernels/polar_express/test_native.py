"""The native Polar Express against the plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.polar_express.coefficients import Row, polar_express_rows
from steptron_kernels.polar_express.native import polar_express as native
from steptron_kernels.polar_express.plain import polar_express as plain
from tests.kernels.against_plain import threads

extension.require()

FORMATS = [torch.float32, torch.float16, torch.bfloat16, "bfloat16 in float32"]
"""The last one is bfloat16 on processors without its instructions."""
ONE, SIX = polar_express_rows(1), polar_express_rows(6)


@pytest.fixture(params=FORMATS, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if isinstance(request.param, torch.dtype):
        return request.param
    monkeypatch.setattr(extension, "has_fast_bf16", lambda: False)
    return torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(x: Tensor, y: Tensor) -> float:
    """Relative, by the Frobenius norm over the whole batch."""
    return float((x - y).norm() / y.norm())


STEP = {torch.float32: 4e-6, torch.float16: 3e-4, torch.bfloat16: 2e-3}
"""How far apart one step may be: in half precision well below its rounding. Differently ordered sums put a few entries
on the other side of a rounding boundary, and in float32 aX and B X may cancel; measured 1.5e-6, 1.2e-4, 2e-4."""


@pytest.mark.parametrize("exact", FORMATS, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(1, 4), r=st.integers(1, 150), c=st.integers(1, 150), seed=st.integers(0, 1000))
def test_one_step_is_the_plain_one(exact: torch.dtype | str, n: int, r: int, c: int, seed: int) -> None:
    dtype, in_bf16 = (exact, True) if isinstance(exact, torch.dtype) else (torch.bfloat16, False)
    m_NRC = normal(n, r, c, seed=seed)
    o_NRC, largest_N = torch.ops.steptron_kernels.polar_express(m_NRC, list(ONE[0]), dtype, in_bf16)
    expected_NRC, expected_N = plain(m_NRC, ONE, dtype)
    assert o_NRC.shape == m_NRC.shape and o_NRC.dtype is torch.float32
    assert distance(o_NRC, expected_NRC) <= STEP[dtype]
    assert largest_N.dtype is torch.float32
    torch.testing.assert_close(largest_N, expected_N, rtol=max(2e-6, torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("shape", [(1, 720, 1500), (1, 700, 530), (2, 130, 1100), (3, 64, 512), (2, 513, 513)])
def test_sizes_beyond_one_block(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """More rows, depth or columns than are taken at once."""
    m_NRC = normal(*shape)
    o_NRC, largest_N = native(m_NRC, ONE, dtype)
    expected_NRC, expected_N = plain(m_NRC, ONE, dtype)
    assert distance(o_NRC, expected_NRC) <= STEP[dtype] / 4
    torch.testing.assert_close(largest_N, expected_N, rtol=max(2e-6, torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("shape", [(4, 40, 90), (3, 128, 70), (2, 200, 200)])
def test_six_steps(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """What one step's rounding has grown to: measured 2e-6, 1e-3, 7e-3."""
    m_NRC = normal(*shape)
    bound = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    (o_NRC, largest_N), (expected_NRC, expected_N) = native(m_NRC, SIX, dtype), plain(m_NRC, SIX, dtype)
    assert distance(o_NRC, expected_NRC) <= bound
    torch.testing.assert_close(largest_N, expected_N, rtol=bound, atol=0)


@pytest.mark.parametrize("shape", [(300, 2, 3), (300, 3, 2), (300, 3, 5)])
def test_small_matrices_are_bit_equal(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Sums of a few products of half precision hardly round in float32, so a rounding more or less would show."""
    if dtype is torch.float32:
        return
    m_NRC = normal(*shape)
    o_NRC, expected_NRC = native(m_NRC, SIX, dtype)[0], plain(m_NRC, SIX, dtype)[0]
    assert float((o_NRC == expected_NRC).flatten(1).all(dim=1).float().mean()) >= 0.9


def unit_divisor(values: Tensor) -> Tensor:
    """[1, 1, K]: the values and one more, so that 1.01 ||M||_F + 1e-7 = 1 and X is M."""
    largest = math.sqrt(((1 - 1e-7) / 1.01) ** 2 - float(values.double().square().sum()))
    return torch.cat([values, torch.tensor([largest])])[None, None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    """Ties and their neighbours, at every exponent of float16 with its subnormal numbers and zeros."""
    digits = 10 if dtype is torch.float16 else 7
    mantissas = 1 + (torch.tensor([0, 1, 2, 3, 2**digits - 1]) + 0.5) / 2**digits
    ties = torch.cat([mantissas * 2.0**exponent for exponent in range(-27, -4)])
    quanta = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 3.5, 1022.5, 1023.5]) * 2.0**-24
    values = torch.cat([ties, quanta])
    values = torch.cat([values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(1.0))])
    m_11K = unit_divisor(torch.cat([values, -values]))
    for version in (native, plain):
        assert torch.equal(version(m_11K, (), dtype)[0], m_11K.to(dtype).float())


def test_threads_and_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    """Alone a matrix is cut, among others it is not; tall and wide alike."""
    for shape in [(5, 70, 200), (5, 200, 70), (1, 530, 560)]:
        m_NRC = normal(*shape)
        results = []
        for count in (1, 2, 3):
            with threads(count):
                o_NRC, largest_N = native(m_NRC, ONE, dtype)
                alone = [native(m_1RC, ONE, dtype) for m_1RC in m_NRC.split(1)]
            assert torch.equal(o_NRC, torch.cat([o for o, _ in alone]))
            assert torch.equal(largest_N, torch.cat([largest for _, largest in alone]))
            results.append((o_NRC, largest_N))
        for o_NRC, largest_N in results[1:]:
            assert torch.equal(o_NRC, results[0][0]) and torch.equal(largest_N, results[0][1])


def test_tall_is_wide_transposed(dtype: torch.dtype) -> None:
    m_NRC = normal(3, 37, 90)
    o_NRC, largest_N = native(m_NRC, SIX, dtype)
    o_NCR, transposed_N = native(m_NRC.mT.contiguous(), SIX, dtype)
    assert torch.equal(o_NRC, o_NCR.mT) and torch.equal(largest_N, transposed_N)


def test_strides(dtype: torch.dtype) -> None:
    wide = normal(4, 60, 160)
    for m_NRC in (wide.mT, wide[::2, 3:50:2, 5:90], wide[:1].expand(3, -1, -1), wide[..., ::3], wide[:, :, 7:8]):
        o_NRC, largest_N = native(m_NRC, SIX, dtype)
        expected_NRC, expected_N = native(m_NRC.contiguous(), SIX, dtype)
        assert torch.equal(o_NRC, expected_NRC) and torch.equal(largest_N, expected_N)


@pytest.mark.parametrize("rows", [(), ((1.0, 50.0, 0.0),), ((90.0, 0.0, 0.0),), ((1e-3, 0.0, 0.0),)], ids=str)
def test_largest_is_of_all_intermediates(dtype: torch.dtype, rows: Sequence[Row]) -> None:
    """By turns of the first X, of B, of the last X, and of A or the first X."""
    m_NRC = normal(3, 70, 100)
    m_NRC[0, 66, 99] = 80.0
    largest_N, expected_N = native(m_NRC, rows, dtype)[1], plain(m_NRC, rows, dtype)[1]
    torch.testing.assert_close(largest_N, expected_N, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes float32 matrices, got torch\.float64"):
        native(torch.ones(1, 2, 3, dtype=torch.float64), ONE, torch.float32)
