"""Clocks of the nodes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from steptron.platform.nodes import clocks
from steptron.platform.nodes.clocks import Offset
from tests.platform.nodes.simulated import peers_on, roll_of
from tests.worker_pool import WorkerPool

AHEAD = {0: 0.0, 1: 0.0, 2: 2.5, 3: -7.25}  # seconds, by rank


def _measure(rank: int, world_size: int) -> dict[str, Any] | None:
    roll = roll_of(rank, world_size, per_node=1)
    return clocks.measure(roll, "127.0.0.1", 20, lambda: time.time_ns() + int(AHEAD[rank] * 1e9))


def test_clocks_that_are_off_are_measured_within_their_uncertainty(pool: WorkerPool) -> None:
    first, *found = pool.run(4, _measure)
    assert first is None
    for rank, own in enumerate(found, start=1):
        assert abs(own["seconds"] - AHEAD[rank]) <= own["uncertainty"] < 0.05
    (check,) = clocks.judge([None, *found], peers_on(4, 1))
    assert check.status == "failed" and check.name == "offset to node0"
    assert check.advice.startswith("node3 -72") and "; node2 +2" in check.advice and "node1" not in check.advice


def _measure_on_two_nodes(rank: int, world_size: int) -> dict[str, Any] | None:
    return clocks.measure(roll_of(rank, world_size, per_node=2), "127.0.0.1", 20)


def test_one_process_per_node_measures(pool: WorkerPool) -> None:
    found = pool.run(4, _measure_on_two_nodes)
    assert [own is not None for own in found] == [False, False, True, False]
    (check,) = clocks.judge(found, peers_on(2, 2))
    assert check.status == "ok" and check.value.endswith("(node1), 2 nodes")


@pytest.mark.parametrize(
    ("offset", "status"),
    [
        (Offset(0.09, 0.0), "ok"),
        (Offset(-0.11, 0.0), "warning"),
        (Offset(0.11, 0.02), "ok"),  # a slow network, not a wrong clock
        (Offset(-4.9, 0.001), "warning"),
        (Offset(5.1, 0.001), "failed"),
    ],
)
def test_limits(offset: Offset, status: str) -> None:
    (check,) = clocks.judge([None, vars(offset)], peers_on(2, 1))
    assert check.status == status


def _one_stays_away(rank: int, world_size: int) -> str:
    roll = roll_of(rank, world_size, per_node=1)
    if rank == 2:
        roll.tell("clock server")
        return ""
    try:
        clocks.measure(roll, "127.0.0.1", 2.0)
    except OSError as error:
        return str(error)
    return ""


def test_a_node_that_does_not_come_is_named(pool: WorkerPool) -> None:
    assert pool.run(3, _one_stays_away) == ["no connection from node2 (1 in all) within 2 s", "", ""]
