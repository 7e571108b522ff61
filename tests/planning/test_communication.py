"""The formula of a step's communication against bytes counted in the collectives, and against arithmetic by hand."""

from __future__ import annotations

from unittest import mock

import pytest

from benchmarks import layouts
from steptron.config.loader import load
from steptron.optim import buckets, ownership
from steptron.parallel.traffic import CommunicationVolume, Kind, Traffic
from steptron.planning.communication import step_communication
from steptron.planning.placement import placement
from tests.worker_pool import WorkerPool

SHORT = ("data.sequence_length=32", "train.global_batch_size=4")
ALL_REDUCE = "optimizer.sharding.reduction=all_reduce"
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
    "DP4 on 2 nodes, to all, bf16": (4, ["node_size=2"], ["train.precision=bf16", ALL_REDUCE]),
    "DP2 on 2 nodes, to all": (2, ["node_size=1"], [ALL_REDUCE]),
    "PP2xDP2, shared embedding to all": (4, ["pipeline=2"], [ALL_REDUCE]),
    "TP2xDP2, deterministic": (4, ["tensor=2"], ["train.deterministic=true"]),
}
SMALL_BUCKETS = 1 << 15
"""Elements of a reduction, so that the buffers of nano have several parts."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_formula_gives_what_is_counted(pool: WorkerPool, name: str) -> None:
    """Every operation, by group and kind. What routing decides is compared in the sum over ranks."""
    world_size, parallel, others = LAYOUTS[name]
    overrides = [*SHORT, *others, *(f"parallel.{override}" for override in parallel)]
    counted = pool.run(world_size, layouts.count, overrides)
    compare(counted, layouts.formula(world_size, overrides))


@pytest.mark.parametrize(("world_size", "parallel"), [(4, ["pipeline=2"]), (4, ["node_size=2"])], ids=str)
def test_buffers_of_several_parts(pool: WorkerPool, world_size: int, parallel: list[str]) -> None:
    overrides = [*SHORT, *(f"parallel.{override}" for override in parallel)]
    counted = pool.run(world_size, count_in_small_buckets, overrides)
    whole = layouts.formula(world_size, overrides)
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", SMALL_BUCKETS):
        planned = layouts.formula(world_size, overrides)
    compare(counted, planned)
    assert planned[0].total().calls > whole[0].total().calls


def count_in_small_buckets(rank: int, world_size: int, overrides: list[str]) -> CommunicationVolume:
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", SMALL_BUCKETS):
        return layouts.count(rank, world_size, overrides)


def compare(counted: list[CommunicationVolume], planned: list[CommunicationVolume]) -> None:
    """Ranks one by one, but for token copies, which routing decides."""
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
    short = ["optimizer.name=muon", "data.sequence_length=64", "train.micro_batch_size=1"]
    config = load(layouts.NANO, [*short, *overrides]).config
    return step_communication(config, placement(config, world_size), rank, micro_batches=1)


def test_tensor_parallelism_by_hand() -> None:
    """Of 64 tokens: a layer's two blocks gather and scatter twice and a half each (forward 1 + 1, backward 1 + 1
    and the gather for the weight's gradient); embedding and head once in both directions, for two tokens ahead
    again; then two numbers per token and rank for either loss. Muon gathers each matrix that is cut: queries, keys,
    values, gates and output projections, dense and shared feed-forward; two numbers per rank go with the norm."""
    volume = _formula("parallel.tensor=2", world_size=2)
    hidden = 64 * 64 * 4
    gathers = 10 * 2 * 3 + 2 + 2
    scatters = 10 * 2 * 2 + 2 + 2
    spec = placement(load(layouts.NANO).config).spec
    kinds = ("attention.input_projection", "attention.output_projection", "ffn.gate_up", "ffn.down", "ffn.shared")
    cut = sum(
        parameter.size
        for layer in (*spec.layers, spec.mtp[0].layer)
        for parameter in layer.parameters()
        if any(f".{kind}" in parameter.name for kind in kinds)
    )
    assert volume.traffic["tp", Kind.ALL_GATHER].payload == gathers * hidden + 2 * (2 * 2 * 64 * 4) + 4 * cut
    assert volume.traffic["world", Kind.ALL_GATHER] == Traffic(1, 2 * 2 * 8, 2 * 8)
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
    """Bytes reduced by one rank of each stage, and gathered again: the model's parameters, experts by their share; the
    copy of the embedding once more, and each of its cells over both stages."""
    config = load(layouts.NANO, ["optimizer.name=adamw", "parallel.pipeline=2", "parallel.expert=2"]).config
    placed = placement(config, 8)
    with mock.patch.object(ownership, "ALIGNMENT", 1):
        volumes = [step_communication(config, placed, rank) for rank in (0, 4)]
    parameters = [p for p in placed.spec.parameters() if not p.name.endswith("router.bias")]
    experts = sum(p.size for p in parameters if p.is_expert)
    others = sum(p.size for p in parameters if not p.is_expert)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        assert sum(v.traffic["dp_cp", kind].payload for v in volumes) == 4 * (others + 512 * 64)
        assert sum(v.traffic["expt_dp", kind].payload for v in volumes) == 4 * experts // 2
    assert [v.traffic["embd", Kind.ALL_REDUCE].payload for v in volumes] == [4 * 512 * 64 // 4] * 2


def test_gradients_to_all_and_parameters_from_owners() -> None:
    """bf16: 4 bytes per element are added up, 2 are sent out, matrix by matrix."""
    volume = _formula(ALL_REDUCE, "train.precision=bf16", world_size=2)
    spec = placement(load(layouts.NANO).config).spec
    (experts,) = {p.size for p in spec.parameters() if p.name == "layers.2.ffn.experts.down_projection"}
    assert volume.traffic["expt_dp", Kind.ALL_REDUCE].payload == 4 * 3 * 7 * experts
    broadcasts = volume.traffic["expt_dp", Kind.BROADCAST]
    assert (broadcasts.calls, broadcasts.payload) == (7 * 8 * 3, 2 * 3 * 7 * experts)
    assert broadcasts.wire == broadcasts.payload / 2


def test_nodes_leave_a_node_th_between_them() -> None:
    """Of AdamW's parameters: what goes between 2 nodes is an eighth, of gradients and of parameters."""
    adamw = "optimizer.name=adamw"
    flat, factored = _formula(adamw, world_size=16), _formula(adamw, "parallel.node_size=8", world_size=16)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        whole = flat.traffic["dp_cp", kind]
        assert factored.traffic["dp_cp.inter", kind].payload == whole.payload / 8
        assert factored.traffic["dp_cp.intra", kind].payload == whole.payload
        # Between the nodes half of the eighth, within them 7 of 8 parts; together what the whole group sends.
        assert factored.traffic["dp_cp.inter", kind].wire == whole.payload / 16
        assert sum(factored.traffic[f"dp_cp.{f}", kind].wire for f in ("intra", "inter")) == pytest.approx(whole.wire)
    to_all = _formula(adamw, ALL_REDUCE, "parallel.node_size=8", world_size=16)
    assert to_all.traffic["dp_cp.inter", Kind.ALL_REDUCE].payload == whole.payload / 8
    assert to_all.traffic["dp_cp.inter", Kind.ALL_REDUCE].wire == whole.payload / 8


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
    for volume in volumes:
        for key, traffic in volume.traffic.items():
            if key[0] == "expt_dp":
                rounds = 2 if key[1] is Kind.ALL_REDUCE else 1
                assert traffic.wire == pytest.approx(traffic.payload * rounds * 127 / 128)
