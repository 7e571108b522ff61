"""float16 against bfloat16 in Polar Express: a search for updates under which bfloat16 explodes and float16 does not.

Exploding means that at some step an entry of X, A or bA + cA^2 is at least ten times the largest one of the float32
iteration at that step. Besides the operation as it is (every intermediate rounded once), both are also run with every
product and every sum rounded by itself, as expressions like `b * A + c * A @ A` on half-precision tensors do.

Families of updates are measured, climbed from, and scanned; docs/muon_precision.md tells what was found.
The JSON's ratios are the largest entries over float32's, the largest over each part of the search.

    python -m benchmarks.muon_precision [--plot docs/figures/muon_precision.png]
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steptron.platform import threads

os.environ.update(threads.default_environment())  # read when torch is imported

import torch
from torch import Tensor

from benchmarks.harness import print_result, print_table
from benchmarks.muon_updates import FAMILIES, RealUpdates, even_rank_one, gaussian, two_magnitudes
from steptron_kernels.polar_express import plain
from steptron_kernels.polar_express.coefficients import polar_express_rows

ROWS = polar_express_rows(6)
NOISE = 1e-7
NOISES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
LARGEST_FLOAT = 1e38
"""Stands for overflow."""


@dataclass(frozen=True)
class Rounding:
    """A dtype, and whether every product and sum is rounded (apart) or every intermediate once."""

    dtype: torch.dtype
    apart: bool = False


SINGLE = Rounding(torch.float32)
HALF = Rounding(torch.float16)
BRAIN = Rounding(torch.bfloat16)
HALF_APART = Rounding(torch.float16, apart=True)
BRAIN_APART = Rounding(torch.bfloat16, apart=True)
NAMES = {
    SINGLE: "float32",
    HALF: "float16",
    BRAIN: "bfloat16",
    HALF_APART: "float16 apart",
    BRAIN_APART: "bfloat16 apart",
}


@dataclass(frozen=True)
class Trace:
    """An iteration's course.

    Attributes:
        o_NRC: the result.
        largest_NSK: [N, steps, 3], the largest magnitudes of X after the step, of A, and of B = bA + cA^2.
        top_NS: [N, steps - 1], X's largest singular value after each step but the last, over the one from which on it
            escapes; from 1 on the iteration explodes.
    """

    o_NRC: Tensor
    largest_NSK: Tensor
    top_NS: Tensor


def trace(m_NRC: Tensor, rounding: Rounding, tops: bool = False) -> Trace:
    """Runs the iteration on float32 matrices that are not taller than wide."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(rounding.dtype).float()

    norm_N = torch.linalg.vector_norm(m_NRC, dim=(1, 2), keepdim=True, dtype=torch.float64)
    x_NRC = rounded(m_NRC / (1.01 * norm_N + 1e-7).float())
    largest: list[Tensor] = []
    top: list[Tensor] = []
    for a, b, c in ROWS:
        gram_NRR = rounded(x_NRC @ x_NRC.mT)
        if rounding.apart:
            square_NRR = rounded(rounded(c * gram_NRR) @ gram_NRR)
            b_NRR = rounded(rounded(b * gram_NRR) + square_NRR)
            x_NRC = rounded(rounded(a * x_NRC) + rounded(b_NRR @ x_NRC))
        else:
            b_NRR = rounded(torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c))
            x_NRC = rounded(torch.baddbmm(x_NRC, b_NRR, x_NRC, beta=a))
        largest.append(torch.stack([t.abs().amax(dim=(1, 2)) for t in (x_NRC, gram_NRR, b_NRR)], dim=-1))
        if tops and len(top) < len(ESCAPE):
            top.append(top_singular_value(x_NRC) / ESCAPE[len(top)])
    return Trace(x_NRC, torch.stack(largest, dim=1), torch.stack(top, dim=1) if tops else torch.empty(0))


def top_singular_value(x_NRC: Tensor) -> Tensor:
    """[N]; infinity where entries are beyond 1e10."""
    gone_N = ~(x_NRC.abs().amax(dim=(1, 2)) < 1e10)
    gram_NRR = (x_NRC @ x_NRC.mT).masked_fill(gone_N[:, None, None], 0.0)
    return torch.linalg.eigvalsh(gram_NRR)[:, -1].clamp(min=0).sqrt().masked_fill(gone_N, math.inf)


