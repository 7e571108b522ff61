"""Muon's diagnostics against float64, number by number, and over layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch

from steptron.config.schema import MuonDiagnosticsConfig, OptimizerConfig
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec
from steptron.optim.diagnostics import MatrixDiagnostics, MuonDiagnostics, muon_of, stable_rank
from steptron.optim.muon import Muon
from steptron_kernels.polar_express import plain
from tests.optim.muon_runs import build, set_gradients
from tests.optim.pieces import own
from tests.optim.polar_reference import divisor, rows_of
from tests.worker_pool import WorkerPool

SHAPES = [(6, 10), (10, 6), (8, 8), (1, 5), (6, 10)]
NAMES = [f"matrix.{number}" for number in range(len(SHAPES))]
FIGURES = ("largest", "update_rms", "momentum_norm", "orthogonality_error", "stable_rank")


class Memory:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: dict[int, list[MatrixDiagnostics]] = {}

    def write(self, step: int, matrices: Sequence[MatrixDiagnostics]) -> None:
        assert step not in self.records
        self.records[step] = list(matrices)

    def close(self) -> None:
        pass


def make(precision: str = "fp32", **diagnostics: int) -> tuple[Muon, dict[str, torch.Tensor], MuonDiagnostics, Memory]:
    """Muon on some matrices, and their gradients by name."""
    config = OptimizerConfig(lr=1.0, muon={"precision": precision, "diagnostics": diagnostics})  # type: ignore[arg-type]
    specs = [
        ParameterSpec(name, shape, (LogicalMatrix(name, ParameterRole.FFN_UP, (0, shape[0])),))
        for name, shape in zip(NAMES, SHAPES, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    parameters = {s.name: torch.nn.Parameter(torch.randn(s.shape, generator=generator)) for s in specs}
    muon = Muon(config.muon, own(specs, parameters, config), plain.polar_express)
    memory = Memory()
    gradients = {name: parameter.main_grad for name, parameter in parameters.items()}  # type: ignore[attr-defined]
    return muon, gradients, MuonDiagnostics(muon, config.muon.diagnostics, memory), memory


def fill(gradients: dict[str, torch.Tensor], step: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(step)
    for gradient in gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    return {name: gradient.double().numpy().copy() for name, gradient in gradients.items()}


def iterated(m: np.ndarray) -> tuple[np.ndarray, float]:
    """The orthogonal matrix, and the largest |entry| of X, X X^T and b A + c A A on the way; wide."""
    x = (m if m.shape[0] <= m.shape[1] else m.T) / divisor(m)
    largest = np.abs(x).max()
    for a, b, c in rows_of(6):
        gram = x @ x.T
        product = b * gram + c * gram @ gram
        x = a * x + product @ x
        largest = max(largest, *(np.abs(entries).max() for entries in (gram, product, x)))
    return x, float(largest)


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 2e-6), ("fp16", 4e-3)])
def test_every_number_is_its_definition(precision: str, rounding: float) -> None:
    """At the third of three steps, from the gradients of all three, in float64."""
    muon, gradients, diagnostics, memory = make(precision, every_steps=3, sample=99)
    buffers = {name: np.zeros(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
    for step in (1, 2, 3):
        gradient = fill(gradients, step)
        for name, buffer in buffers.items():
            buffers[name] = 0.95 * buffer + gradient[name]
        diagnostics.begin(step)
        muon.step(0.1)
        diagnostics.end(step)
    assert list(memory.records) == [3]
    seen = {matrix.matrix: matrix for matrix in memory.records[3]}
    assert sorted(seen) == NAMES and len(memory.records[3]) == len(NAMES)
    for name, shape in zip(NAMES, SHAPES, strict=True):
        o, largest = iterated(gradient[name] + 0.95 * buffers[name])
        own, side = seen[name], min(shape)
        gram = o @ o.T
        singular = np.linalg.svd(gradient[name], compute_uv=False)
        assert own.momentum_norm == pytest.approx(np.linalg.norm(buffers[name]), rel=1e-6)
        assert own.update_rms == pytest.approx(0.2 * math.sqrt(max(shape)) * np.sqrt((o**2).mean()), rel=rounding)
        error = np.linalg.norm(gram - np.eye(side)) / math.sqrt(side)
        assert own.orthogonality_error == pytest.approx(error, abs=2 * rounding)
        assert own.stable_rank == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-6)
        assert own.largest == muon.largest()[name] == pytest.approx(largest, rel=max(rounding, 1e-5))


def test_records_take_all_matrices_in_turn() -> None:
    muon, gradients, diagnostics, memory = make(every_steps=2, sample=2)
    for step in range(1, 11):
        fill(gradients, step)
        diagnostics.begin(step)
        assert (not muon.probes) == (step % 2 == 1)
        muon.step(0.1)
        diagnostics.end(step)
        assert not muon.probes
    assert list(memory.records) == [2, 4, 6, 8, 10]
    sampled = []
    for matrices in memory.records.values():
        assert [matrix.matrix for matrix in matrices if math.isnan(matrix.update_rms)] == []
        sampled.append({matrix.matrix for matrix in matrices if matrix.stable_rank is not None})
        assert sampled[-1] == {matrix.matrix for matrix in matrices if matrix.orthogonality_error is not None}
    assert all(len(names) == 2 for names in sampled)
    counts = {name: sum(name in names for names in sampled) for name in NAMES}
    assert counts == dict.fromkeys(NAMES, 2)  # ten samples of five


def test_off_nothing_is_computed() -> None:
    muon, gradients, diagnostics, memory = make()
    for step in (1, 2):
        fill(gradients, step)
        diagnostics.begin(step)
        assert not muon.probes
        muon.step(0.1)
        diagnostics.end(step)
    assert memory.records == {}


def test_looking_changes_no_update() -> None:
    weights = []
    for diagnostics in ({}, {"every_steps": 1, "sample": 99}):
        muon, gradients, watched, _ = make("fp16", **diagnostics)
        for step in (1, 2):
            fill(gradients, step)
            watched.begin(step)
            muon.step(0.1)
            watched.end(step)
        weights.append([piece.weight.clone() for piece in muon.owned])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_matrix_that_is_not_finite_shows_and_its_neighbours_do_not() -> None:
    """An expert without tokens, too: its gradient is zero."""
    muon, gradients, diagnostics, memory = make(every_steps=1, sample=99)
    fill(gradients, 0)
    gradients["matrix.0"].fill_(3e38)  # finite; with Nesterov's term it is not
    gradients["matrix.4"].zero_()
    diagnostics.begin(1)
    muon.step(0.1)
    diagnostics.end(1)
    seen = {matrix.matrix: matrix for matrix in memory.records[1]}
    bad, empty = seen["matrix.0"], seen["matrix.4"]
    assert all(math.isnan(value) for value in (bad.largest, bad.update_rms, bad.orthogonality_error or 0.0))
    assert bad.stable_rank == pytest.approx(1.0)
    assert (empty.stable_rank, empty.update_rms, empty.momentum_norm, empty.orthogonality_error) == (0, 0, 0, 1)
    assert all(math.isfinite(value) for name in NAMES[1:4] for value in list(asdict(seen[name]).values())[1:])


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30, 8e37])
def test_stable_rank_at_any_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    g = (torch.randn(40, 90, generator=generator).double() * scale).float()
    singular = np.linalg.svd(g.double().numpy(), compute_uv=False)
    assert float(stable_rank(g)) == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_stable_rank_of_low_rank(rank: int) -> None:
    """Equal singular values: the rank itself."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, rank, generator=generator))[0] for n in (30, 50))
    assert float(stable_rank(left @ right.t())) == pytest.approx(rank, rel=1e-5)


