"""How a group's members lie on nodes. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Factor(StrEnum):
    """The two parts of a group that spans nodes."""

    INTRA = "intra"
    """Ranks of one node."""
    INTER = "inter"
    """Ranks of the same place on every node."""


def split_by_node(ranks: Sequence[int], node_size: int) -> list[list[int]]:
    """The members of a group, node by node; ranks r with the same ``r // node_size`` share a node.

    Args:
        ranks: global ranks of the group's members.
        node_size: ranks per node.

    Returns:
        Equally many members of each node that has any.

    Raises:
        ValueError: nodes have different numbers of members; the message counts them.
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // node_size, []).append(rank)
    sizes = {node: len(members) for node, members in nodes.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} on node {node}" for node, size in sizes.items())
        raise ValueError(
            f"nodes of {node_size} ranks (parallel.node_size) hold different numbers of the members of the "
            f"data-parallel group {sorted(ranks)}: {counts}; take a node size that shares every group evenly, "
            "or leave it unset to reduce gradients in one step"
        )
    return list(nodes.values())


def ranks_by_cell(ranks: Sequence[int], node_size: int | None) -> list[int]:
    """The owner of each of the equal cells of a tensor that the members of a group share.

    Where collectives go within nodes and then between them, cells of the first members of all nodes come first.

    Args:
        ranks: global ranks of the group's members.
        node_size: ranks per node; None where nothing is factored.

    Raises:
        ValueError: nodes have different numbers of members.
    """
    nodes = [list(ranks)] if node_size is None else split_by_node(ranks, node_size)
    return [members[place] for place in range(len(nodes[0])) for members in nodes]