def escape_values() -> list[float]:
    """After each step but the last, the singular value from which on the steps that are left lead beyond 2.2.

    In exact arithmetic singular values stay below 2, and after a step at most at 1/1.01 of this.
    """

    def escapes(value: float, rows: Sequence[tuple[float, float, float]]) -> bool:
        for a, b, c in rows:
            value = a * value + b * value**3 + c * value**5
            if value > 2.2:
                return True
        return False

    values = []
    for step in range(1, len(ROWS)):
        low, high = 1.5, 3.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if escapes(middle, ROWS[step:]) else (middle, high)
        values.append(low)
    return values


ESCAPE = escape_values()


def check_trace(m_NRC: Tensor) -> None:
    """The trace must be the operation itself.

    Raises:
        AssertionError: it is not.
    """
    for rounding in (SINGLE, HALF, BRAIN):
        o_NRC, largest_N = plain.polar_express(m_NRC, ROWS, rounding.dtype)
        traced = trace(m_NRC, rounding)
        torch.testing.assert_close(traced.o_NRC, o_NRC, rtol=0, atol=0)
        assert (traced.largest_NSK.amax(dim=(1, 2)) <= largest_N).all()


def over_float32(found: Trace, single: Trace) -> Tensor:
    """[N]: at the worst step, the largest entry over float32's largest there; at most 1e38."""
    ratio_NS = found.largest_NSK.amax(dim=2) / single.largest_NSK.amax(dim=2)
    return ratio_NS.nan_to_num(LARGEST_FLOAT, LARGEST_FLOAT).clamp(max=LARGEST_FLOAT).amax(dim=1)


def orthogonality_error(o_NRC: Tensor) -> Tensor:
    """[N]: ||O O^T - I||_F / sqrt(R)"""
    rows = o_NRC.shape[1]
    return (o_NRC @ o_NRC.mT - torch.eye(rows)).norm(dim=(1, 2)) / math.sqrt(rows)


@dataclass
class Measured:
    """A family's numbers, per rounding: values of its matrices, whatever their shapes."""

    count: int
    largest: float
    ratios: dict[Rounding, Tensor]
    orthogonality: dict[Rounding, Tensor]
    sensitivity: dict[Rounding, Tensor]
    tops: dict[Rounding, Tensor]


def measure(groups: Sequence[Tensor]) -> Measured:
    """Everything about batches of matrices [N, R, C]."""
    parts = [_measure(group) for group in groups]

    def joined(name: str) -> dict[Rounding, Tensor]:
        return {key: torch.cat([getattr(part, name)[key] for part in parts]) for key in getattr(parts[0], name)}

    return Measured(
        sum(part.count for part in parts),
        max(part.largest for part in parts),
        *(joined(name) for name in ("ratios", "orthogonality", "sensitivity", "tops")),
    )


def _measure(m_NRC: Tensor) -> Measured:
    generator = torch.Generator().manual_seed(1)
    scale = m_NRC.norm(dim=(1, 2), keepdim=True) / math.sqrt(m_NRC[0].numel())
    nearby_NRC = m_NRC + NOISE * scale * torch.randn(m_NRC.shape, generator=generator)
    single = trace(m_NRC, SINGLE)
    measured = Measured(len(m_NRC), float(single.largest_NSK.max()), {}, {}, {}, {})
    for rounding in (SINGLE, HALF, BRAIN, HALF_APART, BRAIN_APART):
        found = trace(m_NRC, rounding, tops=True)
        measured.ratios[rounding] = over_float32(found, single)
        measured.tops[rounding] = found.top_NS.amax(dim=1)
        if not rounding.apart:
            measured.orthogonality[rounding] = orthogonality_error(found.o_NRC)
            change_NRC = trace(nearby_NRC, rounding).o_NRC - found.o_NRC
            measured.sensitivity[rounding] = change_NRC.norm(dim=(1, 2)) / found.o_NRC.norm(dim=(1, 2))
    return measured


# ------------------------------------------------------------------------------- the parts of the search


def families() -> dict[str, Measured]:
    """Random matrices of two shapes."""
    results = {}
    for name, make in FAMILIES.items():
        generator = torch.Generator().manual_seed(0)
        results[name] = measure([make(12, 64, 128, generator), make(1, 256, 1280, generator)])
    return results


