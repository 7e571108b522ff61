"""Which parameter lies in which buffer, who updates what by which rule, and that no matrix is taken for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptron.config.loader import load
from steptron.config.schema import ModelConfig, OptimizerConfig, RoleOptimizerConfig, ShardingConfig
from steptron.model.layer_spec import LogicalMatrix, ModelSpec, ParameterRole, ParameterSpec, model_spec
from steptron.model.parameter_shards import MatrixShard, ParameterShard, Place, shard
from steptron.optim import buffer_plan, ownership
from steptron.optim.buffer_plan import BufferPlan, newton_schulz_cost, plan_buffers
from steptron.optim.ownership import Reduction
from steptron.optim.rules import HIDDEN_MATRICES, Algorithm

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "pretrain"
PRESETS = {"nano": CONFIGS / "nano.yaml", "tiny": CONFIGS / "tiny-quickstart.yaml"}
GROUPS = {"expt_dp": 2, "dp_cp": 4, "tp_dp_cp": 8}


@pytest.fixture(autouse=True)
def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells to the element, so that small numbers show what is meant."""
    monkeypatch.setattr(ownership, "ALIGNMENT", 1)


def model(preset: str) -> ModelConfig:
    return load(PRESETS[preset]).config.model


ONE_PROCESS = Place()


def trained(spec: ModelSpec, place: Place = ONE_PROCESS) -> list[ParameterShard]:
    parameters = [p for p in spec.parameters() if p.role is not ParameterRole.ROUTER_BIAS]
    return [shard(parameter, place) for parameter in parameters]


def options(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 1e-2} | changes))


def plans_of(
    config: OptimizerConfig, tensor_size: int = 1, preset: str = "nano", shared: bool = False
) -> list[BufferPlan]:
    place = Place(tensor_size=tensor_size, expert_size=2)
    return plan_buffers(trained(model_spec(model(preset)), place), config, tensor_size, GROUPS, shared)


def roles(plan: BufferPlan) -> set[ParameterRole]:
    return {part.matrix.role for own in plan.shards for part in own.matrices}


EXPERTS = {ParameterRole.EXPERT_GATE, ParameterRole.EXPERT_UP, ParameterRole.EXPERT_DOWN}
VECTORS = {ParameterRole.NORM}
VOCABULARY = {ParameterRole.EMBEDDING, ParameterRole.HEAD}
IN_BOTH_PRESETS = set(HIDDEN_MATRICES)


