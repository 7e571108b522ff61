"""Muon with Polar Express, on whole logical matrices (the report's section 3.2; facts of Step 3.5 Flash)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from steptron.config.schema import MuonConfig
from steptron.model.parameter_shards import MatrixPlace
from steptron.optim.base import MasterWeights, StateTensor
from steptron.optim.batches import Batch, batches_of
from steptron.optim.owned import OwnedPiece
from steptron.optim.scale import SCALES
from steptron_kernels.polar_express.choose import PolarExpress
from steptron_kernels.polar_express.coefficients import polar_express_rows

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Update:
    """Matrices that have been orthogonalised together, before their weights change.

    Attributes:
        pieces: the matrices; their gradients are those of the step.
        momentum: of each, [n] fp32, with the step's gradient in it.
        scales: what multiplies each orthogonal matrix, besides the learning rate.
        o_NRC: fp32, the orthogonal matrices, whole and wide: those of matrices taller than wide are transposed.
        largest_N: fp32, each matrix's largest |entry| of the iteration.
        rates: learning rate of each.
        whole: brings tensors [n] of some of the matrices into the form of ``o_NRC``; where tensor parallelism cuts
            them, a collective that all its ranks must take part in.
    """

    pieces: Sequence[OwnedPiece]
    momentum: Sequence[Tensor]
    scales: Sequence[float]
    o_NRC: Tensor
    largest_N: Tensor
    rates: Sequence[float]
    whole: Callable[[Sequence[OwnedPiece], Sequence[Tensor]], Tensor]


class Probe(Protocol):
    """Looks at the updates of a step."""

    def record(self, update: Update) -> None:
        """Called for every batch of matrices."""


class Muon:
    """Muon: momentum, orthogonalised, with decoupled weight decay.

    buf <- momentum buf + g; M = g + momentum buf (Nesterov) or buf; O = PolarExpress(M);
    w <- w (1 - lr wd) - lr scale O. All fp32 but the iteration, whose dtype is configured.

    A matrix whose M is not finite keeps its weights (but for decay) and is named by :meth:`non_finite`.

    Args:
        config: Muon's settings.
        owned: whole logical matrices of this rank; of those that tensor parallelism cuts this rank's part. Every
            tensor-parallel rank has the same ones, gathers them, and computes the update of the whole.
        polar_express: the operation.
        tensor_group: tensor-parallel ranks.
        deterministic: orthogonalise in batches of one fixed size, so that results do not depend on what else this
            rank owns.

    Raises:
        ValueError: a piece is no logical matrix.

    Attributes:
        probes: look at every update while they are here.
    """

    def __init__(
        self,
        config: MuonConfig,
        owned: Sequence[OwnedPiece],
        polar_express: PolarExpress,
        tensor_group: dist.ProcessGroup | None = None,
        deterministic: bool = False,
    ) -> None:
        self.probes: list[Probe] = []
        self._config = config
        self._owned = list(owned)
        self._polar_express = polar_express
        self._tensor_group = tensor_group
        self._rows = polar_express_rows(config.steps)
        self._dtype = DTYPES[config.precision]
        self._master = MasterWeights(self._owned)
        self._momentum = [torch.zeros_like(weight) for weight in self._master.weights]
        self._batches = batches_of([_place(piece) for piece in self._owned], config, deterministic)
        self._largest: list[Tensor] = []
        self._num_steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self._owned:
            torch._foreach_mul_(self._momentum, self._config.momentum)
            torch._foreach_add_(self._momentum, [piece.gradient for piece in self._owned])
        self._largest = [self._update(batch, lr) for batch in self._batches]
        self._master.write_back()
        self._num_steps += 1

    def state(self) -> Mapping[str, Sequence[StateTensor]]:
        pairs = zip(self._owned, self._momentum, strict=True)
        return {"momentum": [StateTensor(piece, buffer) for piece, buffer in pairs]} | self._master.state()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._largest = []  # of an update before what the state is now

    @property
    def owned(self) -> Sequence[OwnedPiece]:
        """The matrices that it updates."""
        return self._owned

    def num_non_finite(self) -> Tensor:
        counts = [(~largest.isfinite()).sum(dtype=torch.float64) for largest in self._largest]
        return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64)

    def non_finite(self) -> list[str]:
        return [name for name, largest in self.largest().items() if not math.isfinite(largest)]

    def largest(self) -> dict[str, float]:
        """By matrix the largest |entry| of the iteration's state and intermediates in the last step."""
        return {
            self._owned[index].name: value
            for batch, largest in zip(self._batches, self._largest, strict=False)
            for index, value in zip(batch.indices, largest.tolist(), strict=True)
        }

    def _update(self, batch: Batch, lr: float) -> Tensor:
        pieces = [self._owned[index] for index in batch.indices]
        m_NRC = self._whole(pieces, [self._direction(index) for index in batch.indices])
        if batch.size > len(pieces):
            m_NRC = torch.cat([m_NRC, m_NRC.new_zeros(batch.size - len(pieces), *m_NRC.shape[1:])])
        o_NRC, largest_N = self._polar_express(m_NRC, self._rows, self._dtype)
        o_NRC, largest_N = o_NRC[: len(pieces)], largest_N[: len(pieces)]
        if self.probes:
            update = Update(
                pieces,
                [self._momentum[index] for index in batch.indices],
                [self._scale(piece) for piece in pieces],
                o_NRC,
                largest_N,
                [lr * piece.piece.rule.lr_multiplier for piece in pieces],
                self._whole,
            )
            for probe in self.probes:
                probe.record(update)
        o_NRC.masked_fill_(~largest_N.isfinite()[:, None, None], 0.0)
        for index, piece, o_RC in zip(batch.indices, pieces, o_NRC, strict=True):
            rule = piece.piece.rule
            scaled = lr * rule.lr_multiplier
            weight = self._master.weights[index].view(_place(piece).shape)
            weight.mul_(1 - scaled * rule.weight_decay)
            weight.add_(_oriented(o_RC, piece), alpha=-scaled * self._scale(piece))
        return largest_N

    def _direction(self, index: int) -> Tensor:
        """What is orthogonalised of a matrix, [n]: its part on this rank."""
        piece, buffer = self._owned[index], self._momentum[index]
        return torch.add(piece.gradient, buffer, alpha=self._config.momentum) if self._config.nesterov else buffer

    def _scale(self, piece: OwnedPiece) -> float:
        return SCALES[self._config.scale](*_place(piece).whole_shape)

    def _whole(self, pieces: Sequence[OwnedPiece], tensors: Sequence[Tensor]) -> Tensor:
        """Whole wide matrices [N, R, C], of each of which this rank has [n]."""
        m_NRC = torch.stack([_wide(*pair) for pair in zip(pieces, tensors, strict=True)])
        if _place(pieces[0]).is_whole:
            return m_NRC
        assert self._tensor_group is not None
        parts = [torch.empty_like(m_NRC) for _ in range(self._tensor_group.size())]
        dist.all_gather(parts, m_NRC.contiguous(), group=self._tensor_group)
        return torch.cat(parts, dim=1 + _cut_axis(pieces[0]))


def _place(piece: OwnedPiece) -> MatrixPlace:
    if piece.piece.matrix is None:
        raise ValueError(f"{piece.name} is no logical matrix: Muon cannot orthogonalise it")
    return piece.piece.matrix


def _wide(piece: OwnedPiece, m: Tensor) -> Tensor:
    """This rank's part [n] of a matrix in its shape, transposed where the matrix is taller than wide."""
    place = _place(piece)
    rows, columns = place.whole_shape
    return m.view(place.shape).t() if rows > columns else m.view(place.shape)


def _cut_axis(piece: OwnedPiece) -> int:
    """The axis of the wide matrix that tensor parallelism cuts."""
    place = _place(piece)
    rows, columns = place.whole_shape
    return 1 - place.part.axis if rows > columns else place.part.axis


def _oriented(o_RC: Tensor, piece: OwnedPiece) -> Tensor:
    """Of a whole wide matrix this rank's part, in the shape that the piece has."""
    place = _place(piece)
    rows, columns = place.whole_shape
    own = o_RC.t() if rows > columns else o_RC
    return own if place.is_whole else own.chunk(place.part.count, dim=place.part.axis)[place.part.index]
