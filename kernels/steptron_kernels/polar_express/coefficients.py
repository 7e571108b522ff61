"""The polynomials of Polar Express.

Amsel, Persson, Musco and Gower, "The Polar Express", arXiv 2505.16932: Algorithm 1 and its table, for singular values
in [1e-3, 1].
"""

from __future__ import annotations

Row = tuple[float, float, float]
"""(a, b, c) of one step X <- aX + (bA + cA^2)X with A = X X^T, which takes a singular value s to as + bs^3 + cs^5."""

TABLE: tuple[Row, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The paper's rows, without its safety factor."""

_SAFETY = 1.01


def polar_express_rows(steps: int) -> tuple[Row, ...]:
    """The rows of the first ``steps`` steps.

    Every row of the table but its last has the paper's safety factor in it, p(x / 1.01), which keeps values that
    rounding has put above 1 from growing. The last row repeats after the table's end.

    Raises:
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"Polar Express takes at least 1 step, got {steps}")
    safe = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in TABLE[:-1])
    return (*safe[:steps], *(TABLE[-1],) * (steps - len(safe)))
