"""Weight clipping: expert projections whose outputs have grown beyond a bound are scaled back.

W <- W tau / max_x ||W x|| where that maximum, over the tokens routed to an expert since the last checkpoint, exceeds
tau; of each gate, up and down projection by itself. The report (section 4.1 and appendix) has it for comparison with
activation clipping, which bounds what weight clipping only delays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steptron.model.layer_spec import EXPERT_ROLES
from steptron.model.output_norms import PROJECTIONS
from steptron.model.parameter_shards import matrices_of
from steptron.optim.base import Optimizer
from steptron.optim.owned import OwnedPiece


@dataclass(frozen=True)
class Clipped:
    """A projection that is scaled back: its name with the expert's number, and its largest output norm before."""

    name: str
    largest: float


@torch.no_grad()
def clip_weights(
    optimizer: Optimizer, owned: Sequence[OwnedPiece], maxima: Mapping[str, Tensor], threshold: float
) -> list[Clipped]:
    """Scales what this rank owns of the projections beyond the bound; other ranks get it by a gather.

    fp32 weights behind narrower parameters are scaled and rounded into the parameters again. Momentum and moments stay
    as they are.

    Args:
        optimizer: keeps the fp32 weights.
        owned: what this rank updates.
        maxima: fp32 [experts of this rank, 3], largest output norm of gate, up and down, by the prefix of the layer's
            experts; the same on all ranks that hold the same experts.
        threshold: tau.

    Returns:
        The projections of which this rank owns the first element, in the order of ``owned``. Those whose largest norm
        is not finite are among them, and keep their weights.
    """
    masters = {id(state.owned): state.tensor for state in optimizer.state().get("master", ())}
    host = {prefix: maximum_E3.tolist() for prefix, maximum_E3 in maxima.items()}
    clipped = []
    for piece in owned:
        for run in _projections(piece):
            largest = host[run.prefix][run.expert][run.column]
            if largest <= threshold:  # NaN is not
                continue
            if math.isfinite(largest):
                part = slice(run.start, run.stop)
                weight = masters.get(id(piece), piece.weight)[part]
                weight.mul_(threshold / largest)
                if id(piece) in masters:
                    piece.weight[part].copy_(weight)
            if run.is_first:
                clipped.append(Clipped(run.name, largest))
    return clipped


@dataclass(frozen=True)
class _Run:
    """Elements [start, stop) of a piece that belong to one projection of one expert.

    Attributes:
        prefix: of the layer's experts.
        expert: number among those of this rank.
        column: which projection.
        start, stop: in the piece.
        is_first: the projection's first element is among them.
        name: of the projection.
    """

    prefix: str
    expert: int
    column: int
    start: int
    stop: int
    is_first: bool
    name: str


def _projections(owned: OwnedPiece) -> Iterator[_Run]:
    """The parts of experts' projections in a piece, which may have been cut anywhere."""
    piece = owned.piece
    if piece.shard.parameter.role not in EXPERT_ROLES:
        return
    prefix = piece.shard.parameter.name.rpartition(".")[0]
    for place in matrices_of(piece.shard):
        start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
        if start < stop:
            expert = place.start // (piece.shard.shape[1] * piece.shard.shape[2])
            yield _Run(
                prefix,
                expert,
                PROJECTIONS.index(place.part.matrix.role),
                start - piece.start,
                stop - piece.start,
                start == place.start,
                place.name,
            )
