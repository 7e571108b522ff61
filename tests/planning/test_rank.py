"""Ranks of 4,096, built for real, against the arithmetic of the placement and of the buffers."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.planning.ownership import owned_in_stage, owned_pieces, rank_buffers
from steptron.planning.placement import placement
from steptron.planning.rank import BuiltRank, build_rank
from steptron.platform.distributed import shutdown
from tests.planning.layouts import CONFIGS, FLASH, RANKS, WORLD_SIZE, long_context, report

MUON = "optimizer.name=muon"


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """Leaves the group of one that tests of the model keep in this process; they make it anew."""
    shutdown()


@pytest.fixture(scope="module", params=["report", "long context"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    return report() if request.param == "report" else long_context(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_is_built_as_it_is_placed(config: PretrainConfig, rank: int) -> None:
    check_against_placement(config, WORLD_SIZE, rank)


@pytest.mark.parametrize("rank", [0, 5, 13])
def test_tensor_and_context_parallel_ranks_of_a_critic(rank: int) -> None:
    """The last stage has a value head, which every rank holds whole and does not train."""
    sizes = ["pipeline=2", "tensor=2", "context=2", "expert=4"]
    overrides = ["model.value_head=true", *(f"parallel.{size}" for size in sizes)]
    config = load(CONFIGS / "pretrain" / "nano.yaml", overrides).config
    built = check_against_placement(config, 16, rank)
    assert ("value_head.weight" in built.chunks[-1].frozen) == (rank >= 8)
    experts, cut, whole = 2, 4, 8  # expert-data, context x data, tensor x context x data ranks
    assert {len(buffer.ranks) for buffer in built.buffers} == {experts, cut, whole}


def test_reductions_in_two_steps() -> None:
    """Nodes of 8: rank 511 adds up with the ranks of its node, then with the last ranks of the stage's nodes. Experts,
    of which each rank of a node holds others, are added up between nodes alone."""
    config = load(FLASH, ["parallel.node_size=8", MUON]).config
    built = check_against_placement(config, WORLD_SIZE, 511)
    assert {buffer.plan.replicas for buffer in built.buffers} == {"dp_cp", "expt_dp"}
    for buffer in built.buffers:
        if buffer.plan.replicas == "expt_dp":
            assert buffer.ranks == tuple(range(7, 512, 8))
            assert buffer.within_node == buffer.between_nodes == ()
        else:
            assert buffer.ranks == tuple(range(512))
            assert buffer.within_node == tuple(range(504, 512))
            assert buffer.between_nodes == tuple(range(7, 512, 8))
        assert buffer.filling == 0


def test_sums_that_do_not_divide_by_the_node_are_filled_up() -> None:
    """Those that are added up to all ranks; cells divide by themselves."""
    nodes = ["parallel.node_size=5", "train.global_batch_size=20", "optimizer.sharding.reduction=all_reduce", MUON]
    built = build_rank(load(CONFIGS / "pretrain" / "nano.yaml", nodes).config, 10, 7)
    for buffer in built.buffers:
        assert buffer.within_node == (5, 6, 7, 8, 9) and buffer.between_nodes == (2, 7)
        assert buffer.filling == sum(-span % 5 for span in buffer.spans)
    assert {bool(buffer.filling) for buffer in built.buffers} == {True, False}


@pytest.mark.parametrize("nodes", [[], ["parallel.node_size=2"]])
def test_owners_are_as_built(nodes: list[str]) -> None:
    """Every rank of a stage owns what the plan says, and together they own each element once for each of the ranks
    that hold other experts."""
    overrides = ["parallel.expert=2", "train.global_batch_size=24", MUON, *nodes]
    config = load(CONFIGS / "pretrain" / "nano.yaml", overrides).config
    place = placement(config, 6)
    own_names = []
    for rank, owned in owned_in_stage(config, place, 0, rank_buffers(config, place, 0)):
        built = check_against_placement(config, 6, rank)
        assert sum(piece.stop - piece.start for piece in owned) == sum(buffer.owned for buffer in built.buffers)
        own_names += [
            (piece.name, piece.start) for piece in owned_pieces(config, place, rank, rank_buffers(config, place, rank))
        ]
    assert len(own_names) == len(set(own_names))


def test_frozen_parameters_have_no_gradients() -> None:
    config = load(CONFIGS / "pretrain" / "nano.yaml", ["balance.freeze_router=true", "loss.mtp_train_depths=0"]).config
    built = check_against_placement(config, 1, 0)
    (chunk,) = built.chunks
    frozen = {name for name in chunk.shapes if name.startswith("mtp.") or ".router." in name}
    assert chunk.frozen == frozen


def test_no_such_rank() -> None:
    with pytest.raises(ValueError, match="rank 4096: the 4,096 ranks are numbered 0 to 4095"):
        build_rank(report(), WORLD_SIZE, WORLD_SIZE)


def test_a_process_with_a_group_is_refused_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="a process group exists already"):
            build_rank(report(), WORLD_SIZE, 0)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def check_against_placement(config: PretrainConfig, world_size: int, rank: int) -> BuiltRank:
    """Builds a rank and compares everything that the placement says of it."""
    built, place = build_rank(config, world_size, rank), placement(config, world_size)
    assert not dist.is_initialized()
    assert built.coordinates == place.coordinates(rank)
    assert built.groups == place.groups(rank)
    held = place.held(rank)
    assert len(built.chunks) == config.parallel.virtual_pipeline
    for number, chunk in enumerate(built.chunks):
        placed = {part.name: part for part in held if part.chunk == number}
        assert chunk.index == number * place.pipeline + place.coordinates(rank).pipeline
        assert chunk.stage == place.stages[chunk.index]
        assert chunk.shapes == {name: part.shard.shape for name, part in placed.items()}
        assert chunk.embedding_is_copy == any(part.is_copy for part in placed.values())
    trained = sorted(name for chunk in built.chunks for name in chunk.shapes if name not in chunk.frozen)
    assert sorted(name for buffer in built.buffers for name in buffer.parameters) == trained
    # The buffers of the planner are those of training, layouts, owners and all.
    assert [buffer.plan for buffer in built.buffers] == rank_buffers(config, place, rank)
    parts = {part.name: part for part in held}
    owned = owned_pieces(config, place, rank, [buffer.plan for buffer in built.buffers])
    for buffer in built.buffers:
        # The ranks over which a gradient is added up are the holders of its parameter: all of them, no others.
        assert {place.owners(parts[name], rank) for name in buffer.parameters} == {buffer.ranks}
        size = sum(parts[name].shard.size for name in buffer.parameters)
        assert buffer.elements == size + buffer.plan.layout.padding == sum(buffer.spans)
        own = set(buffer.plan.pieces)
        assert buffer.owned == sum(piece.stop - piece.start for piece in owned if piece in own)
    return built
