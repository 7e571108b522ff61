"""Names of processes and nodes."""

from __future__ import annotations

import socket

from steptron.platform.nodes.peers import Place, name_ranks, own_place, peers_of, ranks_by_node, spans
from tests.platform.nodes.simulated import peers_on


def test_place_is_the_launchers_node() -> None:
    assert own_place(3, {"SLURMD_NODENAME": "gpu7", "SLURM_NODEID": "6"}) == Place("gpu7", 6, 3)
    assert own_place(1, {"GROUP_RANK": "2"}) == Place(socket.gethostname(), 2, 1)
    assert own_place(0, {}) == Place(socket.gethostname(), 0, 0)


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    # Cyclic: ranks 0, 2 on b and 1, 3 on a; local ranks in another order than ranks.
    peers = peers_of([Place("b", 1, 1), Place("a", 0, 0), Place("b", 1, 0), Place("a", 0, 1)])
    assert [(peer.node, peer.host) for peer in peers] == [(0, "b"), (1, "a"), (0, "b"), (1, "a")]
    assert ranks_by_node(peers) == [[2, 0], [1, 3]]


def test_nodes_of_the_same_name_are_told_apart() -> None:
    peers = peers_of([Place("localhost", 0, 0), Place("localhost", 1, 0), Place("c", 2, 0)])
    assert [peer.host for peer in peers] == ["localhost#0", "localhost#1", "c"]


def test_ranks_are_named_by_host() -> None:
    peers = peers_on(nodes=12, per_node=4)
    assert name_ranks([5, 0, 1, 2, 7], peers) == "ranks 0-2 (node0); ranks 5, 7 (node1)"
    assert name_ranks([9], peers) == "rank 9 (node2)"
    assert name_ranks(range(48), peers).endswith("ranks 28-31 (node7); and on 4 more hosts")


def test_spans() -> None:
    assert spans([7, 0, 1, 2, 9, 10]) == "0-2, 7, 9-10"
    assert spans([]) == ""
