"""The tournament of links, and what is said of its results."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steptron.platform.nodes import links
from steptron.platform.nodes.links import Link
from tests.platform.nodes.simulated import peers_on
from tests.worker_pool import WorkerPool


@pytest.mark.parametrize("players", [1, 2, 3, 4, 7, 8, 33, 128])
def test_everyone_meets_everyone_once(players: int) -> None:
    met = set()
    for turn in range(links.turns(players)):
        pairs = {player: links.opponent(player, turn, players) for player in range(players)}
        assert all(other is None or (pairs[other] == player != other) for player, other in pairs.items())
        assert sum(other is None for other in pairs.values()) == players % 2
        met |= {(turn, *sorted((player, other))) for player, other in pairs.items() if other is not None}
    assert len(met) == players * (players - 1) // 2
    assert len({pair[1:] for pair in met}) == len(met)
    assert links.turns(players) <= players


def test_between_nodes_every_process_meets_its_counterparts() -> None:
    peers = peers_on(nodes=4, per_node=2)
    for rank in range(8):
        met = links.between_nodes(rank, peers)
        assert sorted(met) == [other for other in range(rank % 2, 8, 2) if other != rank]
    for rank in range(8):
        assert links.inside_node(rank, peers) == [rank ^ 1]


def test_partners_agree_where_nodes_have_different_numbers_of_processes() -> None:
    peers = [peer for peer in peers_on(nodes=3, per_node=3) if peer.rank < 8]  # the last node has two
    schedules = [links.between_nodes(rank, peers) for rank in range(8)]
    for turn in range(3):
        for rank, schedule in enumerate(schedules):
            assert schedule[turn] is None or schedules[schedule[turn]][turn] == rank
    assert (
        len({frozenset((rank, other)) for rank, own in enumerate(schedules) for other in own if other is not None}) == 7
    )


def _measure(rank: int, world_size: int) -> list[Link]:
    return links.measure(rank, links.between_nodes(rank, peers_on(4, 1)), torch.device("cpu"))


def test_all_pairs_are_measured(pool: WorkerPool) -> None:
    found = [link for own in pool.run(4, _measure) for link in own]
    assert sorted((link.a, link.b) for link in found) == [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert all(link.intact and 0 < link.latency < 1 and link.bandwidth > 1e6 for link in found)


def _damaged(rank: int, world_size: int) -> list[Link]:
    real = dist.batch_isend_irecv

    def flipped(operations: list[dist.P2POp]) -> list[dist.Work]:
        operations[0].tensor = operations[0].tensor ^ 1
        return real(operations)

    with mock.patch.object(links.dist, "batch_isend_irecv", flipped if rank == 1 else real):
        return links.measure(rank, links.inside_node(rank, peers_on(1, 2)), torch.device("cpu"))


def test_a_link_that_changes_what_it_carries_fails(pool: WorkerPool) -> None:
    found = [link for own in pool.run(2, _damaged) for link in own]
    checks = {check.name: check for check in links.judge(links.INSIDE_NODES, found, peers_on(1, 2), 4 << 20)}
    assert checks["content"].status == "failed" and "ranks 0 - 1 (node0)" in checks["content"].advice


def _gone(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as error:
        links.measure(rank, [1], torch.device("cpu"))
    return str(error.value)


def test_a_partner_that_does_not_answer_is_named(pool: WorkerPool) -> None:
    assert pool.run(2, _gone)[0].startswith("rank 0 waited for rank 1: ")


def _links(speeds: dict[tuple[int, int], float]) -> list[Link]:
    return [Link(a, b, 1e-5, speed, True) for (a, b), speed in speeds.items()]


def test_slow_pairs_and_slow_nodes_are_named() -> None:
    peers = peers_on(nodes=4, per_node=1)
    speeds = {(0, 1): 10e9, (0, 2): 11e9, (0, 3): 4.9e9, (1, 2): 10e9, (1, 3): 10.2e9, (2, 3): 10e9}
    pairs = {check.name: check for check in links.judge(links.BETWEEN_NODES, _links(speeds), peers, 64 << 20)}
    assert pairs["bandwidth"].value == "min 4.9, median 10, max 11 GB/s"
    assert pairs["bandwidth"].advice == "64 MiB each way at once; pairs measured: 6"
    assert pairs["latency"].value == "min 10, median 10, max 10 µs"
    assert (pairs["slowest pairs"].status, pairs["slowest pairs"].value) == ("warning", "1 below half of the median")
    assert pairs["slowest pairs"].advice == "ranks 0 - 3 (node0 - node3) 4.9 GB/s"

    speeds |= {(1, 3): 2e9}
    slow = {check.name: check for check in links.judge(links.BETWEEN_NODES, _links(speeds), peers, 64 << 20)}
    assert slow["slowest pairs"].advice.startswith("ranks 1 - 3 (node1 - node3) 2 GB/s; ranks 0 - 3")
    assert slow["slowest pairs"].advice.endswith("; most links of node3 are slow: look at its network card and cables")

    speeds = {pair: 10e9 for pair in speeds}
    good = {check.name: check for check in links.judge(links.BETWEEN_NODES, _links(speeds), peers, 64 << 20)}
    assert {check.status for check in good.values()} == {"ok"} and "content" not in good
