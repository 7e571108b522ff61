"""The processes of a run, and how a message names them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

_NAMED_HOSTS = 8  # hosts that a message lists


@dataclass(frozen=True)
class Peer:
    """One process.

    Attributes:
        rank: its number.
        local_rank: its number on its node.
        node: number of its node, from 0 in the order of the nodes' lowest ranks.
        host: its node's name; unique, so with a number where several nodes have the same name.
    """

    rank: int
    local_rank: int
    node: int
    host: str


@dataclass(frozen=True)
class Place:
    """Where a process says it is: the machine's name and, where the launcher counts nodes, the node's number."""

    host: str
    number: int
    local_rank: int


def own_place(local_rank: int, environment: Mapping[str, str] = os.environ) -> Place:
    """Where this process is. srun's name of the node comes before the machine's own, which in a container can be
    the same everywhere."""
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    number = environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or "0"
    return Place(host, int(number) if number.isdecimal() else 0, local_rank)


def peers_of(places: Sequence[Place]) -> tuple[Peer, ...]:
    """All processes, from what each said, by rank."""
    nodes = list(dict.fromkeys((place.host, place.number) for place in places))
    hosts = [host for host, _ in nodes]
    names = [host if hosts.count(host) == 1 else f"{host}#{number}" for host, number in nodes]
    numbers = {node: number for number, node in enumerate(nodes)}
    return tuple(
        Peer(rank, place.local_rank, node := numbers[place.host, place.number], names[node])
        for rank, place in enumerate(places)
    )


def ranks_by_node(peers: Sequence[Peer]) -> list[list[int]]:
    """Ranks of each node, by local rank."""
    nodes: list[list[Peer]] = [[] for _ in range(1 + max(peer.node for peer in peers))]
    for peer in peers:
        nodes[peer.node].append(peer)
    return [[peer.rank for peer in sorted(node, key=lambda peer: peer.local_rank)] for node in nodes]


def name_ranks(ranks: Iterable[int], peers: Sequence[Peer]) -> str:
    """Names ranks by host: ``ranks 0-3, 7 (node1); rank 8 (node2)``; of many hosts the first ones."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(peers[rank].host, []).append(rank)
    named = [
        f"rank{'s' if len(own) > 1 else ''} {spans(own)} ({host})" for host, own in list(by_host.items())[:_NAMED_HOSTS]
    ]
    left = len(by_host) - len(named)
    return "; ".join(named) + (f"; and on {left} more hosts" if left else "")


def spans(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(parts)
