"""Speed of the connection between any two nodes, and between any two processes of a node.

A tournament: in each round every node has one opponent, and in N - 1 rounds (N even) each has met all others. All
pairs of a round exchange at the same time, so the time grows with N, not with N^2. Between two nodes, every process
exchanges with the one of the same local rank, over its own network card where each has one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from steptron.platform.doctor import Check, Status
from steptron.platform.nodes.peers import Peer, ranks_by_node

BETWEEN_NODES = "links between nodes"
INSIDE_NODES = "links inside nodes"

SLOW = 0.5
"""Share of the median bandwidth below which a link is slow."""

# Enough for the bandwidth and not only the start-up of a transfer: 64 MiB take 2.7 ms at a 200 Gbit/s card's 25 GB/s,
# 4 MiB 2 ms at the 2 GB/s that gloo may reach over TCP.
_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_SMALL_BYTES = 8
_SMALL_REPEATS = 20
_LARGE_REPEATS = 4
_NAMED = 5  # links that a message lists


class Link(NamedTuple):
    """A measured pair of processes, a < b. A million of them are there with 512 nodes of 8: rows of numbers.

    Attributes:
        a, b: ranks.
        latency: seconds of an exchange of 8 bytes (both directions at once), the fastest of several.
        bandwidth: bytes per second in each direction, both at once, the fastest of several.
        intact: whether what arrived was what had been sent.
    """

    a: int
    b: int
    latency: float
    bandwidth: float
    intact: bool


def opponent(player: int, turn: int, players: int) -> int | None:
    """Whom a player meets in a round of a round-robin tournament (the circle method).

    Args:
        player: from 0 to players - 1.
        turn: round, from 0 to ``turns(players)`` - 1.
        players: number of players.

    Returns:
        The other player; None where the number is odd and this one has to wait.
    """
    ring = turns(players)
    if player == ring:  # stands still while the others go round
        other = turn * (ring + 1) // 2 % ring
    else:
        other = (turn - player) % ring
        if other == player:
            other = ring
    return other if other < players else None


def turns(players: int) -> int:
    """Rounds after which everyone has met everyone."""
    return players - 1 if players % 2 == 0 else players


def between_nodes(rank: int, peers: Sequence[Peer]) -> list[int | None]:
    """Ranks that a rank exchanges with, round by round, so that every two nodes meet once."""
    nodes = ranks_by_node(peers)
    own = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    position = nodes[own].index(rank)
    schedule: list[int | None] = []
    for turn in range(turns(len(nodes))):
        other = opponent(own, turn, len(nodes))
        # A node with fewer processes leaves the other's last ones without a partner.
        fits = other is not None and position < min(len(nodes[own]), len(nodes[other]))
        schedule.append(nodes[other][position] if other is not None and fits else None)
    return schedule


def inside_node(rank: int, peers: Sequence[Peer]) -> list[int | None]:
    """Ranks of the same node that a rank exchanges with, round by round."""
    ranks = next(ranks for ranks in ranks_by_node(peers) if rank in ranks)
    own = ranks.index(rank)
    schedule: list[int | None] = []
    for turn in range(turns(len(ranks))):
        other = opponent(own, turn, len(ranks))
        schedule.append(None if other is None else ranks[other])
    return schedule


def measure(rank: int, schedule: Sequence[int | None], device: torch.device) -> list[Link]:
    """Exchanges with one partner after the other over the default group.

    Returns:
        Those of which this rank is the lower one; their higher ranks measure the same exchange.

    Raises:
        RuntimeError: a partner did not answer within the group's timeout; the message names its rank.
    """
    size = _BYTES[device.type]
    sent = torch.full((size,), _mark(rank), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    links = []
    for partner in schedule:
        if partner is None:
            continue
        try:
            link = _measure_one(rank, partner, sent, received)
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} waited for rank {partner}: {error}") from error
        if link.a == rank:
            links.append(link)
    return links


def judge(section: str, links: Sequence[Link], peers: Sequence[Peer], message_bytes: int) -> list[Check]:
    """The lines of one kind of link.

    Args:
        section: heading.
        links: all of this kind.
        peers: all processes.
        message_bytes: that were exchanged for the bandwidth.
    """
    if not links:
        return [Check(section, "bandwidth", "off", "there are none")]
    size = f"{message_bytes >> 20} MiB each way at once; pairs measured: {len(links)}"
    speeds = [link.bandwidth for link in links]
    latencies = [link.latency for link in links]
    checks = [
        Check(section, "bandwidth", "ok", _summary(speeds, 1e-9, "GB/s"), size),
        Check(section, "latency", "ok", _summary(latencies, 1e6, "µs"), "an exchange of 8 bytes"),
    ]
    usual = median(speeds)
    slowest = sorted(links, key=lambda link: link.bandwidth)
    slow = [link for link in slowest if link.bandwidth < SLOW * usual]
    status: Status = "warning" if slow else "ok"
    named = "; ".join(_named(link, peers) for link in (slow or slowest)[:_NAMED])
    found = f"{len(slow)} below half of the median" if slow else "none is below half of the median"
    checks.append(Check(section, "slowest pairs", status, found, named + _common_hosts(slow, links, peers)))
    damaged = [link for link in links if not link.intact]
    if damaged:
        named = "; ".join(_named(link, peers) for link in damaged[:_NAMED])
        checks.append(Check(section, "content", "failed", f"{len(damaged)} pairs received something else", named))
    return checks


def message_bytes(device: torch.device) -> int:
    """Size of the message that measures the bandwidth."""
    return _BYTES[device.type]


def _measure_one(rank: int, partner: int, sent: torch.Tensor, received: torch.Tensor) -> Link:
    received.zero_()
    latency = _fastest(partner, sent[:_SMALL_BYTES], received[:_SMALL_BYTES], _SMALL_REPEATS)
    seconds = _fastest(partner, sent, received, _LARGE_REPEATS)
    intact = bool((received == _mark(partner)).all())
    speed = sent.numel() / seconds
    return Link(min(rank, partner), max(rank, partner), _rounded(latency), _rounded(speed), intact)


def _rounded(value: float) -> float:
    """To what a measurement is worth, and short as text."""
    return float(f"{value:.4g}")


def _mark(rank: int) -> int:
    """A byte that says who sent it; never 0, which the receiver starts from."""
    return rank % 255 + 1


def _fastest(partner: int, sent: torch.Tensor, received: torch.Tensor, repeats: int) -> float:
    """Seconds of the fastest of some exchanges after one that is not counted, in which the connection is made."""
    best = float("inf")
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if sent.is_cuda:
            torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def _summary(values: Sequence[float], scale: float, unit: str) -> str:
    low, middle, high = (f"{value * scale:.3g}" for value in (min(values), median(values), max(values)))
    return f"min {low}, median {middle}, max {high} {unit}"


def _named(link: Link, peers: Sequence[Peer]) -> str:
    a, b = peers[link.a], peers[link.b]
    where = a.host if a.host == b.host else f"{a.host} - {b.host}"
    return f"ranks {a.rank} - {b.rank} ({where}) {link.bandwidth / 1e9:.3g} GB/s"


def _common_hosts(slow: Sequence[Link], links: Sequence[Link], peers: Sequence[Peer]) -> str:
    """Hosts most of whose links are slow: there the fault is the node's, not a pair's."""
    all_of, slow_of = (Counter(host for link in some for host in _hosts(link, peers)) for some in (links, slow))
    hosts = [host for host, count in slow_of.items() if count > all_of[host] / 2 and count > 1]
    return f"; most links of {', '.join(hosts[:_NAMED])} are slow: look at its network card and cables" if hosts else ""


def _hosts(link: Link, peers: Sequence[Peer]) -> set[str]:
    return {peers[link.a].host, peers[link.b].host}
