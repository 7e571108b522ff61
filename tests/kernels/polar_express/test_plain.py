"""Polar Express: the definition against other arithmetic, and what both versions make of degenerate matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.polar_express.choose import PolarExpress, choose
from steptron_kernels.polar_express.coefficients import TABLE, polar_express_rows
from steptron_kernels.polar_express.native import polar_express as native
from steptron_kernels.polar_express.plain import polar_express as plain

extension.require()

SIX = polar_express_rows(6)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("version", [plain, native], ids=["plain", "native"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 1, 5)])
def test_float64_against_numpy(shape: tuple[int, int, int]) -> None:
    m_NRC = normal(*shape).double()
    o_NRC, largest_N = plain(m_NRC, SIX, torch.float64)
    for m_RC, o_RC, largest in zip(m_NRC.numpy(), o_NRC.numpy(), largest_N.tolist(), strict=True):
        x = m_RC / (1.01 * np.sqrt((m_RC**2).sum()) + 1e-7)
        x = x.T if shape[1] > shape[2] else x
        seen = [np.abs(x).max()]
        for a, b, c in SIX:
            gram = x @ x.T
            polynomial = b * gram + c * gram @ gram
            x = a * x + polynomial @ x
            seen += [np.abs(t).max() for t in (gram, polynomial, x)]
        np.testing.assert_allclose(o_RC, x.T if shape[1] > shape[2] else x, rtol=0, atol=1e-12)
        assert largest == pytest.approx(max(seen), rel=1e-6)


@pytest.mark.parametrize("shape", [(20, 4, 6), (3, 24, 40)])
def test_float16_against_torchs_own(shape: tuple[int, int, int]) -> None:
    """Products of float16 tensors, which torch sums in float32: a step at a time, within a unit in the last place."""
    m_NRC = normal(*shape)
    for steps in range(1, 7):
        before = plain(m_NRC, SIX[: steps - 1], torch.float16)[0].half()
        a, b, c = SIX[steps - 1]
        gram = torch.bmm(before, before.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        expected = torch.baddbmm(before, polynomial, before, beta=a)
        after = plain(m_NRC, SIX[:steps], torch.float16)[0].half()
        unit = expected.abs().max() * torch.finfo(torch.float16).eps
        assert (after - expected).abs().max() <= unit
        assert (after == expected).float().mean() >= 0.9


def test_sums_on_cuda_are_float32_throughout_and_settings_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    seen = []
    product = torch.bmm

    def watched(*args: torch.Tensor) -> torch.Tensor:
        seen.append([getattr(matmul, name) for name in names])
        return product(*args)

    monkeypatch.setattr(torch, "bmm", watched)
    before = [getattr(matmul, name) for name in names]
    plain(normal(2, 4, 6), SIX, torch.float16)
    assert seen == [[False, False, False]] * 6
    assert [getattr(matmul, name) for name in names] == before


@both
@each_dtype
def test_zero_stays_zero(version: PolarExpress, dtype: torch.dtype) -> None:
    o_NRC, largest_N = version(torch.zeros(2, 70, 90), SIX, dtype)
    assert not o_NRC.any() and not largest_N.any()


@both
@each_dtype
def test_no_matrices(version: PolarExpress, dtype: torch.dtype) -> None:
    o_NRC, largest_N = version(torch.zeros(0, 7, 9), SIX, dtype)
    assert o_NRC.shape == (0, 7, 9) and largest_N.shape == (0,)


@both
@each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [(), SIX], ids=["no steps", "six"])
def test_what_is_not_finite_stays_with_its_matrix(
    version: PolarExpress, dtype: torch.dtype, value: float, rows: tuple[tuple[float, float, float], ...]
) -> None:
    for shape in [(4, 40, 70), (4, 70, 40)]:
        m_NRC = normal(*shape)
        clean_NRC, clean_N = version(m_NRC, rows, dtype)
        m_NRC[2, 39, 3] = value
        o_NRC, largest_N = version(m_NRC, rows, dtype)
        others = [0, 1, 3]
        assert o_NRC[2].isnan().all() and largest_N[2].isnan()
        assert torch.equal(o_NRC[others], clean_NRC[others]) and torch.equal(largest_N[others], clean_N[others])


@both
@each_dtype
@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-12, 1.0, 1e30, 3.4e38])
def test_every_scale_is_finite(version: PolarExpress, dtype: torch.dtype, scale: float) -> None:
    for shape in [(2, 1, 1), (2, 1, 50), (2, 50, 1), (2, 30, 50), (2, 50, 30)]:
        signs = normal(*shape).sign()
        for m_NRC in (signs * scale, torch.ones(shape) * scale, normal(*shape).clamp(-1, 1) * scale):
            o_NRC, largest_N = version(m_NRC, SIX, dtype)
            assert o_NRC.isfinite().all() and largest_N.isfinite().all()


@both
@each_dtype
@pytest.mark.parametrize("shape", [(2, 1, 50), (2, 50, 1), (2, 30, 50)])
def test_rank_one(version: PolarExpress, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """All its norm is one singular value, which becomes the scalar recurrence's, near 1."""
    for scale in (1e-3, 1.0, 3.4e38):
        m_NRC = normal(shape[0], shape[1], 1).sign() * normal(shape[0], 1, shape[2]).sign() * scale
        o_NRC = version(m_NRC, SIX, dtype)[0]
        singular = torch.linalg.svdvals(o_NRC)
        assert singular[:, 0].sub(1).abs().max() <= (0.02 if dtype is torch.bfloat16 else 0.007)
        # Beside it there is what rounding puts there, which the steps enlarge.
        assert torch.equal(o_NRC.sign(), m_NRC.sign())


