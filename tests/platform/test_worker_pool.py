"""The pool that serves the multi-process tests."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.worker_pool import WorkerError, WorkerPool


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float, int]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item(), os.getpid()


def _fail_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("broken on purpose")
    dist.barrier()


def _die_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _sleep_in_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)


def _group_size(rank: int, world_size: int) -> int:
    from megatron.core import parallel_state

    assert not parallel_state.is_initialized()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    return parallel_state.get_pipeline_model_parallel_world_size()


def test_groups_have_the_size_asked_for_and_workers_are_kept(pool: WorkerPool) -> None:
    first = pool.run(2, _sum_of_ranks, 0)
    assert [(rank, total) for rank, total, _ in first] == [(0, 1.0), (1, 1.0)]
    second = pool.run(4, _sum_of_ranks, 10)
    assert [total for _, total, _ in second] == [46.0] * 4
    third = pool.run(1, _sum_of_ranks, 5)
    assert third[0][:2] == (0, 5.0)
    assert third[0][2] == first[0][2] == second[0][2] != os.getpid()


def test_megatron_groups_are_destroyed_between_tasks(pool: WorkerPool) -> None:
    assert pool.run(2, _group_size) == [2, 2]
    assert pool.run(1, _group_size) == [1]
    assert pool.run(2, _group_size) == [2, 2]


def test_exception_names_the_rank_and_shows_its_traceback(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1 raised:.*_fail_in_rank_1.*broken on purpose"):
        pool.run(2, _fail_in_rank_1)
    assert len(pool.run(2, _sum_of_ranks, 0)) == 2


def test_death_names_the_rank_and_its_exit_code(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1 died with exit code 7"):
        pool.run(2, _die_in_rank_1)
    assert len(pool.run(2, _sum_of_ranks, 0)) == 2


def test_timeout_names_the_rank_and_shows_its_stack(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)ranks \[0\] of 2 did not answer within 2 s.*_sleep_in_rank_0"):
        pool.run(2, _sleep_in_rank_0, timeout=2.0)
    assert len(pool.run(2, _sum_of_ranks, 0)) == 2


def test_refuses_more_workers_than_it_has(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        pool.run(5, _sum_of_ranks, 0)
