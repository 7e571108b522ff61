"""Collectives within nodes and between them, one after the other."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from steptron.parallel.factored_group import FactoredGroup
from steptron.parallel.factors import Factor, split_by_node
from steptron.parallel.traffic import Kind, Traffic
from steptron.profiling.communication import CommunicationCounter
from tests.worker_pool import WorkerPool

TIMEOUT = timedelta(seconds=30)
SIZES = [1, 2, 3, 7, 64, 1001]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _values(size: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=torch.float64)
    return (values * 1000).to(dtype)


def _sums(rank: int, size: int, node_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of tensors of all sizes, several on their way at once, waited for out of order."""
    group = FactoredGroup(_world(), node_size, TIMEOUT)
    tensors = [_values(length, rank, dtype) for length in SIZES]
    reductions = [group.all_reduce(tensor) for tensor in tensors[:-1]]
    for index in (2, 0, 4, 1, 3):
        reductions[index].wait()
    group.all_reduce(tensors[-1]).wait()
    return tensors


@pytest.mark.parametrize("world_size, node_size", [(4, 1), (4, 2), (4, 4), (4, 8), (2, 1), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_sums_equal_those_of_the_whole_group(
    pool: WorkerPool, world_size: int, node_size: int, dtype: torch.dtype
) -> None:
    sums = pool.run(world_size, _sums, node_size, dtype)
    for i, length in enumerate(SIZES):
        expected = torch.stack([_values(length, rank, dtype) for rank in range(world_size)]).double().sum(dim=0)
        scale = torch.stack([_values(length, rank, dtype) for rank in range(world_size)]).double().abs().sum(dim=0)
        error = ((sums[0][i].double() - expected).abs() / scale.clamp(min=1)).max()
        assert error == 0 if dtype is torch.int64 else error < 2e-7
        assert all(torch.equal(own[i], sums[0][i]) for own in sums), "ranks must hold the same bits"


def _unordered(rank: int, size: int) -> list[float]:
    """Ranks reach their waits at different times and look at different reductions first."""
    group = FactoredGroup(_world(), 2, TIMEOUT)
    tensors = [torch.full((5 + i,), float(10 * i + rank)) for i in range(12)]
    reductions = []
    for i, tensor in enumerate(tensors):
        reductions.append(group.all_reduce(tensor))
        if i % 4 == rank:
            reductions[i // 2].wait()
    for reduction in reversed(reductions) if rank % 2 else reductions:
        reduction.wait()
        reduction.wait()  # a second time changes nothing
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


def test_members_need_not_wait_in_the_same_order(pool: WorkerPool) -> None:
    for sums in pool.run(4, _unordered):
        assert sums == [40.0 * i + 6 for i in range(12)]


def _cells(
    rank: int, size: int, node_size: int, dtype: torch.dtype
) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """Reduce-scatters and gathers in place: each rank's cell of the sums, and what all have after the gather."""
    group = FactoredGroup(_world(), node_size, TIMEOUT)
    tensors = [_values(length * size, rank, dtype) for length in SIZES]
    works = [group.reduce_scatter(tensor) for tensor in tensors]
    for index in (2, 0, 4, 1, 3, 5):
        works[index].wait()
    own = [tensor.chunk(size)[group.cell].clone() for tensor in tensors]
    for tensor in tensors:  # what the other cells hold has no meaning
        for cell, part in enumerate(tensor.chunk(size)):
            if cell != group.cell:
                part.fill_(-1)
    gathers = [group.all_gather(tensor) for tensor in tensors]
    for index in (2, 0, 4, 1, 3, 5):
        gathers[index].wait()
    return group.cell, own, tensors


@pytest.mark.parametrize("world_size, node_size", [(4, 1), (4, 2), (4, 4), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_cells_of_the_sum_and_back(pool: WorkerPool, world_size: int, node_size: int, dtype: torch.dtype) -> None:
    """Each cell has one owner, its sum is there in its place, and the gather brings all cells to all."""
    ranks = pool.run(world_size, _cells, node_size, dtype)
    assert sorted(cell for cell, _, _ in ranks) == list(range(world_size))
    if (world_size, node_size) == (4, 2):
        assert [cell for cell, _, _ in ranks] == [0, 2, 1, 3]
    for i, length in enumerate(SIZES):
        values = torch.stack([_values(length * world_size, rank, dtype) for rank in range(world_size)]).double()
        expected, scale = values.sum(dim=0), values.abs().sum(dim=0).clamp(min=1)
        gathered = ranks[0][2][i]
        error = ((gathered.double() - expected).abs() / scale).max()
        assert error == 0 if dtype is torch.int64 else error < 2e-7
        for cell, own, tensors in ranks:
            assert torch.equal(own[i], gathered.chunk(world_size)[cell])
            assert torch.equal(tensors[i], gathered)


def _sent(rank: int, size: int, node_size: int) -> tuple[int, list[float]]:
    group = FactoredGroup(_world(), node_size, TIMEOUT)
    tensors = [torch.full((3,), float(group.cell)) for _ in range(2 * size)]
    works = [group.broadcast(tensor, cell % size) for cell, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    return group.cell, [float(tensor.sum()) / 3 for tensor in tensors]


@pytest.mark.parametrize("world_size, node_size", [(4, 1), (4, 2), (4, 4), (2, 1)])
def test_broadcasts_come_from_the_owner_of_the_cell(pool: WorkerPool, world_size: int, node_size: int) -> None:
    for _, sent in pool.run(world_size, _sent, node_size):
        assert sent == [float(cell) for cell in range(world_size)] * 2


def _mixed(rank: int, size: int) -> list[torch.Tensor]:
    """Sums, scatters and gathers under way at once, which every rank waits for in another order and in other parts."""
    group = FactoredGroup(_world(), 2, TIMEOUT)
    kinds = [group.all_reduce, group.all_gather, group.reduce_scatter, group.all_gather, group.all_reduce]
    tensors = [_values(4 * (i + 1), rank, torch.int64) for i in range(3 * len(kinds))]
    for wave in range(3):
        own = tensors[5 * wave : 5 * wave + 5]
        works = [start(tensor) for start, tensor in zip(kinds, own, strict=True)]
        for i in [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 3, 4, 0, 2), (3, 0, 1, 4, 2)][(rank + wave) % 4]:
            works[i].wait()
        group.all_gather(own[2]).wait()
    return tensors


def test_kinds_may_be_mixed(pool: WorkerPool) -> None:
    """A sum's last step and a gather's go over the same group: on all ranks in the same order, whether they wait for
    both at once or for one after the other."""
    ranks = pool.run(4, _mixed, timeout=40)
    cells = [0, 2, 1, 3]
    for i, own in enumerate(zip(*ranks, strict=True)):
        values = [_values(4 * (i + 1), rank, torch.int64) for rank in range(4)]
        if i % 5 in (1, 3):
            expected = torch.cat([values[cells.index(cell)].chunk(4)[cell] for cell in range(4)])
        else:
            expected = torch.stack(values).sum(dim=0)
        assert all(torch.equal(tensor, expected) for tensor in own), i


def _steps(rank: int, size: int) -> list[tuple[str, Kind]]:
    """Order in which three reductions' steps are started."""
    group = FactoredGroup(_world(), 2, TIMEOUT)
    names = group.group_names("dp")
    order: list[tuple[str, Kind]] = []

    class Watch(CommunicationCounter):
        def _count(self, func, args, kwargs):  # type: ignore[no-untyped-def]
            before = self.volume.traffic
            super()._count(func, args, kwargs)
            order.extend(key for key, traffic in self.volume.traffic.items() if before.get(key) != traffic)

    with Watch(names):
        reductions = [group.all_reduce(torch.ones(64)) for _ in range(3)]
        reductions[1].wait()
        reductions[2].wait()
    return order


def test_steps_of_reductions_interleave(pool: WorkerPool) -> None:
    """No reduction has come back from between the nodes before the earlier ones have gone there; later ones than
    the one that is waited for are left alone."""
    scatter, between, gather = (
        ("dp.intra", Kind.REDUCE_SCATTER),
        ("dp.inter", Kind.ALL_REDUCE),
        ("dp.intra", Kind.ALL_GATHER),
    )
    for order in pool.run(4, _steps):
        assert order == [scatter] * 3 + [between] * 2 + [gather] * 2 + [between, gather]


def _counted(rank: int, size: int, node_size: int) -> tuple[dict[Factor, Traffic], dict[tuple[str, Kind], Traffic]]:
    group = FactoredGroup(_world(), node_size, TIMEOUT)
    with CommunicationCounter(group.group_names("dp_cp")) as counter:
        reductions = [group.all_reduce(torch.ones(length)) for length in (64, 63)]
        for reduction in reductions:
            reduction.wait()
    return group.traffic, dict(counter.volume.traffic)


def test_bytes_of_each_factor(pool: WorkerPool) -> None:
    """Between nodes go 2 (k - 1) / k of an m-th of the (padded) bytes: k nodes with m members each."""
    for own, seen in pool.run(4, _counted, 2):
        assert seen == {
            ("dp_cp.intra", Kind.REDUCE_SCATTER): Traffic(2, 512, 256),
            ("dp_cp.inter", Kind.ALL_REDUCE): Traffic(2, 256, 256),
            ("dp_cp.intra", Kind.ALL_GATHER): Traffic(2, 512, 256),
        }
        assert own == {Factor.INTRA: Traffic(4, 1024, 512), Factor.INTER: Traffic(2, 256, 256)}


def _counted_cells(
    rank: int, size: int, node_size: int
) -> tuple[dict[Factor, Traffic], dict[tuple[str, Kind], Traffic]]:
    group = FactoredGroup(_world(), node_size, TIMEOUT)
    with CommunicationCounter(group.group_names("dp_cp")) as counter:
        for start in (group.reduce_scatter, group.all_gather):
            start(torch.ones(64)).wait()
    return group.traffic, dict(counter.volume.traffic)


def test_bytes_of_cells(pool: WorkerPool) -> None:
    """256 bytes over 2 nodes with 2 members each: all of them within a node, a half between nodes, and back."""
    for own, seen in pool.run(4, _counted_cells, 2):
        assert seen == {
            ("dp_cp.intra", Kind.REDUCE_SCATTER): Traffic(1, 256, 128),
            ("dp_cp.inter", Kind.REDUCE_SCATTER): Traffic(1, 128, 64),
            ("dp_cp.inter", Kind.ALL_GATHER): Traffic(1, 128, 64),
            ("dp_cp.intra", Kind.ALL_GATHER): Traffic(1, 256, 128),
        }
        assert own == {Factor.INTRA: Traffic(2, 512, 256), Factor.INTER: Traffic(2, 256, 128)}
    for own, seen in pool.run(4, _counted_cells, 4):
        assert seen == {
            ("dp_cp.intra", Kind.REDUCE_SCATTER): Traffic(1, 256, 192),
            ("dp_cp.intra", Kind.ALL_GATHER): Traffic(1, 256, 192),
        }
        assert own == {Factor.INTRA: Traffic(2, 512, 384), Factor.INTER: Traffic()}


@pytest.mark.parametrize("node_size, factor", [(1, Factor.INTER), (4, Factor.INTRA), (100, Factor.INTRA)])
def test_one_factor_is_one_all_reduce(pool: WorkerPool, node_size: int, factor: Factor) -> None:
    for own, seen in pool.run(4, _counted, node_size):
        assert seen == {(f"dp_cp.{factor}", Kind.ALL_REDUCE): Traffic(2, 508, 762)}
        assert own == {f: Traffic(2, 508, 762) if f is factor else Traffic() for f in Factor}


def _strided(rank: int, size: int, parts: list[list[int]], node_size: int) -> tuple[list[float], list[int], list[int]]:
    """Several groups of the same kind, made by their own members only."""
    groups = [dist.new_group(ranks) for ranks in parts]
    (mine,) = (group for group, ranks in zip(groups, parts, strict=True) if rank in ranks)
    group = FactoredGroup(mine, node_size, TIMEOUT)
    tensor = torch.arange(5.0) + 10**rank
    group.all_reduce(tensor).wait()
    factors = [[] if g is None else dist.get_process_group_ranks(g) for g in (group.intra, group.inter)]
    assert (group.size(), group.rank()) == (mine.size(), mine.rank())
    return tensor.tolist(), factors[0], factors[1]


def test_groups_with_strides(pool: WorkerPool) -> None:
    """Ranks 0, 2 and 1, 3 of two nodes with two ranks: one member each."""
    for rank, (sums, intra, inter) in enumerate(pool.run(4, _strided, [[0, 2], [1, 3]], 2)):
        assert sums == [2.0 * i + (101 if rank % 2 == 0 else 1010) for i in range(5)]
        assert (intra, inter) == ([], [0, 2] if rank % 2 == 0 else [1, 3])
    for rank, (sums, intra, inter) in enumerate(pool.run(4, _strided, [[0, 1, 2, 3]], 2)):
        assert sums == [4.0 * i + 1111 for i in range(5)]
        assert intra == ([0, 1] if rank < 2 else [2, 3]) and inter == ([0, 2] if rank % 2 == 0 else [1, 3])


def test_split_by_node() -> None:
    assert split_by_node([0, 2, 4, 6], 4) == [[0, 2], [4, 6]]
    assert split_by_node([1, 9, 17], 8) == [[1], [9], [17]]
    assert split_by_node(range(16), 16) == [list(range(16))]
    with pytest.raises(ValueError, match=r"2 on node 0, 1 on node 1") as error:
        split_by_node([0, 1, 2], 2)
    assert "parallel.node_size" in str(error.value) and "[0, 1, 2]" in str(error.value)


def _refused(rank: int, size: int) -> str:
    with pytest.raises(ValueError) as error:
        FactoredGroup(_world(), 2, TIMEOUT).all_reduce(torch.ones(4, 4).t())
    return str(error.value)


def test_tensors_that_are_not_contiguous_are_refused(pool: WorkerPool) -> None:
    assert all("contiguous" in message for message in pool.run(2, _refused))


def _alone(rank: int, size: int) -> str:
    """The other member starts no reduction."""
    group = FactoredGroup(dist.new_group([0, 1, 2, 3], timeout=TIMEOUT), 2, timedelta(seconds=1))
    dist.barrier()
    if rank == 0:
        try:
            group.all_reduce(torch.ones(3)).wait()
        except RuntimeError as error:
            return str(error)
    return ""


def test_absent_members_end_in_a_timeout(pool: WorkerPool) -> None:
    message = pool.run(4, _alone)[0].lower()
    # Others of its group that give up earlier close or reset the connection.
    assert any(end in message for end in ("timed out", "closed", "connection reset")), message
