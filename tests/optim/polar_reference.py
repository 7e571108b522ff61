"""Polar Express in numpy float64, from the paper alone (Amsel and others, arXiv 2505.16932, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = tuple[float, float, float]

PAPER: tuple[Row, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01


def shrunk(row: Row, factor: float) -> Row:
    """Coefficients of p(x / factor)."""
    a, b, c = row
    return a / factor, b / factor**3, c / factor**5


SAFE: tuple[Row, ...] = (*(shrunk(row, SAFETY) for row in PAPER[:7]), PAPER[7])
"""Every row but the last with the safety factor."""


def rows_of(steps: int) -> list[Row]:
    return [SAFE[min(k, 7)] for k in range(steps)]


def divisor(m_RC: Array) -> float:
    """What a matrix is divided by before the first step."""
    return SAFETY * float(np.sqrt(np.sum(m_RC**2))) + 1e-7


def step(x_RC: Array, row: Row) -> Array:
    """One step, as a polynomial of the whole matrix."""
    a, b, c = row
    gram_RR = x_RC @ x_RC.T
    return a * x_RC + b * (gram_RR @ x_RC) + c * (gram_RR @ (gram_RR @ x_RC))


def iterate(x_RC: Array, rows: Sequence[Row]) -> Array:
    for row in rows:
        x_RC = step(x_RC, row)
    return x_RC


def scalars(sigma: Array, rows: Sequence[Row]) -> Array:
    """What the steps make of singular values."""
    for a, b, c in rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def with_spectrum(sigma_K: Array, columns: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """A matrix U diag(sigma) V^T with random singular vectors: (matrix [K, columns], U [K, K], V [columns, K])."""
    random = np.random.default_rng(seed)
    u_KK, _ = np.linalg.qr(random.standard_normal((len(sigma_K), len(sigma_K))))
    v_CK, _ = np.linalg.qr(random.standard_normal((columns, len(sigma_K))))
    return (u_KK * sigma_K) @ v_CK.T, u_KK, v_CK


def polar_factor(m_RC: Array) -> Array:
    """U V^T."""
    u, _, vh = np.linalg.svd(m_RC, full_matrices=False)
    return u @ vh


def orthogonality_error(o_RC: Array) -> float:
    """||O O^T - I||_F / sqrt(rows), of a matrix that is not taller than wide."""
    rows = o_RC.shape[0]
    return float(np.linalg.norm(o_RC @ o_RC.T - np.eye(rows)) / np.sqrt(rows))