@both
@each_dtype
def test_scaling_changes_little(version: PolarExpress, dtype: torch.dtype) -> None:
    """A power of two changes nothing where 1e-7 is nothing beside the norm, whatever overflows on the way."""
    m_NRC = normal(2, 30, 50)
    reference = version(m_NRC * 2.0**30, SIX, dtype)[0]
    for exponent in (60, 99, 101, 125):
        assert torch.equal(version(m_NRC * 2.0**exponent, SIX, dtype)[0], reference)


def test_huge_float64() -> None:
    o_NRC, _ = plain(normal(2, 3, 5).double() * 1e300, SIX, torch.float64)
    reference, _ = plain(normal(2, 3, 5).double() * 1e30, SIX, torch.float64)
    torch.testing.assert_close(o_NRC, reference, rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize(
    "m, dtype, message",
    [
        (torch.ones(2, 3), torch.float32, r"\[N, R, C\] of at least one element, got \[2, 3\]"),
        (torch.ones(2, 0, 3), torch.float32, "at least one element"),
        (torch.ones(2, 3, 3).half(), torch.float16, "takes float32 or float64 matrices, got torch.float16"),
        (torch.ones(2, 3, 3), torch.float64, "torch.float32 matrices cannot compute in torch.float64"),
        (torch.ones(2, 3, 3), torch.int32, "cannot compute in torch.int32"),
    ],
)
def test_bad_arguments_are_refused(version: PolarExpress, m: Tensor, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        version(m, SIX, dtype)


def test_rows_need_a_step_and_end_with_the_last_one_again() -> None:
    for steps in (0, -1):
        with pytest.raises(ValueError, match="at least 1 step"):
            polar_express_rows(steps)
    assert [len(polar_express_rows(steps)) for steps in (1, 7, 8, 12)] == [1, 7, 8, 12]
    assert polar_express_rows(12)[7:] == (TABLE[-1],) * 5


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose(cpu, native=True) is native
    assert choose(cpu, native=False) is plain
    assert choose(torch.device("meta"), native=True) is plain
    monkeypatch.setattr(extension, "why_unavailable", lambda: "not built")
    assert choose(cpu, native=True) is plain
