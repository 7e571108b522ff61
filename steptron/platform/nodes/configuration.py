"""Whether a run's configuration fits this many processes, on every node."""

from __future__ import annotations

from collections.abc import Sequence

from steptron.config.checks import check
from steptron.config.schema import PretrainConfig
from steptron.errors import ConfigError
from steptron.platform.doctor import Check
from steptron.platform.nodes.peers import Peer, name_ranks

SECTION = "configuration"


def own_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """What this process would refuse the configuration for; nodes can differ in devices, kernels and permissions."""
    try:
        check(config, world_size=world_size)
    except ConfigError as error:
        return list(error.problems)
    return []


def judge(problems: Sequence[list[str]], peers: Sequence[Peer]) -> list[Check]:
    """One line, or one per problem, with those who have it.

    Args:
        problems: what ``own_problems`` returned on each process.
        peers: all processes.
    """
    name = f"for {len(peers)} processes"
    checks = []
    for problem in dict.fromkeys(problem for own in problems for problem in own):
        ranks = [rank for rank, own in enumerate(problems) if problem in own]
        where = "on all" if len(ranks) == len(peers) else f"on {name_ranks(ranks, peers)}"
        checks.append(Check(SECTION, name, "failed", f"refused {where}", problem))
    return checks or [Check(SECTION, name, "ok", "fits")]
