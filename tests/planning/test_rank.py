"""Ranks of 4,096, built for real, against the arithmetic of the placement and of the buffers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.planning.placement import placement
from steptron.planning.rank import BuiltRank, build_rank
from tests.planning.layouts import CONFIGS, FLASH, RANKS, WORLD_SIZE, long_context, report

_BUCKET = 1 << 24


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """Leaves the group of one that tests of the model keep in this process; they make it anew."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=["report", "long context"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    return report() if request.param == "report" else long_context(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_is_built_as_it_is_placed(config: PretrainConfig, rank: int) -> None:
    check_against_placement(config, WORLD_SIZE, rank)


@pytest.mark.parametrize("rank", [0, 5, 13])
def test_tensor_and_context_parallel_ranks(rank: int) -> None:
    sizes = ["pipeline=2", "tensor=2", "context=2", "expert=4"]
    config = load(CONFIGS / "pretrain" / "nano.yaml", [f"parallel.{size}" for size in sizes]).config
    built = check_against_placement(config, 16, rank)
    experts, cut, whole = 2, 4, 8  # expert-data, context x data, tensor x context x data ranks
    assert {len(buffer.ranks) for chunk in built.chunks for buffer in chunk.buffers} == {experts, cut, whole}


def test_reductions_in_two_steps() -> None:
    """Nodes of 8: rank 511 adds up with the ranks of its node, then with the last ranks of the stage's nodes. Experts,
    of which each rank of a node holds others, are added up between nodes alone."""
    config = load(FLASH, ["parallel.node_size=8"]).config
    built = build_rank(config, WORLD_SIZE, 511)
    first, shared, experts = (buffer for chunk in built.chunks for buffer in chunk.buffers)
    for buffer in (first, shared):
        assert buffer.ranks == tuple(range(512))
        assert buffer.within_node == tuple(range(504, 512))
        assert buffer.between_nodes == tuple(range(7, 512, 8))
        assert buffer.padding == 0
    assert experts.ranks == tuple(range(7, 512, 8))
    assert experts.within_node == experts.between_nodes == ()


def test_buckets_that_do_not_divide_by_the_node_are_filled_up() -> None:
    nodes = ["parallel.node_size=3", "model.vocab_size=511", "train.global_batch_size=24"]
    config = load(CONFIGS / "pretrain" / "nano.yaml", [*nodes, "parallel.expert=1"]).config
    (chunk,) = build_rank(config, 6, 4).chunks
    for buffer in chunk.buffers:
        assert buffer.within_node == (3, 4, 5) and buffer.between_nodes == (1, 4)
        assert buffer.buckets == 1 and buffer.padding == -buffer.elements % 3
    assert any(buffer.padding for buffer in chunk.buffers)


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
        trained = [name for name in chunk.shapes if name not in chunk.frozen]
        assert sorted(name for buffer in chunk.buffers for name in buffer.parameters) == sorted(trained)
        for buffer in chunk.buffers:
            # The ranks over which a gradient is added up are the owners of its parameter: all of them, no others.
            assert {place.owners(placed[name], rank) for name in buffer.parameters} == {buffer.ranks}
            assert buffer.elements == sum(placed[name].shard.size for name in buffer.parameters)
            assert buffer.buckets == count_buckets([placed[name].shard.size for name in buffer.parameters])
    return built


def count_buckets(sizes: list[int]) -> int:
    """Buckets end with the parameter that fills them, from the last parameter on."""
    buckets, filled = 0, 0
    for size in reversed(sizes):
        filled += size
        if filled >= _BUCKET:
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0)
