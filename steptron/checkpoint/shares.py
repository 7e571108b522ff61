"""Work that processes divide up between them. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deals items out to ``count`` processes so that each gets about as many bytes; returns indices, ascending."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += sizes[item]
    return [sorted(share) for share in shares]
