"""Worker processes that say they are on several nodes."""

from __future__ import annotations

from torch.distributed.distributed_c10d import _get_default_store

from steptron.platform.nodes.peers import Peer, Place, peers_of
from steptron.platform.nodes.roll import Roll


def place_of(rank: int, per_node: int) -> Place:
    return Place(f"node{rank // per_node}", rank // per_node, rank % per_node)


def peers_on(nodes: int, per_node: int) -> tuple[Peer, ...]:
    return peers_of([place_of(rank, per_node) for rank in range(nodes * per_node)])


def roll_of(rank: int, world_size: int, per_node: int, timeout: float = 60.0) -> Roll:
    """The roll of a pool's worker; the timeout is for what comes after, not for the workers' own start."""
    roll = Roll(_get_default_store(), rank, world_size, place_of(rank, per_node), 60.0)
    roll.timeout = timeout
    return roll