def trained(steps: Sequence[int]) -> dict[str, Measured]:
    """Updates of the quickstart's model."""
    results = {}
    for name, matrices in RealUpdates(steps).collect().items():
        shapes = sorted({tuple(m.shape) for m in matrices})
        results[name] = measure([torch.stack([m for m in matrices if tuple(m.shape) == shape]) for shape in shapes])
    return results


def _height(x: Trace, single: Trace) -> Tensor:
    """[N]: what a climb goes by: growth of the largest entry, and nearness to an explosion."""
    return over_float32(x, single).log() + x.top_NS.amax(dim=1)


def climb(start_NRC: Tensor, generations: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random changes to the best matrices so far: entries, rows, columns, magnitudes by sign, fewer distinct values.

    Returns:
        The ratio over float32 of the best for bfloat16, and the same matrix's for float16.
    """
    generator = torch.Generator().manual_seed(seed)
    parents_NRC, keep = start_NRC, len(start_NRC) // 4
    for _ in range(generations):
        score_N = _height(trace(parents_NRC, BRAIN, tops=True), trace(parents_NRC, SINGLE))
        best_NRC = parents_NRC[score_N.argsort(descending=True)[:keep]]
        parents_NRC = torch.cat([best_NRC, *(_changed(best_NRC, generator) for _ in range(3))])
    single = trace(parents_NRC, SINGLE)
    brain_N = over_float32(trace(parents_NRC, BRAIN), single)
    best = brain_N.argmax()
    return brain_N[best], over_float32(trace(parents_NRC, HALF), single)[best]


def _changed(m_NRC: Tensor, generator: torch.Generator) -> Tensor:
    n, r, c = m_NRC.shape

    def noise(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    strength_N11 = 10 ** (-4 * torch.rand(n, 1, 1, generator=generator))
    levels_N11 = m_NRC.abs().amax(dim=(1, 2), keepdim=True) * strength_N11
    changes = [
        m_NRC * (1 + strength_N11 * noise(r, c)),
        m_NRC * (1 + strength_N11 * noise(r, 1)),
        m_NRC * (1 + strength_N11 * noise(1, c)),
        m_NRC + strength_N11 * noise(r, 1) * noise(1, c) * m_NRC.abs().mean(dim=(1, 2), keepdim=True),
        torch.where(m_NRC > 0, m_NRC * (1 + strength_N11 * noise(1, 1)), m_NRC),
        (m_NRC / levels_N11).round() * levels_N11,
    ]
    choice_N = torch.randint(0, len(changes), (n,), generator=generator)
    return torch.stack(changes)[choice_N, torch.arange(n)]


def climbs(generations: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Climbs from some families, 32 x 64."""
    starts = (
        *("Gaussian", "even rank 1 + 1e-3 noise", "random signs"),
        *("blocks of constants", "identities minus a constant"),
    )
    results = {}
    for seed, name in enumerate(starts):
        start_NRC = FAMILIES[name](48, 32, 64, torch.Generator().manual_seed(seed))
        results[name] = climb(start_NRC, generations, seed)
    return results


def second_singular_values() -> dict[float, dict[Rounding, float]]:
    """Of O, for evenly spread outer products of 256 x 1280 with noise: what is made of all that is not the product."""
    values = {}
    for noise in (0.0, *NOISES):
        m_1RC = even_rank_one(noise)(1, 256, 1280, torch.Generator().manual_seed(3))
        values[noise] = {k: float(torch.linalg.svdvals(trace(m_1RC, k).o_NRC[0])[1]) for k in NAMES}
    return values


@dataclass(frozen=True)
class Scan:
    """Two magnitudes by sign, at one shape.

    Attributes:
        share_N: shares of the constant direction.
        ratios: largest entries over float32's, by rounding.
    """

    shape: tuple[int, int]
    share_N: Tensor
    ratios: dict[Rounding, Tensor]

    def explosive(self, rounding: Rounding) -> Tensor:
        return self.ratios[rounding] >= 10

    def centre(self) -> float:
        """The middle of the longest run of neighbours that explode in bfloat16 and not in float16."""
        hits = (self.explosive(BRAIN) & (self.ratios[HALF] < 2)).tolist()
        best, start = (0, 0), None
        for i, hit in enumerate([*hits, False]):
            if hit and start is None:
                start = i
            elif not hit and start is not None:
                best, start = max(best, (i - start, start)), None
        return float(self.share_N[best[1] + best[0] // 2])


def scan(rows: int, columns: int, low: float, high: float, count: int) -> Scan:
    share_N = torch.linspace(low, high, count)
    ratios: dict[Rounding, list[Tensor]] = {rounding: [] for rounding in NAMES}
    for part in share_N.split(max(1, (1 << 22) // (rows * columns))):
        m_NRC = two_magnitudes(part, rows, columns)
        single = trace(m_NRC, SINGLE)
        for rounding, values in ratios.items():
            values.append(over_float32(trace(m_NRC, rounding), single))
    return Scan((rows, columns), share_N, {rounding: torch.cat(values) for rounding, values in ratios.items()})


SCANS = (
    (16, 32, 0.02, 0.98, 2000),
    (64, 128, 0.02, 0.98, 2000),
    (256, 512, 0.095, 0.102, 30),
    (1024, 1024, 0.0923, 0.0923, 1),
)
"""Rows, columns, and the shares scanned; for the larger ones a narrow range, which dense scans had pointed to."""


def persistence(scanned: Scan) -> list[float]:
    """The largest entry in bfloat16 over float32's when every entry is multiplied by 1 + noise; medians of five."""
    rows, columns = scanned.shape
    m_NRC = two_magnitudes(torch.tensor([scanned.centre()]), rows, columns)
    generator = torch.Generator().manual_seed(2)
    count = 5 if rows < 1024 else 1
    medians = []
    for noise in NOISES:
        noisy_NRC = m_NRC * (1 + noise * torch.randn(count, rows, columns, generator=generator))
        ratio_N = over_float32(trace(noisy_NRC, BRAIN), trace(noisy_NRC, SINGLE))
        medians.append(float(ratio_N.median()))
    return medians


# ------------------------------------------------------------------------------- output


def _times(value: Tensor | float) -> str:
    value = float(value)
    return "overflow" if value >= LARGEST_FLOAT else f"{value:.3f}" if value < 10 else f"{value:.1e}"


def _tables(found: dict[str, Measured]) -> None:
    print_table(
        "Largest entry over float32's at the same step (worst matrix and step)",
        ["update", "matrices", "float32's", "float16", "bfloat16", "float16 apart", "bfloat16 apart"],
        [
            [name, str(m.count), f"{m.largest:.2f}", *(_times(m.ratios[k].max()) for k in tuple(NAMES)[1:])]
            for name, m in found.items()
        ],
    )
    kinds = (SINGLE, HALF, BRAIN)
    print_table(
        "Orthogonality error (median), and relative change of O under 1e-7 noise in units of 1e-4 (largest)",
        ["update", *(f"error {NAMES[k]}" for k in kinds), *(f"change {NAMES[k]}" for k in kinds)],
        [
            [
                name,
                *(f"{m.orthogonality[k].median():.4g}" for k in kinds),
                *(f"{1e4 * m.sensitivity[k].max():.3g}" for k in kinds),
            ]
            for name, m in found.items()
        ],
    )
    print_table(
        "X's largest singular value over the one from which on it explodes (worst matrix and step)",
        ["update", *NAMES.values()],
        [[name, *(f"{m.tops[k].max():.4g}" for k in NAMES)] for name, m in found.items()],
    )


def plot(case_1RC: Tensor, path: Path) -> None:
    """Largest entries along the steps, of an ordinary matrix, one of rank 1 and one that explodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    panels = figure.subplots(1, 3)
    _, rows, columns = case_1RC.shape
    updates = {
        "Gaussian": gaussian(1, rows, columns, torch.Generator().manual_seed(0)),
        "even rank 1": even_rank_one(0.0)(1, rows, columns, torch.Generator().manual_seed(0)),
        "two magnitudes by sign": case_1RC,
    }
    styles = {SINGLE: ("#555555", "-"), HALF: ("#0072B2", "--"), BRAIN: ("#D55E00", "-"), BRAIN_APART: ("#E69F00", ":")}
    for axes, (title, m_1RC) in zip(panels, updates.items(), strict=True):
        for rounding, (colour, line) in styles.items():
            largest_S = trace(m_1RC, rounding).largest_NSK[0].amax(dim=1).nan_to_num(LARGEST_FLOAT, LARGEST_FLOAT)
            axes.plot(range(1, len(ROWS) + 1), largest_S, line, color=colour, label=NAMES[rounding], marker=".")
        axes.set_title(f"{title}, {rows} × {columns}", fontsize=10)
        axes.set_yscale("log")
        axes.set_xlabel("step")
    panels[0].set_ylabel("largest entry of X, A, bA + cA²")
    panels[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path, help="figure to write")
    parser.add_argument("--generations", type=int, default=40, help="of every climb")
    parser.add_argument("--trained-steps", type=int, nargs="+", default=[1, 5, 15], help="when gradients are taken")
    arguments = parser.parse_args()
    started = time.perf_counter()

    def progress(what: str) -> None:
        print(f"{time.perf_counter() - started:.0f} s: {what} ...", flush=True)

    check_trace(gaussian(3, 48, 80, torch.Generator().manual_seed(0)))
    progress("two magnitudes by sign")
    scans = [scan(*arguments_of_scan) for arguments_of_scan in SCANS]
    exploding = [s for s in scans if (s.explosive(BRAIN) & (s.ratios[HALF] < 2)).any()]
    persisting = {s.shape: persistence(s) for s in exploding}
    progress("families")
    found = families()
    second = second_singular_values()
    progress("training")
    found |= trained(sorted(arguments.trained_steps))
    progress("climbs")
    climbed = climbs(arguments.generations)
    cases = {s.shape: two_magnitudes(torch.tensor([s.centre()]), *s.shape) for s in exploding}
    found |= {f"two magnitudes, {r} x {c}": measure([case_1RC]) for (r, c), case_1RC in cases.items() if r < 1024}
    progress("done")

    _tables(found)
    print_table(
        f"Climbs of {arguments.generations} generations from 48 matrices of 32 x 64: the best",
        ["start", "bfloat16", "float16"],
        [[name, _times(brain), _times(half)] for name, (brain, half) in climbed.items()],
    )
    print_table(
        "Two magnitudes by sign: per cent of the scanned shares that explode",
        ["shape", "shares", "between", *(NAMES[k] for k in tuple(NAMES)[1:]), "largest, bfloat16", "float16"],
        [
            [
                f"{s.shape[0]} x {s.shape[1]}",
                str(len(s.share_N)),
                f"{s.share_N[0]:.3f}-{s.share_N[-1]:.3f}",
                *(f"{100 * s.explosive(k).double().mean():.2f}" for k in tuple(NAMES)[1:]),
                _times(s.ratios[BRAIN].max()),
                _times(s.ratios[HALF].max()),
            ]
            for s in scans
        ],
    )
    print_table(
        "Two magnitudes by sign, entries times 1 + noise: largest entry in bfloat16 over float32's",
        ["shape", "share", *(f"{noise:g}" for noise in NOISES)],
        [
            [f"{s.shape[0]} x {s.shape[1]}", f"{s.centre():.4f}", *(_times(value) for value in persisting[s.shape])]
            for s in exploding
        ],
    )
    print_table(
        "Second singular value of O, of an even outer product of 256 x 1280 plus noise",
        ["noise", *NAMES.values()],
        [[f"{noise:g}", *(f"{value:.4f}" for value in values.values())] for noise, values in second.items()],
    )
    if arguments.plot is not None:
        plot(cases[(64, 128)], arguments.plot)
    made_up = [m for name, m in found.items() if name in FAMILIES]
    real = [m for name, m in found.items() if name.startswith("trained")]
    print_result(
        "muon_precision",
        {
            f"{part}_{kind}": max(values)
            for kind, rounding in (("float16", HALF), ("bfloat16", BRAIN), ("bfloat16_apart", BRAIN_APART))
            for part, values in {
                "families": [float(m.ratios[rounding].max()) for m in made_up],
                "trained": [float(m.ratios[rounding].max()) for m in real],
                "two_magnitudes": [float(s.ratios[rounding].max()) for s in scans],
            }.items()
        },
        {},
    )


if __name__ == "__main__":
    main()
