"""What is said of communication: its kinds, and how many bytes a collective carries. Plain data, no torch.

Shared by what counts bytes in the collectives (``steptron.profiling.communication``) and by what computes
them beforehand (``steptron.planning.communication``), so that both mean the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of communication, and which buffer's bytes are their payload on a rank."""

    ALL_REDUCE = "all_reduce"
    """The buffer."""
    ALL_GATHER = "all_gather"
    """The output, of all ranks."""
    REDUCE_SCATTER = "reduce_scatter"
    """The input, of all ranks."""
    ALL_TO_ALL = "all_to_all"
    """The input, with what the rank sends to itself."""
    SEND = "send"
    """The tensor; receiving it counts nothing."""
    BROADCAST = "broadcast"
    """The buffer."""
    REDUCE = "reduce"
    """The buffer."""
    GATHER = "gather"
    """The rank's own input."""
    SCATTER = "scatter"
    """The root's input; nothing on other ranks."""
    BARRIER = "barrier"
    """Nothing."""


_WIRE_FACTORS = {Kind.ALL_REDUCE: 2, Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 1, Kind.BROADCAST: 1, Kind.REDUCE: 1}
"""Times (g - 1) / g of the payload."""


def wire_bytes(kind: Kind, payload: int, group_size: int, to_others: float | None = None) -> float:
    """Bytes that a rank sends to others.

    For collectives by the ring algorithm, mean over ranks: an all-reduce sends 2 (g - 1) / g of its buffer,
    gathering, scattering, broadcasting and reducing (g - 1) / g. Other algorithms (trees, reduction in the
    switch) send other amounts.

    Args:
        kind: the operation.
        payload: bytes, as ``Kind`` defines them.
        group_size: g.
        to_others: of the payload, what is for other ranks; for the kinds that are no ring.
    """
    if kind in _WIRE_FACTORS:
        return _WIRE_FACTORS[kind] * payload * (group_size - 1) / group_size
    return float(payload if to_others is None else to_others)


@dataclass(frozen=True)
class Traffic:
    """Communication of one rank.

    Attributes:
        calls: operations.
        payload: bytes handed to them, as ``Kind`` defines them.
        wire: bytes sent to other ranks, by :func:`wire_bytes`.
    """

    calls: int = 0
    payload: int = 0
    wire: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.payload + other.payload, self.wire + other.wire)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.calls * times, self.payload * times, self.wire * times)


@dataclass(frozen=True)
class CommunicationVolume:
    """Communication of one rank by (group, kind); groups go by the names of Megatron's ``ProcessGroupCollection``."""

    traffic: Mapping[tuple[str, Kind], Traffic]

    @classmethod
    def sum(cls, volumes: Iterable[CommunicationVolume]) -> CommunicationVolume:
        """Of several, all added up."""
        total: dict[tuple[str, Kind], Traffic] = {}
        for volume in volumes:
            for key, traffic in volume.traffic.items():
                total[key] = total.get(key, Traffic()) + traffic
        return cls(total)

    def total(self, group: str | None = None) -> Traffic:
        """Of all kinds added up, over one group or all."""
        return sum((t for (name, _), t in self.traffic.items() if group in (None, name)), Traffic())

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in order of appearance."""
        return tuple(dict.fromkeys(name for name, _ in self.traffic))
