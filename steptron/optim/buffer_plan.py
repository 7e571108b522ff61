"""Which gradient buffers a rank has, what lies in each, and who owns it. Plain data, no torch: planners read it too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import ParameterRole
from steptron.model.parameter_shards import MatrixPlace, ParameterShard, matrices_of, replicas_of
from steptron.optim.ownership import BufferLayout, MatrixRun, OwnedRun, Unit, lay_out
from steptron.optim.rules import Algorithm, Rule, rule_of


@dataclass(frozen=True)
class Piece:
    """What one rank updates by one rule.

    Attributes:
        shard: the rank's part of a stored parameter.
        start, stop: run of its flattened tensor.
        rule: how it is updated.
        owner: the rank's number among those that share the parameter.
        matrix: the logical matrix that the run is; None where a parameter may be cut anywhere.
    """

    shard: ParameterShard
    start: int
    stop: int
    rule: Rule
    owner: int
    matrix: MatrixPlace | None

    @property
    def name(self) -> str:
        """The logical matrix, or the parameter."""
        return self.shard.parameter.name if self.matrix is None else self.matrix.name


@dataclass(frozen=True)
class BufferPlan:
    """A gradient buffer.

    Attributes:
        replicas: name of the group that shares its parameters, as in Megatron-Core's ``ProcessGroupCollection``.
        holds_matrices: its parameters are owned by whole logical matrices.
        is_shared_embedding: it holds the embedding, which two pipeline stages have.
        shards: in the order in which a backward pass completes their gradients.
        order: place of each among all parameters of the rank in that order.
        layout: where each lies and who owns what.
        pieces: who updates what, by which rule.
    """

    replicas: str
    holds_matrices: bool
    is_shared_embedding: bool
    shards: tuple[ParameterShard, ...]
    order: tuple[int, ...]
    layout: BufferLayout
    pieces: tuple[Piece, ...]

    @property
    def title(self) -> str:
        """What it holds, in words."""
        kind = "matrices" if self.holds_matrices else "other parameters"
        if self.is_shared_embedding:
            kind = "shared embedding"
        return f"{kind} over {self.replicas}"


def plan_buffers(
    shards: Iterable[ParameterShard],
    config: OptimizerConfig,
    tensor_size: int,
    group_sizes: Mapping[str, int],
    embedding_is_shared: bool = False,
) -> list[BufferPlan]:
    """Sorts a rank's trained parameters into buffers and lays them out.

    One buffer for each set of ranks that share parameters and each way to own them, over all model chunks of the
    rank: fewer buffers pad less.

    Args:
        shards: the rank's parts, all chunks, in module order.
        config: the optimizer.
        tensor_size: tensor-parallel ranks.
        group_sizes: ranks of the groups, by name.
        embedding_is_shared: another pipeline stage has the embedding too: both keep it in a buffer of its own, so that
            they cut it alike.

    Raises:
        ValueError: a matrix that is to be orthogonalised is not what its spec declares.
    """
    grouped: dict[tuple[str, bool, bool], list[tuple[int, ParameterShard]]] = {}
    for order, shard in enumerate(reversed(list(shards))):
        role = shard.parameter.role
        shared = embedding_is_shared and role is ParameterRole.EMBEDDING
        key = replicas_of(role, tensor_size), _is_orthogonalised(shard, config), shared
        grouped.setdefault(key, []).append((order, shard))
    sharding = config.sharding
    plans = []
    for (replicas, holds_matrices, shared), members in grouped.items():
        own = tuple(shard for _, shard in members)
        units = [Unit(shard.size, _runs(shard, config) if holds_matrices else ()) for shard in own]
        layout = lay_out(units, group_sizes[replicas], sharding.reduction, sharding.max_padding)
        divided = [_matrices(shard, config) if holds_matrices else _by_rule(shard, config) for shard in own]
        pieces = tuple(piece for run in layout.runs for piece in _pieces(own[run.unit], divided[run.unit], run))
        plans.append(BufferPlan(replicas, holds_matrices, shared, own, tuple(o for o, _ in members), layout, pieces))
    return plans


def newton_schulz_cost(shape: tuple[int, int], steps: int) -> float:
    """FLOPs of orthogonalising a matrix: T (4 l s^2 + 2 s^3) for sides s <= l."""
    short, long = sorted(shape)
    return float(steps * (4 * long * short**2 + 2 * short**3))


def _is_orthogonalised(shard: ParameterShard, config: OptimizerConfig) -> bool:
    roles = {part.matrix.role for part in shard.matrices}
    return any(rule_of(config, role).algorithm is Algorithm.MUON for role in roles)


def _runs(shard: ParameterShard, config: OptimizerConfig) -> tuple[MatrixRun, ...]:
    """Of a parameter some of whose matrices Muon takes; those that AdamW takes cost next to nothing."""
    return tuple(
        MatrixRun(
            place.start,
            place.stop,
            newton_schulz_cost(place.whole_shape, config.muon.steps)
            if rule_of(config, place.part.matrix.role).algorithm is Algorithm.MUON
            else float(place.stop - place.start),
        )
        for place in matrices_of(shard)
    )


@dataclass(frozen=True)
class _Ruled:
    """A run of a parameter's flattened tensor that one rule covers; a matrix where it is owned whole."""

    start: int
    stop: int
    rule: Rule
    matrix: MatrixPlace | None = None


def _matrices(shard: ParameterShard, config: OptimizerConfig) -> list[_Ruled]:
    return [
        _Ruled(place.start, place.stop, rule_of(config, place.part.matrix.role), place) for place in matrices_of(shard)
    ]


def _by_rule(shard: ParameterShard, config: OptimizerConfig) -> list[_Ruled]:
    rules = {rule_of(config, part.matrix.role) for part in shard.matrices}
    if len(rules) == 1:
        return [_Ruled(0, shard.size, rules.pop())]
    return [_Ruled(ruled.start, ruled.stop, ruled.rule) for ruled in _matrices(shard, config)]


def _pieces(shard: ParameterShard, divided: Sequence[_Ruled], run: OwnedRun) -> Iterator[Piece]:
    first = bisect_right(divided, run.start, key=lambda ruled: ruled.stop)
    for ruled in divided[first:]:
        start, stop = max(ruled.start, run.start), min(ruled.stop, run.stop)
        if start >= stop:
            break
        if ruled.matrix is not None and stop - start != ruled.stop - ruled.start:
            raise ValueError(f"{ruled.matrix.name} would be orthogonalised in parts: only whole matrices can be owned")
        yield Piece(shard, start, stop, ruled.rule, run.owner, ruled.matrix)
