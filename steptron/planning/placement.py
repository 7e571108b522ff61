"""Which rank holds which part of which parameter, for every rank of a layout, by arithmetic.

Ranks are numbered as Megatron-Core numbers them: a pipeline rank is a run of world / pipeline successive ranks,
which are laid out twice: for attention and dense layers tensor-parallel ranks side by side, then context, then
data; for experts expert-parallel ranks side by side, then expert-data. ``steptron.planning.rank`` builds a rank for
real, and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from steptron.config.checks import smallest_world_size
from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import ModelSpec, ParameterSpec, model_spec
from steptron.model.parameter_shards import Cut, ParameterShard, Place, cut_of, shard
from steptron.model.stages import Stage, chunks_of, stages_of


@dataclass(frozen=True)
class Coordinates:
    """A rank's number in each of its groups."""

    pipeline: int
    tensor: int
    context: int
    data: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class HeldParameter:
    """A part of a parameter on a rank.

    Attributes:
        shard: the part.
        chunk: which of the rank's model chunks holds it.
        is_copy: it is the last stage's copy of the embedding, which no sum over the model counts.
    """

    shard: ParameterShard
    chunk: int
    is_copy: bool

    @property
    def name(self) -> str:
        return self.shard.parameter.name


@dataclass(frozen=True)
class Placement:
    """A model over ``world_size`` ranks.

    Attributes:
        spec: the model.
        stages: in the order in which a micro-batch passes through them; stage s is on pipeline rank s % pipeline.
        mtp_depths: MTP depths that run; with any, the last stage needs the embedding.
        world_size, pipeline, tensor, context, expert: numbers of ranks.
    """

    spec: ModelSpec
    stages: tuple[Stage, ...]
    mtp_depths: int
    world_size: int
    pipeline: int
    tensor: int
    context: int
    expert: int

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline rank: tensor x context x data, or expert x expert-data."""
        return self.world_size // self.pipeline

    @property
    def data(self) -> int:
        return self.stage_size // (self.tensor * self.context)

    @property
    def expert_data(self) -> int:
        return self.stage_size // self.expert

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: the {self.world_size:,} ranks are numbered 0 to {self.world_size - 1}")
        pipeline, inside = divmod(rank, self.stage_size)
        rest, tensor = divmod(inside, self.tensor)
        data, context = divmod(rest, self.context)
        expert_data, expert = divmod(inside, self.expert)
        return Coordinates(pipeline, tensor, context, data, expert, expert_data)

    @property
    def group_sizes(self) -> dict[str, int]:
        """Ranks of the groups, by the names of ``ProcessGroupCollection``, and of all. Experts are whole (expert-TP 1),
        so that "tp_ep" has EP's ranks."""
        return {
            "tp": self.tensor,
            "cp": self.context,
            "tp_cp": self.tensor * self.context,
            "pp": self.pipeline,
            "embd": min(self.pipeline, 2),
            "dp": self.data,
            "dp_cp": self.data * self.context,
            "tp_dp_cp": self.stage_size,
            "ep": self.expert,
            "tp_ep": self.expert,
            "expt_dp": self.expert_data,
            "world": self.world_size,
        }

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The ranks of each group that a rank belongs to, by the names of Megatron-Core's
        ``ProcessGroupCollection``."""
        own = self.coordinates(rank)
        first = own.pipeline * self.stage_size
        inside = rank - first
        stage = range(first, first + self.stage_size)
        tensor_first = rank - own.tensor
        context_first = rank - own.context * self.tensor
        replica_size = self.tensor * self.context
        return {
            "pp": tuple(range(inside, self.world_size, self.stage_size)),
            "tp": tuple(range(tensor_first, tensor_first + self.tensor)),
            "cp": tuple(range(context_first, context_first + replica_size, self.tensor)),
            "dp": tuple(stage[inside % replica_size :: replica_size]),
            "dp_cp": tuple(stage[own.tensor :: self.tensor]),
            "tp_dp_cp": tuple(stage),
            "ep": tuple(range(rank - own.expert, rank - own.expert + self.expert)),
            "expt_dp": tuple(stage[own.expert :: self.expert]),
        }

    def place(self, rank: int) -> Place:
        """Which part of its pipeline rank's parameters a rank holds."""
        own = self.coordinates(rank)
        return Place(own.tensor, self.tensor, own.expert, self.expert)

    def chunks(self, pipeline_rank: int) -> list[Stage]:
        """The stages of a pipeline rank, in the order of its chunks."""
        return chunks_of(self.stages, pipeline_rank, self.pipeline)

    def held(self, rank: int) -> tuple[HeldParameter, ...]:
        """Every part that a rank holds, the router's selection biases (buffers) included, in module order."""
        return self._parts(self.coordinates(rank).pipeline, self.place(rank))

    def owners(self, held: HeldParameter, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part as ``rank``, itself included: those over which its gradient is added up.

        The embedding's copy has its owners on the last pipeline rank, as if it were a parameter of its own.
        """
        groups = self.groups(rank)
        match cut_of(held.shard.parameter.role):
            case Cut.EXPERTS:
                return groups["expt_dp"]
            case Cut.NONE:
                return groups["tp_dp_cp"]
        return groups["dp_cp"]

    def parameters_of(self, stage: Stage) -> Iterator[tuple[ParameterSpec, bool]]:
        """The parameters of a stage, whole, in module order; whether each is the embedding's copy."""
        embedding, final_norm, head = self._outer
        has_copy = stage.is_last and not stage.is_first and self.mtp_depths > 0
        if stage.is_first or has_copy:
            yield embedding, has_copy
        for index in stage.layers:
            yield from ((parameter, False) for parameter in self.spec.layers[index].parameters())
        if stage.is_last:
            yield final_norm, False
            yield head, False
            yield from ((parameter, False) for depth in self.spec.mtp for parameter in depth.parameters())
            yield from ((parameter, False) for parameter in self.spec.value_head_parameters())

    def size_over_ranks(self) -> Fraction:
        """Parameters of the whole model: of every rank's parts their size over the number of their owners, copies
        left out."""
        total = Fraction(0)
        for rank in range(self.world_size):
            owners = {Cut.EXPERTS: self.expert_data, Cut.NONE: self.stage_size}
            sizes = dict.fromkeys(Cut, 0)
            for held in self.held(rank):
                if not held.is_copy:
                    sizes[cut_of(held.shard.parameter.role)] += held.shard.size
            total += sum(Fraction(size, owners.get(cut, self.data * self.context)) for cut, size in sizes.items())
        return total

    @cached_property
    def _outer(self) -> tuple[ParameterSpec, ParameterSpec, ParameterSpec]:
        """Embedding, final norm and head."""
        embedding, *_, final_norm, head = self.spec.main_parameters()
        return embedding, final_norm, head

    @cached_property
    def _memo(self) -> dict[tuple[int, Place], tuple[HeldParameter, ...]]:
        return {}

    def _parts(self, pipeline_rank: int, place: Place) -> tuple[HeldParameter, ...]:
        key = pipeline_rank, place
        if key not in self._memo:
            self._memo[key] = tuple(
                HeldParameter(shard(parameter, place), chunk, is_copy)
                for chunk, stage in enumerate(self.chunks(pipeline_rank))
                for parameter, is_copy in self.parameters_of(stage)
            )
        return self._memo[key]


def placement(config: PretrainConfig, world_size: int | None = None) -> Placement:
    """Lays the model of a checked configuration over processes.

    Args:
        config: a configuration that ``steptron.config.checks`` accepts for this number of processes.
        world_size: number of processes; the fewest that the layout takes when None.
    """
    parallel = config.parallel
    return Placement(
        spec=model_spec(config.model, config.train.recompute),
        stages=tuple(stages_of(config.model, parallel)),
        mtp_depths=config.loss.mtp_train_depths,
        world_size=smallest_world_size(parallel) if world_size is None else world_size,
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        expert=parallel.expert,
    )
