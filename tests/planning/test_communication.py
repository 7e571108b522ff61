"""The formula of a step's communication against bytes counted in the collectives, and against arithmetic by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks import layouts
from steptron.config.loader import load
from steptron.parallel.traffic import CommunicationVolume, Kind, Traffic
from steptron.planning.communication import step_communication
from steptron.planning.placement import placement
from tests.worker_pool import WorkerPool

SHORT = ("data.sequence_length=32", "train.global_batch_size=4")
LAYOUTS = {
    "PP2xVPP2, uneven": (2, ["pipeline=2", "virtual_pipeline=2", "pipeline_layout=Et|tttt|t|tttmL"], []),
    "PP4, no MTP": (4, ["pipeline=4"], ["loss.mtp_train_depths=0"]),
    "TP2 with EP4": (4, ["tensor=2", "expert=4"], []),
    "TP2xCP2xEP2, recomputed": (4, ["tensor=2", "context=2", "expert=2"], [layouts.RECOMPUTE]),
    "CP4": (4, ["context=4"], ["train.micro_batch_size=2"]),
    "PP2xEP2 allgather, bf16, token copies again": (
        4,
        ["pipeline=2", "expert=2", "dispatcher=allgather"],
        ["train.precision=bf16", "train.recompute=[{layers: 'all', parts: [moe_permutation, norm]}]"],
    ),
    "DP2xEP2 on 2 nodes, frozen router": (4, ["expert=2", "node_size=2"], ["balance.freeze_router=true"]),
    "DP4 on 2 nodes, own head off": (4, ["node_size=2"], ["model.mtp.head=shared", "train.micro_batch_size=1"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_formula_gives_what_is_counted(pool: WorkerPool, name: str) -> None:
    """Every operation, by group and kind. What routing decides is compared in the sum over ranks."""
    world_size, parallel, others = LAYOUTS[name]
    overrides = [*SHORT, *others, *(f"parallel.{override}" for override in parallel)]
    counted = pool.run(world_size, layouts.count, overrides)
    planned = layouts.formula(world_size, overrides)
    for own, expected in zip(counted, planned, strict=True):
        assert own.traffic.keys() == expected.traffic.keys()
        for key, traffic in own.traffic.items():
            assert traffic.calls == expected.traffic[key].calls, key
            if key != ("ep", Kind.ALL_TO_ALL):
                assert traffic.payload == expected.traffic[key].payload, key
                assert traffic.wire == pytest.approx(expected.traffic[key].wire, rel=1e-12), key
    assert sum(v.total().payload for v in counted) == sum(v.total().payload for v in planned)
    assert counted[0].total().payload > 0


def _formula(*overrides: str, world_size: int, rank: int = 0) -> CommunicationVolume:
    config = load(layouts.NANO, ["data.sequence_length=64", "train.micro_batch_size=1", *overrides]).config
    return step_communication(config, placement(config, world_size), rank, micro_batches=1)


def test_tensor_parallelism_by_hand() -> None:
    """Of 64 tokens: a layer's two blocks gather and scatter twice and a half each (forward 1 + 1, backward 1 + 1
    and the gather for the weight's gradient); embedding and head once in both directions, for two tokens ahead
    again; then two numbers per token and rank for either loss, and one for the gradient norm."""
    volume = _formula("parallel.tensor=2", world_size=2)
    hidden = 64 * 64 * 4
    gathers = 10 * 2 * 3 + 2 + 2
    scatters = 10 * 2 * 2 + 2 + 2
    assert volume.traffic["tp", Kind.ALL_GATHER].payload == gathers * hidden + 2 * (2 * 2 * 64 * 4) + 2 * 8
    assert volume.traffic["tp", Kind.REDUCE_SCATTER].payload == scatters * hidden
    assert volume.total("tp").wire == volume.total("tp").payload / 2


def test_context_parallelism_by_hand() -> None:
    """Rank 0 of 2 holds tokens 0-15 and 48-63, rank 1 those between. Seven of ten layers have a window of 16 and
    need the 15 rows before a border; in full layers 0-15 go out and 16-47 come in. Gradients go the other way."""
    volume = _formula("parallel.context=2", world_size=2)
    row = 2 * 2 * 16 * 4  # two groups, keys and values of 16 numbers
    sliding, full = (15 + 15) * row, (16 + 32) * row
    assert volume.traffic["cp", Kind.ALL_TO_ALL] == Traffic(20, 7 * sliding + 3 * full, 7 * sliding + 3 * full)


def test_expert_parallelism_by_hand() -> None:
    """Of 64 tokens with two experts each: copies travel four times, weights twice, in each of 7 MoE layers."""
    volume = _formula("parallel.expert=4", world_size=4)
    copies = 64 * 2
    assert volume.traffic["ep", Kind.ALL_TO_ALL].payload == 7 * (4 * copies * 64 * 4 + 2 * copies * 4)
    assert volume.traffic["ep", Kind.ALL_TO_ALL].wire == volume.traffic["ep", Kind.ALL_TO_ALL].payload * 3 / 4
    assert volume.traffic["tp_ep", Kind.ALL_GATHER].payload == 7 * 4 * 8 * 8


def test_what_deep_ep_sends_is_once_per_rank() -> None:
    """Two of 8 experts on 8 ranks are always on two; on 2 ranks both are on the same one in 3 cases of 7."""
    flex, one, two = "parallel.dispatcher=flex", "parallel.expert=8", "parallel.expert=2"
    assert _formula(flex, one, world_size=8).traffic["ep", Kind.ALL_TO_ALL].payload == 7 * 4 * 2 * 64 * 64 * 4
    payload = _formula(flex, two, world_size=2).traffic["ep", Kind.ALL_TO_ALL].payload
    assert payload == pytest.approx(7 * 4 * (2 - 3 / 7) * 64 * 64 * 4, rel=2e-5)


def test_gradients_of_all_stages_are_the_model() -> None:
    """Bytes reduced by one rank of each stage: the model's parameters, experts by their share; the copy of the
    embedding twice more."""
    config = load(layouts.NANO, ["parallel.pipeline=2", "parallel.expert=2"]).config
    placed = placement(config, 8)
    volumes = [step_communication(config, placed, rank) for rank in (0, 4)]
    parameters = [p for p in placed.spec.parameters() if not p.name.endswith("router.bias")]
    experts = sum(p.size for p in parameters if p.is_expert)
    others = sum(p.size for p in parameters if not p.is_expert)
    assert sum(v.traffic["dp_cp", Kind.ALL_REDUCE].payload for v in volumes) == 4 * (others + 512 * 64)
    assert sum(v.traffic["expt_dp", Kind.ALL_REDUCE].payload for v in volumes) == 4 * experts // 2
    assert [v.traffic["embd", Kind.ALL_REDUCE].payload for v in volumes] == [4 * 512 * 64] * 2


def test_nodes_leave_a_node_th_between_them() -> None:
    flat, factored = _formula(world_size=16), _formula("parallel.node_size=8", world_size=16)
    whole = flat.traffic["dp_cp", Kind.ALL_REDUCE].payload
    assert factored.traffic["dp_cp.inter", Kind.ALL_REDUCE].payload == whole / 8
    assert factored.traffic["dp_cp.intra", Kind.REDUCE_SCATTER].payload == whole
    # What crosses the node's border in an all-reduce of 2 nodes: an eighth of the buffer, there and back.
    assert factored.traffic["dp_cp.inter", Kind.ALL_REDUCE].wire == whole / 8


def test_micro_batches_follow_from_the_batch() -> None:
    """Sixteen sequences, two at a time, on two data-parallel ranks."""
    config = load(layouts.NANO, ["parallel.pipeline=2"]).config
    volume = step_communication(config, placement(config, 4), 0)
    assert volume.traffic["pp", Kind.SEND] == Traffic(4, 4 * 2 * 128 * 64 * 4, 4 * 2 * 128 * 64 * 4)


def test_ranks_of_4096() -> None:
    """Of every pipeline rank one: a micro-batch crosses the 7 borders between 8 stages both ways; experts are added
    up over 128 ranks."""
    overrides = [
        "parallel.pipeline=4",
        "parallel.virtual_pipeline=2",
        "parallel.expert=8",
        "train.global_batch_size=1024",
    ]
    config = load(layouts.NANO, [*overrides, "train.micro_batch_size=1"]).config
    placed = placement(config, 4096)
    volumes = [step_communication(config, placed, rank) for rank in range(0, 4096, 1024)]
    sent = sum(v.traffic["pp", Kind.SEND].payload for v in volumes)
    assert sent == 2 * 7 * 128 * 64 * 4
    assert all(math.isclose(v.total("expt_dp").wire, v.total("expt_dp").payload * 2 * 127 / 128) for v in volumes)
