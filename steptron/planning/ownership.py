"""Who owns what of a rank's parameters (ZeRO-1), by arithmetic: the buffers of a training, before anything is built.

``plan_buffers`` decides; it is the same function that training calls, with the parts that the placement says a rank
holds. ``steptron.planning.rank`` builds a rank for real, and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steptron.config.schema import OptimizerConfig, PretrainConfig
from steptron.model.layer_spec import ParameterRole, trained_parameters
from steptron.optim.batches import Batch, batches_of
from steptron.optim.buffer_plan import BufferPlan, Piece, newton_schulz_cost, plan_buffers
from steptron.optim.ownership import Reduction
from steptron.optim.rules import Algorithm
from steptron.parallel.factors import ranks_by_cell
from steptron.planning.placement import HeldParameter, Placement


@dataclass(frozen=True)
class BufferFigures:
    """A gradient buffer in figures.

    Attributes:
        title: what it holds.
        group: name of the group that shares its parameters.
        ranks: ranks of the group.
        parameters: elements that stand for parameters.
        padding: elements that stand for none.
        reduction: how its gradients are added up.
        spans: parts that are reduced one by one.
        scattered_padding: elements of padding that reduce-scattering has, or would have where it is refused.
        imbalance: work of the owner with most matrices to orthogonalise over the mean of all owners, in FLOPs; None
            where there is nothing to orthogonalise.
    """

    title: str
    group: str
    ranks: int
    parameters: int
    padding: int
    reduction: Reduction
    spans: int
    scattered_padding: int
    imbalance: float | None

    @property
    def elements(self) -> int:
        return self.parameters + self.padding


def trained_parts(config: PretrainConfig, placement: Placement, rank: int) -> list[HeldParameter]:
    """Of what a rank holds, what gets gradients, in module order."""
    trained = trained_parameters(config)
    names = {parameter.name for parameter in trained}
    return [part for part in placement.held(rank) if part.name in names]


def idle_parameters(placement: Placement) -> frozenset[str]:
    """Parameters of the MTP depths that do not run."""
    idle = placement.spec.mtp[placement.mtp_depths :]
    return frozenset(parameter.name for depth in idle for parameter in depth.parameters())


def rank_buffers(config: PretrainConfig, placement: Placement, rank: int) -> list[BufferPlan]:
    """The gradient buffers of a rank.

    All ranks of a pipeline rank have alike ones, but for which experts and rows lie in them.
    """
    trained = trained_parts(config, placement, rank)
    stages = placement.chunks(placement.coordinates(rank).pipeline)
    return plan_buffers(
        [part.shard for part in trained],
        config.optimizer,
        placement.tensor,
        placement.group_sizes,
        embedding_is_shared=placement.mtp_depths > 0
        and any(
            part.shard.parameter.role is ParameterRole.EMBEDDING
            and not (stages[part.chunk].is_first and stages[part.chunk].is_last)
            for part in trained
        ),
    )


def cells_of(ranks: Sequence[int], node_size: int | None) -> dict[int, int]:
    """Which of a buffer's equal cells each rank owns.

    Args:
        ranks: of the group that shares the buffer's parameters.
        node_size: ranks per node, where reductions are factored by nodes: cells of the first members of all nodes
            come first then.
    """
    return {rank: cell for cell, rank in enumerate(ranks_by_cell(ranks, node_size))}


def owned_pieces(config: PretrainConfig, placement: Placement, rank: int, buffers: Sequence[BufferPlan]) -> list[Piece]:
    """What a rank updates."""
    groups = placement.groups(rank)
    owned = []
    for buffer in buffers:
        cell = cells_of(groups[buffer.replicas], config.parallel.node_size)[rank]
        owned += [piece for piece in buffer.pieces if piece.owner == cell]
    return owned


def owned_in_stage(
    config: PretrainConfig, placement: Placement, rank: int, buffers: Sequence[BufferPlan]
) -> Iterator[tuple[int, list[Piece]]]:
    """What every rank of a pipeline rank updates, in the names of one of them, which has these buffers.

    The others have other experts and rows in the same places.
    """
    first = rank - rank % placement.stage_size
    cells: dict[str, dict[int, int]] = {}
    for leader in range(first, first + max(placement.tensor, placement.expert)):
        groups = placement.groups(leader)
        for name in {buffer.replicas for buffer in buffers}:
            if leader not in cells.setdefault(name, {}):
                cells[name] |= cells_of(groups[name], config.parallel.node_size)
    by_cell: list[dict[int, list[Piece]]] = []
    for buffer in buffers:
        by_cell.append({})
        for piece in buffer.pieces:
            by_cell[-1].setdefault(piece.owner, []).append(piece)
    for member in range(first, first + placement.stage_size):
        yield (
            member,
            [
                piece
                for buffer, pieces in zip(buffers, by_cell, strict=True)
                for piece in pieces.get(cells[buffer.replicas][member], ())
            ],
        )


def figures_of(buffer: BufferPlan, config: OptimizerConfig) -> BufferFigures:
    """A buffer in figures."""
    layout = buffer.layout
    costs = [0.0] * layout.ranks
    for piece in buffer.pieces:
        if piece.rule.algorithm is Algorithm.MUON and piece.matrix is not None:
            costs[piece.owner] += newton_schulz_cost(piece.matrix.whole_shape, config.muon.steps)
    parameters = sum(shard.size for shard in buffer.shards)
    return BufferFigures(
        buffer.title,
        buffer.replicas,
        layout.ranks,
        parameters,
        layout.padding,
        layout.reduction,
        len(layout.spans),
        round(layout.scattered_padding * parameters),
        max(costs) / (sum(costs) / len(costs)) if any(costs) else None,
    )


def muon_batches(pieces: Sequence[Piece], config: OptimizerConfig, deterministic: bool) -> list[Batch]:
    """How Muon batches the matrices among what a rank owns."""
    matrices = [piece.matrix for piece in pieces if piece.rule.algorithm is Algorithm.MUON]
    return batches_of([place for place in matrices if place is not None], config.muon, deterministic)
