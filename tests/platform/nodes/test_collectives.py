"""Collectives against their known results, and faults that must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steptron.config.schema import ParallelConfig
from steptron.platform.nodes import collectives
from steptron.platform.nodes.examination import example_layout, groups_of
from tests.platform.nodes.simulated import peers_on
from tests.worker_pool import WorkerPool

CPU = torch.device("cpu")


def _check(rank: int, world_size: int, layout: ParallelConfig) -> dict[str, Any]:
    return collectives.check_groups(groups_of(layout), CPU)


def test_all_groups_of_a_layout_are_right(pool: WorkerPool) -> None:
    results = pool.run(4, _check, ParallelConfig(pipeline=2, expert=2))
    checks = collectives.judge(results, peers_on(2, 2))
    assert [(check.name, check.status) for check in checks] == [
        ("world, 4 processes", "ok"),
        ("pipeline, 2 of 2", "ok"),
        ("data, 2 of 2", "ok"),
        ("context x data, 2 of 2", "ok"),
        ("tensor x context x data, 2 of 2", "ok"),
        ("expert, 2 of 2", "ok"),
    ]
    assert all(len(own["groups"]) == 6 and own["faults"] == [] for own in results)


def _wrong_sum(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Loses one process's part: what a broken reduction does."""
    dist.all_gather_into_tensor(parts := value.new_empty(group.size() * value.numel()), value, group=group)
    value.copy_(parts.view(group.size(), -1)[1:].sum(0))


def _wrong_gather(output: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
    pieces = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(pieces, value, group=group)
    output.copy_(torch.cat(pieces[::-1]))


def _wrong_scatter(output: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(value, group=group)
    output.copy_(value.view(group.size(), -1)[(group.rank() + 1) % group.size()])


def _wrong_exchange(output: torch.Tensor, value: torch.Tensor, sizes: Any, own: Any, group: dist.ProcessGroup) -> None:
    output.zero_()


def _wrong_broadcast(value: torch.Tensor, group: dist.ProcessGroup, group_src: int) -> None:
    value.fill_(float("nan")) if value.is_floating_point() else value.fill_(-1)


def _wrong_ring(operations: list[dist.P2POp]) -> list[Any]:
    operations[1].tensor.copy_(operations[0].tensor)
    return []


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "all-reduce": ("all_reduce", _wrong_sum),
    "all-gather": ("all_gather_into_tensor", _wrong_gather),
    "reduce-scatter": ("reduce_scatter_tensor", _wrong_scatter),
    "uneven all-to-all": ("all_to_all_single", _wrong_exchange),
    "broadcast": ("broadcast", _wrong_broadcast),
    "point-to-point ring": ("batch_isend_irecv", _wrong_ring),
}


def _check_with_faults(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Each collective in turn is replaced, on all ranks, by one that is wrong."""
    found = {}
    assert dist.group.WORLD is not None
    for name, (function, wrong) in FAULTS.items():
        # The module's own reference to torch.distributed: the replacements call the real functions.
        fake = mock.Mock(wraps=dist, P2POp=dist.P2POp, isend=dist.isend, irecv=dist.irecv)
        setattr(fake, function, wrong)
        with mock.patch.object(collectives, "dist", fake):
            found[name] = collectives.check_groups({"world": dist.group.WORLD}, CPU)
    return found


def test_every_fault_is_found_in_every_dtype_and_named(pool: WorkerPool) -> None:
    results = pool.run(3, _check_with_faults)
    peers = peers_on(3, 1)
    for name in FAULTS:
        (check,) = collectives.judge([own[name] for own in results], peers)
        assert check.status == "failed", name
        assert check.value == f"wrong: {name} of fp32, {name} of bf16, {name} of int64"
        assert "rank 0 (node0) got " in check.advice and f"from {name} of fp32 among ranks 0-2" in check.advice


def _one_rank_wrong(rank: int, world_size: int) -> dict[str, Any]:
    groups = groups_of(ParallelConfig(pipeline=2))
    real = dist.all_reduce

    def damaged(value: torch.Tensor, group: dist.ProcessGroup) -> None:
        real(value, group=group)
        if rank == 3 and group.size() == 2 and value.dtype == torch.bfloat16:
            value[1000] += 1

    with mock.patch.object(collectives.dist, "all_reduce", damaged):
        return collectives.check_groups(groups, CPU)


def test_one_wrong_element_on_one_process_is_found(pool: WorkerPool) -> None:
    results = pool.run(4, _one_rank_wrong)
    world, pipeline, data = collectives.judge(results, peers_on(2, 2))[:3]
    assert world.status == "ok"
    assert (pipeline.status, data.status) == ("failed", "failed")
    expected = collectives._sum(2, 2000, CPU)[1000]
    assert pipeline.advice == (
        f"rank 3 (node1) got {expected + 1} instead of {expected} at element 1000 (1 of 65537 wrong) "
        "from all-reduce of bf16 among ranks 1, 3"
    )


@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_the_known_sum_is_the_sum_in_every_order_and_dtype(size: int) -> None:
    parts = torch.stack([collectives._addends(rank, size, 300, CPU) for rank in range(size)])
    assert torch.equal(parts.sum(0), collectives._sum(size, 300, CPU))
    assert ((parts > 0).sum(0) == min(size, 3)).all()
    # Exact in bfloat16 whatever is added first.
    for order in (range(size), reversed(range(size))):
        total = torch.zeros(300, dtype=torch.bfloat16)
        for rank in order:
            total += parts[rank].bfloat16()
        assert torch.equal(total.long(), collectives._sum(size, 300, CPU))


def test_without_a_configuration_groups_lie_inside_and_across_nodes() -> None:
    assert example_layout(16, 8) == ParallelConfig(pipeline=2, expert=8)
    assert example_layout(4096, 8) == ParallelConfig(pipeline=2, expert=8)
    assert example_layout(12, 4) == ParallelConfig(pipeline=2, expert=2)
    assert example_layout(3, 1) == ParallelConfig()
