"""Counting what known programs hand to collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch.utils.checkpoint import checkpoint

from steptron.config.schema import ParallelConfig
from steptron.parallel.mesh import build_mesh
from steptron.parallel.traffic import Kind, Traffic
from steptron.profiling.communication import CommunicationCounter, group_names
from tests.worker_pool import WorkerPool

Counted = dict[tuple[str, Kind], Traffic]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _collectives(rank: int, size: int) -> Counted:
    """Each kind once, with tensors of other sizes and dtypes; returns what was counted."""
    x = torch.ones(12)  # 48 bytes
    with CommunicationCounter({_world().group_name: "all"}) as counter:
        works = [dist.all_reduce(x.double(), async_op=True)]
        dist.all_gather_into_tensor(torch.empty(3 * 12), x)
        dist.all_gather([torch.empty(5, dtype=torch.bfloat16) for _ in range(3)], x[:5].bfloat16())
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(3)])
        dist.broadcast(x.long(), src=1)
        dist.reduce(x, dst=0)
        dist.gather(x, [torch.empty(12) for _ in range(3)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(3)] if rank == 0 else None, src=0)
        dist.barrier()
        sent = [(torch.ones(rank + 1), (rank + 1) % 3), (torch.ones(2), (rank + 2) % 3)]
        received = [torch.empty((rank + 2) % 3 + 1), torch.empty(2)]
        works += [dist.isend(tensor, to) for tensor, to in sent]
        dist.recv(received[0], (rank + 2) % 3)
        dist.recv(received[1], (rank + 1) % 3)
        for work in works:
            assert work is not None
            work.wait()
    dist.all_reduce(x)  # outside: not counted
    return dict(counter.volume.traffic)


def test_every_kind_counts_its_payload_and_what_a_ring_sends(pool: WorkerPool) -> None:
    for rank, counted in enumerate(pool.run(3, _collectives)):
        root = rank == 0
        assert counted == {
            ("all", Kind.ALL_REDUCE): Traffic(1, 96, 2 * 96 * 2 / 3),
            ("all", Kind.ALL_GATHER): Traffic(2, 144 + 30, (144 + 30) * 2 / 3),
            ("all", Kind.REDUCE_SCATTER): Traffic(2, 48 + 24, (48 + 24) * 2 / 3),
            ("all", Kind.BROADCAST): Traffic(1, 96, 96 * 2 / 3),
            ("all", Kind.REDUCE): Traffic(1, 48, 48 * 2 / 3),
            ("all", Kind.GATHER): Traffic(1, 48, 0 if root else 48),
            ("all", Kind.SCATTER): Traffic(1, 24 if root else 0, 16 if root else 0),
            ("all", Kind.BARRIER): Traffic(1, 0, 0),
            ("all", Kind.SEND): Traffic(2, 4 * (rank + 1) + 8, 4 * (rank + 1) + 8),
        }


def _all_to_alls(rank: int, size: int) -> Counted:
    """Rank r has r + 1 rows of 2 floats for itself and one for the other."""
    to = [rank + 1 if other == rank else 1 for other in range(2)]
    with CommunicationCounter({_world().group_name: "all"}) as counter:
        dist.all_to_all_single(torch.empty(sum(to), 2), torch.ones(sum(to), 2), to, to)
        dist.all_to_all_single(torch.empty(6, 3), torch.ones(6, 3))
        dist.all_to_all_single(torch.empty(0, 3), torch.ones(0, 3), [0, 0], [0, 0])
    return dict(counter.volume.traffic)


def test_all_to_all_sends_what_is_not_for_the_rank_itself(pool: WorkerPool) -> None:
    for rank, counted in enumerate(pool.run(2, _all_to_alls)):
        assert counted == {("all", Kind.ALL_TO_ALL): Traffic(3, 8 * (rank + 2) + 72, 8 + 36)}


def _layout(rank: int, size: int, recompute: bool) -> Counted:
    """Forward and backward through Megatron's regions, over named groups."""
    groups = build_mesh(ParallelConfig(tensor=2)).groups
    x = torch.ones(6, 5, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.gather_from_sequence_parallel_region(x, group=groups.tp).square()

    with CommunicationCounter(group_names(groups)) as counter:
        y = checkpoint(region, x, use_reentrant=True) if recompute else region(x)
        y.sum().backward()
        dist.all_reduce(torch.ones(3), group=groups.dp_cp)
        dist.all_reduce(torch.ones(1), group=groups.pp)
        dist.all_reduce(torch.ones(2))
    return dict(counter.volume.traffic)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_passes_and_named_groups(pool: WorkerPool, recompute: bool) -> None:
    gathers = 2 if recompute else 1
    for counted in pool.run(4, _layout, recompute):
        assert counted == {
            ("tp", Kind.ALL_GATHER): Traffic(gathers, 240 * gathers, 120 * gathers),
            ("tp", Kind.REDUCE_SCATTER): Traffic(1, 240, 120),
            ("dp_cp", Kind.ALL_REDUCE): Traffic(1, 12, 12),
            ("pp", Kind.ALL_REDUCE): Traffic(1, 4, 0),
            ("world", Kind.ALL_REDUCE): Traffic(1, 8, 12),
        }


def _hooks(rank: int, size: int) -> list[tuple[Any, ...]]:
    """A reduction started by a gradient's hook, over a group without a name."""
    pair = dist.new_group([0, 2])
    parameter = torch.nn.Parameter(torch.ones(7))
    works = []

    def reduce(p: torch.Tensor) -> None:
        assert p.grad is not None and isinstance(pair, dist.ProcessGroup)
        works.append(dist.all_reduce(p.grad, group=pair, async_op=True))

    if rank != 1:
        parameter.register_post_accumulate_grad_hook(reduce)
    with CommunicationCounter() as counter:
        parameter.square().sum().backward()
    for work in works:
        assert work is not None
        work.wait()
    return [(*key, traffic) for key, traffic in counter.volume.traffic.items()]


def test_hooks_are_counted_and_unnamed_groups_go_by_their_ranks(pool: WorkerPool) -> None:
    one, nothing, other = pool.run(3, _hooks)
    assert nothing == []
    assert one == other == [("ranks 0,2", Kind.ALL_REDUCE, Traffic(1, 28, 28))]


def _refused(rank: int, size: int) -> list[str]:
    import torch.distributed._functional_collectives as functional

    messages = []
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("shout(Tensor x) -> Tensor")
    library.impl("shout", lambda x: x.clone(), "CompositeExplicitAutograd")
    calls: list[Callable[[], Any]] = [
        lambda: functional.all_reduce(torch.ones(2), "sum", _world()),
        lambda: torch.ops.c10d.shout(torch.ones(2)),
    ]
    for call in calls:
        try:
            with CommunicationCounter():
                call()
        except NotImplementedError as error:
            messages.append(str(error))
    return messages


def test_what_is_not_known_is_refused(pool: WorkerPool) -> None:
    (messages,) = pool.run(1, _refused)
    assert "functional collectives are not counted" in messages[0] and "all_reduce" in messages[0]
    assert "c10d.shout" in messages[1] and "not known" in messages[1]