# ----------------------------------------------------------------------------------------- layouts


def observe(
    rank: int, world_size: int, overrides: list[str], sample: int, steps: tuple[int, ...] = (1, 2)
) -> dict[int, list[MatrixDiagnostics]]:
    train = build(world_size, ["optimizer.muon.precision=fp32", *overrides])
    muon, memory = muon_of(train.optimizer), Memory()
    assert muon is not None
    settings = MuonDiagnosticsConfig(every_steps=1, sample=sample)
    diagnostics = MuonDiagnostics(muon, settings, memory, answers_for_cut=train.mesh.tensor_rank == 0)
    for step in steps:
        set_gradients(train, step)
        diagnostics.begin(step)
        train.optimizer.step(1e-2)
        train.sharded.gather.start()
        diagnostics.end(step)
    train.sharded.gather.wait()
    return memory.records


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[int, list[MatrixDiagnostics]]:
    """What one process sees."""
    (records,) = pool.run(1, observe, [], 10_000)
    return dict(records)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, []),
        (4, ["parallel.expert=2"]),
        (4, ["parallel.tensor=2", "parallel.expert=2"]),
        (2, ["parallel.pipeline=2"]),
    ],
    ids=["DP2", "EP2xDP2", "TP2xDP2xEP2", "PP2"],
)
def test_ranks_together_have_every_matrix_once(
    pool: WorkerPool, alone: dict[int, list[MatrixDiagnostics]], world_size: int, overrides: list[str]
) -> None:
    ranks = pool.run(world_size, observe, overrides, 10_000)
    for step in (1, 2):
        expected = {matrix.matrix: matrix for matrix in alone[step]}
        together = [matrix for records in ranks for matrix in records[step]]
        assert sorted(matrix.matrix for matrix in together) == sorted(expected)
        for matrix in together:
            for figure in FIGURES:
                value, known = getattr(matrix, figure), getattr(expected[matrix.matrix], figure)
                assert value == pytest.approx(known, rel=2e-5, abs=2e-6), (matrix.matrix, figure)


def test_ranks_that_share_cut_matrices_sample_the_same(pool: WorkerPool) -> None:
    """TP2xDP2: the projection of MTP is whole on every rank and has one owner, so that tensor-parallel ranks own
    different numbers of matrices; of those that they share they must bring together parts of the same ones."""
    steps = (40, 41, 42, 43)  # by then their turns would be at different places
    (expected,) = pool.run(1, observe, [], 10_000, steps)
    ranks = pool.run(4, observe, ["parallel.tensor=2"], 7, steps)
    assert len({len(records[40]) for records in ranks}) > 1
    for step in steps:
        stable_ranks = {matrix.matrix: matrix.stable_rank for matrix in expected[step]}
        for records in ranks:
            sampled = [matrix for matrix in records[step] if matrix.stable_rank is not None]
            assert 0 < len(sampled) <= 14
            for matrix in sampled:
                assert matrix.stable_rank == pytest.approx(stable_ranks[matrix.matrix], rel=2e-5), matrix.matrix
