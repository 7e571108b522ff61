"""The orthogonalisation against singular values and the paper's recurrence, and against torch's own Muon."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.optim import _muon

from steptron_kernels.polar_express import plain
from steptron_kernels.polar_express.choose import PolarExpress, choose
from steptron_kernels.polar_express.coefficients import polar_express_rows
from tests.optim import polar_reference as reference
from tests.optim.polar_reference import Array, Row

VERSIONS = {"plain": plain.polar_express, "chosen": choose(torch.device("cpu"), native=True)}
TORCH_TRIPLE = (3.4445, -4.7750, 2.0315)
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> PolarExpress:
    return VERSIONS[request.param]


def orthogonalise(
    version: PolarExpress, m_RC: Array, rows: list[Row], dtype: torch.dtype = torch.float64
) -> tuple[Array, float]:
    """The result and the largest intermediate of one matrix; computed on float64 tensors where asked for."""
    given = torch.from_numpy(m_RC).to(torch.float64 if dtype is torch.float64 else torch.float32)
    o_1RC, largest_1 = version(given[None], rows, dtype)
    return o_1RC[0].double().numpy(), largest_1.item()


def ours(m_RC: Array, steps: int = 6) -> Array:
    return orthogonalise(plain.polar_express, m_RC, list(polar_express_rows(steps)))[0]


def distance(x: Array, y: Array) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize("steps", [1, 5, 6, 7, 8, 10])
def test_rows_are_the_papers_with_its_safety_factor(steps: int) -> None:
    np.testing.assert_allclose(polar_express_rows(steps), reference.rows_of(steps), rtol=1e-15, atol=0)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_each_step_is_the_papers(shape: tuple[int, int]) -> None:
    m_RC = np.random.default_rng(1).standard_normal(shape)
    x_RC = m_RC / reference.divisor(m_RC)
    for steps, row in enumerate(reference.rows_of(10), start=1):
        before, x_RC = x_RC, reference.step(x_RC, row)
        found = ours(m_RC, steps)
        assert distance(found, x_RC) < 1e-13
        assert distance(found, before) > 1e-3 or steps > 6  # a step that is left out would show


@pytest.mark.parametrize("steps", [5, 6, 7, 8, 10])
def test_float32_follows_the_recurrence(version: PolarExpress, steps: int) -> None:
    m_RC, _, _ = reference.with_spectrum(np.geomspace(1, 1e-2, 48), columns=80)
    rows = reference.rows_of(steps)
    found, _ = orthogonalise(version, m_RC, rows, torch.float32)
    assert distance(found, reference.iterate(m_RC / reference.divisor(m_RC), rows)) < 5e-6


def decades() -> tuple[Array, Array, Array, Array]:
    """Singular values over seven decades, half of them below what six steps reach: (matrix, U, V, sigma)."""
    sigma_K = np.geomspace(1.0, 1e-7, 64)
    return (*reference.with_spectrum(sigma_K, columns=96), sigma_K)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)])
def test_singular_values_and_vectors(version: PolarExpress, dtype: torch.dtype, tolerance: float) -> None:
    if dtype is torch.float64:
        version = plain.polar_express
    m_RC, u_RK, v_CK, sigma_K = decades()
    found_RC, _ = orthogonalise(version, m_RC, list(polar_express_rows(6)), dtype)
    in_place_KK = u_RK.T @ found_RC @ v_CK  # diagonal if singular vectors are kept
    normalised_K = sigma_K / reference.divisor(m_RC)
    np.testing.assert_allclose(
        in_place_KK, np.diag(reference.scalars(normalised_K, reference.rows_of(6))), rtol=0, atol=tolerance
    )
    reached = normalised_K >= 1e-3
    assert 10 < reached.sum() < 50
    assert in_place_KK.diagonal()[reached].min() > 0.99 and in_place_KK.diagonal()[reached].max() < 1.002
    assert in_place_KK.diagonal()[~reached][-1] < 0.01  # far below, nothing is made orthogonal


def test_every_singular_value_from_a_thousandth_on_is_reached() -> None:
    """A diagonal matrix each of whose entries is a singular value: a dense scan of the interval."""
    sigma_K = np.geomspace(1e-3, 0.99, 400)
    results = []
    for part in sigma_K.reshape(-1, 8):
        # The first entry fills the norm up, so that the others are what they are after division by it.
        rest = math.sqrt(max(1 / reference.SAFETY**2 - float(np.sum(part[:1] ** 2)), 0.0))
        for value in part:
            fill = math.sqrt(1 / reference.SAFETY**2 - value**2) if value < 0.99 else rest
            results.append(ours(np.diag([value, fill]))[0, 0])
    assert min(results) > 0.99 and max(results) < 1.002
    assert min(results) < 0.995  # the paper's polynomials, not ones that converge further


def test_the_result_is_the_polar_factor_where_the_matrix_is_well_conditioned(version: PolarExpress) -> None:
    m_RC = np.random.default_rng(3).standard_normal((48, 128))
    for steps, bound in ((6, 7e-3), (8, 2e-6)):
        found, _ = orthogonalise(version, m_RC, list(polar_express_rows(steps)), torch.float32)
        assert distance(found, reference.polar_factor(m_RC)) < bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tall_is_wide_transposed(version: PolarExpress, dtype: torch.dtype) -> None:
    m_NRC = torch.randn(3, 40, 72, generator=torch.Generator().manual_seed(0))
    rows = polar_express_rows(6)
    wide, wide_largest = version(m_NRC, rows, dtype)
    tall, tall_largest = version(m_NRC.mT.contiguous(), rows, dtype)
    assert torch.equal(tall, wide.mT) and torch.equal(tall_largest, wide_largest)


def test_orthogonality_of_an_ill_conditioned_matrix(version: PolarExpress) -> None:
    """256 x 1280, singular values over two and a half decades, the smallest at 1e-3 of the divisor."""
    m_RC, _, _ = reference.with_spectrum(np.geomspace(1.0, 10**-2.2, 256), columns=1280)
    normalised_K = np.geomspace(1.0, 10**-2.2, 256) / reference.divisor(m_RC)
    assert 8e-4 < normalised_K.min() < 2e-3
    exact = math.sqrt(np.mean((reference.scalars(normalised_K, reference.rows_of(6)) ** 2 - 1) ** 2))
    errors = {
        dtype: reference.orthogonality_error(orthogonalise(version, m_RC, reference.rows_of(6), dtype)[0])
        for dtype in UNITS
    }
    assert errors[torch.float32] == pytest.approx(exact, rel=1e-3)
    assert exact < errors[torch.float16] < 1.15 * exact
    assert 1.8 * exact < errors[torch.bfloat16] < 4 * exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_the_recurrence(version: PolarExpress, dtype: torch.dtype) -> None:
    """A random matrix: errors of a few units of rounding, and of less than one in what is not rounded enough."""
    m_RC = np.random.default_rng(5).standard_normal((64, 192))
    exact = reference.iterate(m_RC / reference.divisor(m_RC), reference.rows_of(6))
    error = distance(orthogonalise(version, m_RC, reference.rows_of(6), dtype)[0], exact)
    assert 0.25 * UNITS[dtype] < error < 4 * UNITS[dtype]


def test_bfloat16_can_explode_where_float16_does_not(version: PolarExpress) -> None:
    """Two magnitudes by sign: bfloat16 rounds all entries of a sign alike, which adds up (docs/muon_precision.md)."""
    block = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    signs_RC = torch.kron(torch.kron(block, block), block).repeat(1, 2)
    m_NRC = torch.where(signs_RC > 0, 0.936844125, -1.0)[None]
    rows = polar_express_rows(6)
    largest = {dtype: version(m_NRC, rows, dtype)[1].item() for dtype in UNITS}
    assert largest[torch.bfloat16] > 100 * largest[torch.float32]
    assert largest[torch.float16] == pytest.approx(largest[torch.float32], rel=0.01)


# ------------------------------------------------------------------------------- one test per mistake


def _mistaken(m_RC: Array, rows: list[Row], norm: float) -> Array:
    return reference.iterate(m_RC / norm, rows)


MISTAKES: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "norm without 1.01": (6, lambda m: _mistaken(m, reference.rows_of(6), float(np.linalg.norm(m)))),
    "spectral norm": (6, lambda m: _mistaken(m, reference.rows_of(6), 1.01 * float(np.linalg.norm(m, 2)))),
    "rows without 1.01": (6, lambda m: _mistaken(m, list(reference.PAPER[:6]), reference.divisor(m))),
    "1.01 in the last row too": (
        8,
        lambda m: _mistaken(m, [reference.shrunk(row, 1.01) for row in reference.PAPER], reference.divisor(m)),
    ),
    "1.01 in all but the last row used": (
        6,
        lambda m: _mistaken(m, [*reference.rows_of(5), reference.PAPER[5]], reference.divisor(m)),
    ),
    "1.01 divides every coefficient alike": (
        6,
        lambda m: _mistaken(
            m, [(a / 1.01, b / 1.01, c / 1.01) for a, b, c in reference.PAPER[:6]], reference.divisor(m)
        ),
    ),
    "rows in the other order": (6, lambda m: _mistaken(m, reference.rows_of(6)[::-1], reference.divisor(m))),
    "the table starts again after its end": (
        10,
        lambda m: _mistaken(m, [*reference.SAFE, *reference.SAFE[:2]], reference.divisor(m)),
    ),
    "b and c exchanged": (
        1,
        lambda m: _mistaken(m, [(a, c, b) for a, b, c in reference.rows_of(1)], reference.divisor(m)),
    ),
    "the epsilon left out": (6, lambda m: _mistaken(m, reference.rows_of(6), 1.01 * float(np.linalg.norm(m)))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake: str) -> None:
    """The comparison with the recurrence, exact to 1e-12 here, tells each of these from what is right."""
    steps, wrong = MISTAKES[mistake]
    m_RC, _, _ = reference.with_spectrum(np.geomspace(1.0, 10**-3.5, 24), columns=40)
    m_RC *= 1e-3  # so that the epsilon counts
    right = reference.iterate(m_RC / reference.divisor(m_RC), reference.rows_of(steps))
    assert distance(ours(m_RC, steps), right) < 1e-12
    assert distance(wrong(m_RC), right) > 1e-6


def test_tiny_gradients_survive_float16(version: PolarExpress) -> None:
    """Cast before they are normalised, they would all be zero."""
    m_RC = np.random.default_rng(7).standard_normal((32, 64)) * 1e-9
    assert not torch.from_numpy(m_RC).half().any()
    m_RC[0] *= 1e3  # ... and so that 1e-7 does not rule alone
    exact = reference.iterate(m_RC / reference.divisor(m_RC), reference.rows_of(6))
    assert distance(orthogonalise(version, m_RC, reference.rows_of(6), torch.float16)[0], exact) < 1e-2


def test_the_smaller_side_is_worked_on() -> None:
    """Either side gives the same result; the largest intermediate tells which Gram matrix was made."""
    random = np.random.default_rng(8)
    m_RC = random.standard_normal((96, 6)) * np.geomspace(1, 1e-3, 96)[:, None]
    row = reference.rows_of(1)[0]
    x_RC = m_RC / reference.divisor(m_RC)
    largest = {}
    for name, gram in (("smaller", x_RC.T @ x_RC), ("larger", x_RC @ x_RC.T)):
        b = row[1] * gram + row[2] * gram @ gram
        largest[name] = max(np.abs(t).max() for t in (x_RC, gram, b, reference.step(x_RC, row)))
    assert largest["larger"] > 1.05 * largest["smaller"] or largest["smaller"] > 1.05 * largest["larger"]
    _, found = orthogonalise(plain.polar_express, m_RC, [row])
    assert found == pytest.approx(largest["smaller"], rel=1e-6)


# ------------------------------------------------------------------------------- torch.optim.Muon


def with_torchs_definition(steps: int) -> list[Row]:
    """torch repeats one triple and has no 1.01 in the norm: the first row takes it out again."""
    return [reference.shrunk(TORCH_TRIPLE, 1 / 1.01), *[TORCH_TRIPLE] * (steps - 1)]


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
@pytest.mark.parametrize("steps", [1, 5])
def test_agrees_with_torchs_muon(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], steps: int) -> None:
    """Its iteration in float64, which its cast to bfloat16 is taken out of, by the same coefficients."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    m_RC = np.random.default_rng(9).standard_normal(shape) * 1e4  # the two epsilons vanish beside this
    theirs = _muon._zeropower_via_newtonschulz(torch.from_numpy(m_RC), TORCH_TRIPLE, steps, 1e-7)
    found, _ = orthogonalise(plain.polar_express, m_RC, with_torchs_definition(steps))
    assert theirs.dtype is torch.float64
    assert distance(found, theirs.numpy()) < 1e-10


def test_agrees_with_torchs_muon_in_bfloat16(version: PolarExpress) -> None:
    """Theirs casts first, sums the norm in bfloat16 and rounds products apart: a few units of bfloat16."""
    m_RC = np.random.default_rng(10).standard_normal((32, 48))
    theirs = _muon._zeropower_via_newtonschulz(torch.from_numpy(m_RC).float(), TORCH_TRIPLE, 5, 1e-7)
    found, _ = orthogonalise(version, m_RC, with_torchs_definition(5), torch.bfloat16)
    assert distance(found, theirs.double().numpy()) < 8 * UNITS[torch.bfloat16]
