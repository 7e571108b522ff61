"""A layout and its ranks in figures, before anything runs: what `steptron plan` shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from steptron.config.checks import check
from steptron.config.schema import PretrainConfig
from steptron.model.parameter_shards import vocabulary_rows
from steptron.model.stages import Stage
from steptron.optim.buffer_plan import BufferPlan
from steptron.parallel.traffic import CommunicationVolume
from steptron.planning.communication import step_communication
from steptron.planning.flops import stage_forward_flops
from steptron.planning.memory import (
    Assumptions,
    RankMemory,
    optimizer_state,
    packed_weights_padding,
    rank_memory,
    update_memory,
)
from steptron.planning.ownership import BufferFigures, figures_of, owned_in_stage, rank_buffers
from steptron.planning.pipeline import ideal_idle_share, idle_share
from steptron.planning.placement import HeldParameter, Placement, placement
from steptron.planning.rank import BuiltRank, build_rank


@dataclass(frozen=True)
class StagePlan:
    """One of the pipeline x virtual_pipeline stages.

    Attributes:
        index: its place in the order in which a micro-batch passes through.
        pipeline_rank, chunk: where it lies.
        stage: its layers, and whether it is the first and the last.
        parameters: of the whole stage, over its tensor- and expert-parallel ranks; copies left out.
        flops_share: of the model's FLOPs of a forward pass.
    """

    index: int
    pipeline_rank: int
    chunk: int
    stage: Stage
    parameters: int
    flops_share: float


@dataclass(frozen=True)
class PipelineRankPlan:
    """A pipeline rank, by the one of its ranks that needs most memory. The others hold and do as much, but for what
    they own and update, and for the keys of full layers: of context-parallel ranks the first sees most.

    Attributes:
        rank: the rank that needs most memory, the first of several.
        parameters: that a rank holds, the copy of the embedding included.
        flops_share: of the model's FLOPs of a forward pass.
        idle_share: of a step, waiting for other pipeline ranks when only computing takes time.
        memory: in a step.
        communication: in a step.
        buffers: its gradient buffers.
    """

    pipeline_rank: int
    rank: int
    parameters: int
    flops_share: float
    idle_share: float
    memory: RankMemory
    communication: CommunicationVolume
    buffers: tuple[BufferFigures, ...]


@dataclass(frozen=True)
class LayoutPlan:
    """A layout.

    Attributes:
        micro_batches: of a rank in a step at the full batch size.
        ideal_idle_share: what each pipeline rank would wait if all stages took the same time.
    """

    placement: Placement
    assumed: Assumptions
    micro_batches: int
    ideal_idle_share: float
    stages: tuple[StagePlan, ...]
    ranks: tuple[PipelineRankPlan, ...]

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest pipeline rank over the mean."""
        return max(rank.flops_share for rank in self.ranks) * len(self.ranks)

    @property
    def fullest(self) -> PipelineRankPlan:
        """The pipeline rank whose ranks need most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.peak)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layout": _sizes(self.placement),
            "assumptions": asdict(self.assumed),
            "micro_batches": self.micro_batches,
            "imbalance": self.imbalance,
            "ideal_idle_share": self.ideal_idle_share,
            "stages": [asdict(stage) for stage in self.stages],
            "pipeline_ranks": [
                {
                    "pipeline_rank": rank.pipeline_rank,
                    "rank": rank.rank,
                    "parameters": rank.parameters,
                    "flops_share": rank.flops_share,
                    "idle_share": rank.idle_share,
                    "memory": _memory(rank.memory),
                    "communication": _communication(rank.communication),
                    "gradient_buffers": [_figures(buffer) for buffer in rank.buffers],
                }
                for rank in self.ranks
            ],
        }


@dataclass(frozen=True)
class OwnedParameter:
    """A part of a parameter on a rank, as it was built.

    Attributes:
        held: the part.
        shape: its shape as built.
        owners: the ranks that hold the same part.
        trained: whether it gets gradients.
    """

    held: HeldParameter
    shape: tuple[int, ...]
    owners: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class RankPlan:
    """One rank, built for real.

    Attributes:
        built: groups, chunks and buffers.
        parameters: every parameter and router bias, in module order.
        buffers: figures of the gradient buffers, in the order in which they were built.
        memory: in a step.
        communication: in a step.
        sequence_unit: tokens that the length of sequences must be a multiple of.
        padding: what is filled up, by name, each in the unit that the name says; 0 where nothing is.
    """

    placement: Placement
    built: BuiltRank
    parameters: tuple[OwnedParameter, ...]
    buffers: tuple[BufferFigures, ...]
    memory: RankMemory
    communication: CommunicationVolume
    sequence_unit: int
    padding: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layout": _sizes(self.placement),
            "rank": self.built.rank,
            "coordinates": asdict(self.built.coordinates),
            "groups": self.built.groups,
            "chunks": [
                {
                    "stage": chunk.index,
                    **asdict(chunk.stage),
                    "embedding_is_copy": chunk.embedding_is_copy,
                }
                for chunk in self.built.chunks
            ],
            "gradient_buffers": [
                {
                    **_figures(figures),
                    "over": built.ranks,
                    "owned": built.owned,
                    "within_node": built.within_node,
                    "between_nodes": built.between_nodes,
                    "names": built.parameters,
                }
                for built, figures in zip(self.built.buffers, self.buffers, strict=True)
            ],
            "parameters": [
                {
                    "name": owned.held.name,
                    "chunk": owned.held.chunk,
                    "shape": owned.shape,
                    "whole_shape": owned.held.shard.parameter.shape,
                    "owners": owned.owners,
                    "is_copy": owned.held.is_copy,
                    "trained": owned.trained,
                }
                for owned in self.parameters
            ],
            "memory": _memory(self.memory),
            "communication": _communication(self.communication),
            "sequence_unit": self.sequence_unit,
            "padding": dict(self.padding),
        }


def check_elsewhere(config: PretrainConfig, world_size: int, assumed: Assumptions) -> None:
    """Refuses what no machine can run; what this one lacks (devices, packages, folders) is no matter.

    Raises:
        ConfigError: lists every problem.
    """
    logging = config.train.logging.model_copy(update={"tensorboard": False, "wandb_project": None})
    elsewhere = {"output": Path(gettempdir()), "logging": logging, "kernels": "auto", "products": "auto"}
    train = config.train.model_copy(update=elsewhere)
    check(config.model_copy(update={"train": train}), world_size, assumed.device)


def plan_layout(config: PretrainConfig, world_size: int, assumed: Assumptions) -> LayoutPlan:
    """Computes the figures of a checked configuration's layout."""
    place = placement(config, world_size)
    length = config.data.sequence_length
    micro_batches = config.train.micro_batches(place.data)
    flops = [stage_forward_flops(place.spec, stage, length, place.mtp_depths) for stage in place.stages]
    chunks = len(place.stages) // place.pipeline
    idle = idle_share([flops[rank :: place.pipeline] for rank in range(place.pipeline)], micro_batches)
    stages = tuple(
        StagePlan(
            index,
            index % place.pipeline,
            index // place.pipeline,
            stage,
            sum(parameter.size for parameter, is_copy in place.parameters_of(stage) if not is_copy),
            flops[index] / sum(flops),
        )
        for index, stage in enumerate(place.stages)
    )
    ranks = []
    for pipeline_rank in range(place.pipeline):
        buffers = rank_buffers(config, place, pipeline_rank * place.stage_size)
        rank = _fullest_rank(config, place, pipeline_rank * place.stage_size, buffers, assumed)
        ranks.append(
            PipelineRankPlan(
                pipeline_rank,
                rank,
                sum(part.shard.size for part in place.held(rank)),
                sum(flops[pipeline_rank :: place.pipeline]) / sum(flops),
                idle[pipeline_rank],
                rank_memory(config, place, rank, assumed, buffers),
                step_communication(config, place, rank, buffers=buffers),
                tuple(figures_of(buffer, config.optimizer) for buffer in buffers),
            )
        )
    ideal = float(ideal_idle_share(place.pipeline, chunks, micro_batches))
    return LayoutPlan(place, assumed, micro_batches, ideal, stages, tuple(ranks))


