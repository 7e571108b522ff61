"""What Muon's updates looked like, matrix by matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steptron.config.schema import MuonDiagnosticsConfig
from steptron.optim.base import Optimizer
from steptron.optim.combined import Combined
from steptron.optim.muon import Muon, Update
from steptron.optim.owned import OwnedPiece


@dataclass(frozen=True)
class MatrixDiagnostics:
    """A logical matrix in a step.

    Attributes:
        matrix: its name.
        largest: largest |entry| of the iteration's state and intermediates.
        update_rms: root mean square of the update's entries before the learning rate (and without weight decay).
        momentum_norm: Frobenius norm of the momentum, with the step's gradient in it.
        orthogonality_error: ||O O^T - I||_F / sqrt(s) of the orthogonal matrix O, on its smaller side s; None where
            it was not sampled. A rank-deficient momentum cannot come below sqrt(1 - rank / s).
        stable_rank: ||G||_F^2 / ||G||_2^2 of the step's gradient, relatively exact to about 1e-6; 0 for a gradient of
            zeros; None where it was not sampled.
    """

    matrix: str
    largest: float
    update_rms: float
    momentum_norm: float
    orthogonality_error: float | None
    stable_rank: float | None


class Observer(Protocol):
    """Takes what a rank has seen."""

    def write(self, step: int, matrices: Sequence[MatrixDiagnostics]) -> None:
        """The matrices that this rank answers for, in a step (1 for the first)."""

    def close(self) -> None:
        """Nothing more comes."""


class MuonDiagnostics:
    """Computes diagnostics in the steps that are due, and nothing in the others.

    Over all ranks every matrix is in each record once: where tensor parallelism cuts it, by the first of those ranks.

    Args:
        muon: what is looked at.
        config: when, and how many matrices are sampled.
        observer: gets the records.
        answers_for_cut: whether this rank is the first of those that tensor parallelism cuts matrices over.
    """

    def __init__(
        self, muon: Muon, config: MuonDiagnosticsConfig, observer: Observer, answers_for_cut: bool = True
    ) -> None:
        self._muon = muon
        self._config = config
        self._observer = observer
        self._answers_for_cut = answers_for_cut
        self._sampled: set[str] = set()
        self._parts: list[tuple[list[str], Tensor]] = []

    def begin(self, step: int) -> None:
        """Before the step with this number, 1 for the first."""
        every = self._config.every_steps
        if every is None or step % every:
            return
        # Ranks that share cut matrices must sample the same of them, whatever else each owns.
        cut = [piece.name for piece in self._muon.owned if is_cut(piece)]
        whole = [piece.name for piece in self._muon.owned if not is_cut(piece)]
        self._sampled = {name for names in (cut, whole) for name in _turn(names, step // every, self._config.sample)}
        self._muon.probes.append(self)

    @torch.no_grad()
    def record(self, update: Update) -> None:
        cut = is_cut(update.pieces[0])
        columns = update.o_NRC.new_full((len(update.pieces), 5), torch.nan, dtype=torch.float64)
        columns[:, 0] = update.largest_N
        sizes = update.o_NRC[0].numel()
        norms_N = torch.linalg.vector_norm(update.o_NRC, dim=(1, 2), dtype=torch.float64)
        columns[:, 1] = norms_N * norms_N.new_tensor(update.scales) / sizes**0.5
        momentum = update.whole(update.pieces, update.momentum) if cut else update.momentum
        columns[:, 2] = torch.stack([torch.linalg.vector_norm(m, dtype=torch.float64) for m in momentum])
        for index, piece in enumerate(update.pieces):
            if piece.name in self._sampled:
                columns[index, 3] = orthogonality_error(update.o_NRC[index])
                columns[index, 4] = stable_rank(update.whole([piece], [piece.gradient])[0])
        if not cut or self._answers_for_cut:
            self._parts.append(([piece.name for piece in update.pieces], columns))

    def end(self, step: int) -> None:
        """After the step."""
        if self not in self._muon.probes:
            return
        self._muon.probes.remove(self)
        matrices = [
            self._diagnostics(name, values)
            for names, columns in self._parts
            for name, values in zip(names, columns.tolist(), strict=True)
        ]
        self._parts = []
        self._observer.write(step, matrices)

    def _diagnostics(self, name: str, values: list[float]) -> MatrixDiagnostics:
        largest, rms, norm, error, rank = values
        if name in self._sampled:
            return MatrixDiagnostics(name, largest, rms, norm, error, rank)
        return MatrixDiagnostics(name, largest, rms, norm, None, None)


def muon_of(optimizer: Optimizer) -> Muon | None:
    """The part of an optimizer that is Muon; None where there is none."""
    members = optimizer.members if isinstance(optimizer, Combined) else [optimizer]
    return next((member for member in members if isinstance(member, Muon)), None)


def orthogonality_error(o_RC: Tensor) -> Tensor:
    """||O O^T - I||_F / sqrt(R) of a matrix with R <= C; scalar, the products in the matrix's dtype."""
    gram_RR = o_RC @ o_RC.t()
    gram_RR.diagonal().sub_(1)
    return torch.linalg.vector_norm(gram_RR, dtype=torch.float64) / o_RC.shape[0] ** 0.5


def stable_rank(g_RC: Tensor) -> Tensor:
    """||G||_F^2 / ||G||_2^2 of a matrix with R <= C, at any scale; scalar, 0 for zeros."""
    largest = g_RC.abs().amax()
    scaled_RC = g_RC / torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
    scaled_RC = scaled_RC / torch.linalg.vector_norm(scaled_RC).clamp(min=1.0)
    gram_RR = (scaled_RC @ scaled_RC.t()).double()
    # The sum of the eigenvalues is ||G||_F^2, by which rounding cancels, and the largest one ||G||_2^2.
    return torch.where(largest > 0, gram_RR.trace() / torch.linalg.eigvalsh(gram_RR)[-1].clamp(min=1e-30), 0.0)


def is_cut(piece: OwnedPiece) -> bool:
    """Whether tensor parallelism cuts the matrix."""
    place = piece.piece.matrix
    assert place is not None
    return not place.is_whole


def _turn(names: Sequence[str], number: int, size: int) -> list[str]:
    """Which of the names are next in turn, round and round."""
    first = number * size
    return [names[(first + index) % len(names)] for index in range(min(size, len(names)))]