@pytest.mark.parametrize("preset", PRESETS)
def test_where_parameters_lie(preset: str) -> None:
    by_key = {(plan.replicas, plan.holds_matrices): roles(plan) for plan in plans_of(options(), 1, preset)}
    assert by_key == {
        ("expt_dp", True): EXPERTS,
        ("dp_cp", True): IN_BOTH_PRESETS - EXPERTS,
        ("dp_cp", False): VECTORS | VOCABULARY | {ParameterRole.ROUTER},
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_where_parameters_lie_under_tensor_parallelism(preset: str) -> None:
    by_key = {(plan.replicas, plan.holds_matrices): roles(plan) for plan in plans_of(options(), 2, preset)}
    whole = {ParameterRole.MTP_PROJECTION}
    assert by_key == {
        ("expt_dp", True): EXPERTS,
        ("dp_cp", True): IN_BOTH_PRESETS - EXPERTS - whole,
        ("dp_cp", False): VOCABULARY,
        ("tp_dp_cp", True): whole,
        ("tp_dp_cp", False): VECTORS | {ParameterRole.ROUTER},
    }


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_without_muon_nothing_need_stay_whole(name: str) -> None:
    plans = plans_of(options(name=name))
    assert [(plan.replicas, plan.holds_matrices) for plan in plans] == [("dp_cp", False), ("expt_dp", False)]
    for plan in plans:
        assert plan.layout.padding < GROUPS[plan.replicas] and plan.layout.reduction is Reduction.REDUCE_SCATTER
        assert all(piece.rule.algorithm is Algorithm(name) and piece.matrix is None for piece in plan.pieces)


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("reduction", ["auto", "reduce_scatter", "all_reduce"])
def test_every_element_of_every_parameter_is_updated_by_one_rank_and_one_rule(
    tensor_size: int, name: str, reduction: str
) -> None:
    config = options(name=name, sharding=ShardingConfig(reduction=reduction))
    plans = plans_of(config, tensor_size)
    expected = trained(model_spec(model("nano")), Place(tensor_size=tensor_size, expert_size=2))
    seen = sorted(
        (place, own.parameter.name) for plan in plans for place, own in zip(plan.order, plan.shards, strict=True)
    )
    assert seen == [(place, own.parameter.name) for place, own in enumerate(reversed(expected))]
    for plan in plans:
        assert plan.order == tuple(sorted(plan.order)), "in the order of a backward pass"
        for own in plan.shards:
            pieces = [piece for piece in plan.pieces if piece.shard is own]
            assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
            assert pieces[-1].stop == own.size
            assert all(0 <= piece.owner < GROUPS[plan.replicas] for piece in pieces)


def test_muon_takes_whole_matrices_and_their_names() -> None:
    plans = plans_of(options())
    names = [piece.name for plan in plans for piece in plan.pieces if piece.rule.algorithm is Algorithm.MUON]
    spec = model_spec(model("nano"))
    expected = []
    for parameter in spec.parameters():
        for matrix in parameter.matrices:
            if matrix.role in EXPERTS:
                expected += [f"{matrix.name}[{expert}]" for expert in range(4)]  # of the first of two expert ranks
            elif matrix.role in HIDDEN_MATRICES:
                expected.append(matrix.name)
    assert sorted(names) == sorted(expected) and len(set(names)) == len(names)
    for plan in plans:
        for piece in plan.pieces:
            if piece.rule.algorithm is Algorithm.MUON:
                assert piece.matrix is not None and piece.matrix.is_whole
                assert (piece.start, piece.stop) == (piece.matrix.start, piece.matrix.stop)
                rows, columns = piece.matrix.shape
                assert piece.stop - piece.start == rows * columns


def test_a_shared_embedding_lies_apart() -> None:
    """Both stages that have it must cut it alike, whatever else they hold."""
    plans = plans_of(options(), shared=True)
    (embedding,) = (plan for plan in plans if plan.is_shared_embedding)
    assert roles(embedding) == {ParameterRole.EMBEDDING} and embedding.title == "shared embedding over dp_cp"
    assert not any(plan.is_shared_embedding for plan in plans_of(options()))
    last = [own for own in trained(model_spec(model("nano"))) if "layers.0" not in own.parameter.name]
    (same,) = (p for p in plan_buffers(last, options(), 1, GROUPS, True) if p.is_shared_embedding)
    assert same.layout == embedding.layout


def test_experts_of_all_chunks_are_one_buffer() -> None:
    """Of a rank with layers 2, 3 and 7, 8: padding arises once."""
    spec = model_spec(model("nano"))
    own = [
        shard(parameter, Place(expert_size=2))
        for index in (2, 3, 7, 8)
        for parameter in spec.layers[index].parameters()
        if parameter.role is not ParameterRole.ROUTER_BIAS
    ]
    (plan,) = (p for p in plan_buffers(own, options(), 1, GROUPS | {"expt_dp": 5}) if p.replicas == "expt_dp")
    assert len(plan.shards) == 8 and len(plan.pieces) == 4 * 12 and plan.layout.padding == 2 * 32 * 64
    assert plan.shards[0].parameter.name.startswith("layers.8.")


def test_ranks_that_own_nothing() -> None:
    """More ranks than matrices and elements."""
    spec = model_spec(model("nano"))
    own = [shard(p, Place()) for p in spec.parameters() if p.name in ("mtp.0.projection.weight", "final_norm.weight")]
    for reduction in ("auto", "reduce_scatter"):
        config = options(sharding=ShardingConfig(reduction=reduction))
        plans = plan_buffers(own, config, 1, {"dp_cp": 100})
        owners = {plan.holds_matrices: [piece.owner for piece in plan.pieces] for plan in plans}
        assert owners[True] == [0] and owners[False] == list(range(64))


def test_no_parameters_no_buffers() -> None:
    assert plan_buffers([], options(), 1, GROUPS, True) == []


# ----------------------------------------------------------------------------------------- rules


def of_role(plans: list[BufferPlan], role: ParameterRole) -> set[tuple[Algorithm, float, float, bool]]:
    """Rules of the matrices of a role, and whether each is owned whole."""
    found = set()
    for plan in plans:
        for piece in plan.pieces:
            for part in piece.shard.matrices:
                rows, columns = piece.shard.shape[-2:] if len(piece.shard.shape) > 1 else (piece.shard.shape[0], 1)
                start, stop = part.rows[0] * columns, part.rows[1] * columns
                first = piece.start % (rows * columns)
                if part.matrix.role is role and start <= first < stop:
                    rule = piece.rule
                    found.add((rule.algorithm, rule.lr_multiplier, rule.weight_decay, piece.matrix is not None))
    return found


def test_rules_by_default() -> None:
    plans = plans_of(options(weight_decay=0.3))
    for role in HIDDEN_MATRICES:
        assert of_role(plans, role) == {(Algorithm.MUON, 1.0, 0.3, True)}, role
    for role in (*VOCABULARY, ParameterRole.ROUTER, ParameterRole.NORM):
        assert of_role(plans, role) == {(Algorithm.ADAMW, 1.0, 0.3, False)}, role
    plans = plans_of(options(weight_decay=0.3, decay_norms=False))
    assert of_role(plans, ParameterRole.NORM) == {(Algorithm.ADAMW, 1.0, 0.0, False)}
    assert of_role(plans, ParameterRole.ROUTER) == {(Algorithm.ADAMW, 1.0, 0.3, False)}


def test_sinks_decay_as_norms_do() -> None:
    config = model("nano").model_copy(update={"layout": "S3F1+heads+gate+sink"})
    for decays in (True, False):
        plans = plan_buffers(trained(model_spec(config)), options(decay_norms=decays, weight_decay=0.3), 1, GROUPS)
        assert of_role(plans, ParameterRole.SINK) == {(Algorithm.ADAMW, 1.0, 0.3 if decays else 0.0, False)}


def test_a_router_under_muon() -> None:
    plans = plans_of(options(roles={"router": RoleOptimizerConfig(optimizer="muon")}))
    assert of_role(plans, ParameterRole.ROUTER) == {(Algorithm.MUON, 1.0, 0.1, True)}


def test_a_role_inside_a_fused_parameter_under_adamw() -> None:
    """The head gate's rows of the input projection; its neighbours stay with Muon, each whole."""
    plans = plans_of(options(roles={"head_gate": RoleOptimizerConfig(optimizer="adamw", lr_multiplier=0.5)}))
    assert of_role(plans, ParameterRole.HEAD_GATE) == {(Algorithm.ADAMW, 0.5, 0.1, True)}
    for role in (ParameterRole.QUERY, ParameterRole.KEY, ParameterRole.VALUE):
        assert of_role(plans, role) == {(Algorithm.MUON, 1.0, 0.1, True)}
    (plan,) = (plan for plan in plans if plan.replicas == "dp_cp" and plan.holds_matrices)
    assert roles(plan) == IN_BOTH_PRESETS - EXPERTS


def test_a_fused_parameter_all_of_whose_roles_adamw_takes_may_be_cut() -> None:
    names = ("expert_gate", "expert_up", "expert_down")
    plans = plans_of(options(roles={name: RoleOptimizerConfig(optimizer="adamw") for name in names}))
    (experts,) = (plan for plan in plans if plan.replicas == "expt_dp")
    assert not experts.holds_matrices and roles(experts) == EXPERTS
    assert all(piece.rule.algorithm is Algorithm.ADAMW and piece.matrix is None for piece in experts.pieces)


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_multipliers_and_decay_of_a_role(name: str) -> None:
    own = {
        "expert_up": RoleOptimizerConfig(lr_multiplier=3.0),
        "embedding": RoleOptimizerConfig(decay=False, lr_multiplier=0.0),
        "norm": RoleOptimizerConfig(decay=True),
    }
    plans = plans_of(options(name=name, roles=own, decay_norms=False))
    hidden = Algorithm(name)
    other = Algorithm.ADAMW if name == "muon" else hidden
    whole = name == "muon"
    assert of_role(plans, ParameterRole.EXPERT_UP) == {(hidden, 3.0, 0.1, whole)}
    assert of_role(plans, ParameterRole.EXPERT_GATE) == {(hidden, 1.0, 0.1, whole)}
    assert of_role(plans, ParameterRole.EMBEDDING) == {(other, 0.0, 0.0, False)}
    assert of_role(plans, ParameterRole.NORM) == {(other, 1.0, 0.1, False)}


def test_costs_balance_owners() -> None:
    """A rank of many small matrices may own more elements than one with a large square one."""
    assert newton_schulz_cost((10, 4), 6) == newton_schulz_cost((4, 10), 6) == 6 * (4 * 10 * 16 + 2 * 64)
    plans = plans_of(options(sharding=ShardingConfig(reduction="all_reduce")))
    (plan,) = (plan for plan in plans if plan.holds_matrices and plan.replicas == "dp_cp")
    loads = [0.0] * 4
    for piece in plan.pieces:
        assert piece.matrix is not None
        loads[piece.owner] += newton_schulz_cost(piece.matrix.whole_shape, 6)
    assert max(loads) < 1.02 * min(loads)


# --------------------------------------------------------------------------- misdeclared matrices

PROJECTION = "layers.0.attention.input_projection"


def fused(*matrices: tuple[str, ParameterRole, tuple[int, int]], shape: tuple[int, ...] = (12, 8)) -> ParameterSpec:
    return ParameterSpec(
        f"{PROJECTION}.weight", shape, tuple(LogicalMatrix(name, role, rows) for name, role, rows in matrices)
    )


QUERY = ("layers.0.attention.query.weight", ParameterRole.QUERY)
KEY = ("layers.0.attention.key.weight", ParameterRole.KEY)
MISDECLARED = {
    "a gap": (fused((*QUERY, (0, 6)), (*KEY, (7, 12))), KEY[0]),
    "an overlap": (fused((*QUERY, (0, 6)), (*KEY, (5, 12))), KEY[0]),
    "missing rows at the end": (fused((*QUERY, (0, 6)), (*KEY, (6, 11))), PROJECTION),
    "missing rows at the start": (fused((*QUERY, (1, 6)), (*KEY, (6, 12))), QUERY[0]),
    "more rows than there are": (fused((*QUERY, (0, 6)), (*KEY, (6, 13))), PROJECTION),
    "a vector": (fused((*QUERY, (0, 12)), shape=(12,)), PROJECTION),
    "a stack that is no stack of experts": (fused((*QUERY, (0, 12)), shape=(12, 4, 2)), PROJECTION),
    "a flat stack of experts": (fused(("e", ParameterRole.EXPERT_DOWN, (0, 8)), shape=(12, 8)), PROJECTION),
}


@pytest.mark.parametrize("what", MISDECLARED)
@pytest.mark.parametrize("reduction", ["auto", "reduce_scatter", "all_reduce"])
def test_a_partial_or_misdeclared_matrix_is_refused(what: str, reduction: str) -> None:
    parameter, named = MISDECLARED[what]
    whole = ParameterShard(parameter, parameter.shape, tuple(_whole(matrix) for matrix in parameter.matrices))
    config = options(sharding=ShardingConfig(reduction=reduction))
    with pytest.raises(ValueError) as error:
        plan_buffers([whole], config, 1, dict.fromkeys(GROUPS, 2))
    assert named in str(error.value)
    # What nothing orthogonalises is no concern, but for its name.
    assert plan_buffers([whole], options(name="adamw"), 1, dict.fromkeys(GROUPS, 2))[0].pieces[-1].stop == whole.size


def _whole(matrix: LogicalMatrix) -> MatrixShard:
    extent = matrix.rows[1] - matrix.rows[0]
    return MatrixShard(matrix, matrix.rows, 0, 0, 1, (0, extent), extent)


def test_a_cut_through_a_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a layout ever hand out a part of one."""

    def careless(*args: Any) -> Any:
        layout = lay_out(*args)
        (first, *rest) = layout.runs
        half = (first.start + first.stop) // 2
        return replace(layout, runs=(replace(first, stop=half), replace(first, start=half, owner=1), *rest))

    lay_out = buffer_plan.lay_out
    monkeypatch.setattr(buffer_plan, "lay_out", careless)
    own = shard(fused((*QUERY, (0, 6)), (*KEY, (6, 12))), Place())
    with pytest.raises(ValueError, match="only whole matrices") as error:
        plan_buffers([own], options(), 1, dict.fromkeys(GROUPS, 2))
    assert QUERY[0] in str(error.value)
