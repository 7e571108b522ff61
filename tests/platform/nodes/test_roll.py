"""Check-ins at the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from steptron.platform.nodes.roll import AbsentError, Roll
from tests.platform.nodes.simulated import place_of, roll_of
from tests.worker_pool import WorkerPool


def _talk(rank: int, world_size: int) -> list[object]:
    roll = roll_of(rank, world_size, per_node=2)
    said = roll.collect("numbers", {"number": rank * 10})
    told = roll.tell("sum", None if said is None else sum(value["number"] for value in said))
    roll.leave()
    return [roll.own.host, said, told]


def test_rank_0_hears_all_and_all_hear_rank_0(pool: WorkerPool) -> None:
    first, *others = pool.run(4, _talk)
    numbers = [{"number": number} for number in (0, 10, 20, 30)]
    assert first == ["node0", numbers, 60]
    assert others == [["node0", None, 60], ["node1", None, 60], ["node1", None, 60]]


def _absent(rank: int, world_size: int) -> tuple[str, float]:
    roll = roll_of(rank, world_size, per_node=2, timeout=0.5)
    start = time.monotonic()
    if rank in (1, 2):
        return "", 0.0
    with pytest.raises(AbsentError) as error:
        roll.collect("links", rank)
    return str(error.value), time.monotonic() - start


def test_those_who_do_not_come_are_named_with_their_hosts(pool: WorkerPool) -> None:
    (first, waited), _, _, (last, _) = pool.run(4, _absent)
    assert first == "rank 1 (node0); rank 2 (node1) did not come to 'links' within 0.5 s"
    assert waited > 0.4
    assert last == "not all processes came to 'links' within 0.5 s; rank 0 names them"


def _without_first(rank: int, world_size: int) -> str:
    roll = roll_of(rank, world_size, per_node=1, timeout=0.5)
    if rank == 0:
        return ""
    with pytest.raises(AbsentError) as error:
        roll.collect("links", rank)
    with pytest.raises(AbsentError, match="went away before 'verdict'"):
        roll.tell("verdict")
    return str(error.value)


def test_an_absent_rank_0_is_named_by_the_others(pool: WorkerPool) -> None:
    assert pool.run(2, _without_first)[1] == "rank 0 (node0) did not come to 'links' within 0.5 s"


def test_many_processes_of_which_a_few_are_missing() -> None:
    """Without processes: a store in memory, and threads for those who come."""
    store, size, missing = dist.HashStore(), 40, {7, 8, 39}

    def come(rank: int) -> str:
        try:
            Roll(store, rank, size, place_of(rank, 8), 2.0)
        except AbsentError as error:
            return str(error)
        return "came through"

    present = [rank for rank in range(size) if rank not in missing]
    with ThreadPoolExecutor(len(present)) as threads:
        said = dict(zip(present, threads.map(come, present), strict=True))
    assert said[0] == "ranks 7-8, 39 did not come to 'start' within 2 s"
    assert set(said.values()) == {said[0], "not all processes came to 'start' within 2 s; rank 0 names them"}