def plan_rank(config: PretrainConfig, world_size: int, rank: int, assumed: Assumptions) -> RankPlan:
    """Builds one rank of a checked configuration's layout, and computes its figures.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process has a default process group already.
    """
    place = placement(config, world_size)
    built = build_rank(config, world_size, rank)
    plans = [buffer.plan for buffer in built.buffers]
    shapes = {name: (shape, chunk) for chunk in built.chunks for name, shape in chunk.shapes.items()}
    owned = tuple(
        OwnedParameter(
            held, shapes[held.name][0], place.owners(held, rank), held.name not in shapes[held.name][1].frozen
        )
        for held in place.held(rank)
    )
    unit = place.tensor if place.context == 1 else math.lcm(2 * place.context, place.context * place.tensor)
    padding = {
        "tokens per sequence": -config.data.sequence_length % unit,
        "rows of the vocabulary on the last tensor-parallel rank": place.tensor
        * vocabulary_rows(config.model.vocab_size, place.tensor)
        - config.model.vocab_size,
        "elements of gradient buffers": sum(buffer.elements for buffer in built.buffers)
        - sum(part.held.shard.size for part in owned if part.trained),
        "elements of their reductions": sum(buffer.filling for buffer in built.buffers),
        "bytes of packed weights": packed_weights_padding(place.held(rank), place, assumed),
    }
    return RankPlan(
        place,
        built,
        owned,
        tuple(figures_of(buffer, config.optimizer) for buffer in plans),
        rank_memory(config, place, rank, assumed, plans),
        step_communication(config, place, rank, buffers=plans),
        unit,
        padding,
    )


def _fullest_rank(
    config: PretrainConfig, place: Placement, first: int, buffers: Sequence[BufferPlan], assumed: Assumptions
) -> int:
    """Of the ranks of a pipeline rank the one that needs most memory, the first of several.

    They own different things, and so have more or less of the optimizer's state, and take more or less for their
    updates; with context parallelism they keep different activations.
    """
    candidates: list[tuple[int, float, float]] = []
    for rank, owned in owned_in_stage(config, place, first, buffers):
        size = optimizer_state(owned, config)
        candidates.append((rank, size, size + update_memory(owned, config, assumed)))
    # Those before keep no less for backward passes: one that owns no more than they do cannot need more.
    candidates.sort(key=lambda candidate: place.coordinates(candidate[0]).context)
    possible: list[int] = []
    most = -1.0, -1.0
    for rank, state, update in candidates:
        if state > most[0] or update > most[1]:
            possible.append(rank)
        most = max(most[0], state), max(most[1], update)
    if len(possible) == 1:
        return possible[0]
    return max(possible, key=lambda rank: rank_memory(config, place, rank, assumed, buffers).peak)


def _figures(figures: BufferFigures) -> dict[str, Any]:
    return {**asdict(figures), "reduction": str(figures.reduction), "elements": figures.elements}


def _sizes(place: Placement) -> dict[str, int]:
    return {
        "world_size": place.world_size,
        "pipeline": place.pipeline,
        "virtual_pipeline": len(place.stages) // place.pipeline,
        "tensor": place.tensor,
        "context": place.context,
        "data": place.data,
        "expert": place.expert,
        "expert_data": place.expert_data,
    }


def _memory(memory: RankMemory) -> dict[str, Any]:
    return {**asdict(memory), "fixed": memory.fixed, "peak": memory.peak}


def _communication(volume: CommunicationVolume) -> list[dict[str, Any]]:
    return [
        {"group": group, "kind": str(kind), "calls": traffic.calls, "payload": traffic.payload, "wire": traffic.wire}
        for (group, kind), traffic in volume.traffic.items()
    ]
