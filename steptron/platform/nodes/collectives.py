"""Collectives, each against its known result, on the whole world and on a layout's groups.

Values are small whole numbers, which float32, bfloat16 and int64 hold and add up exactly in any order, so that
every element must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from steptron.platform.doctor import Check
from steptron.platform.nodes.peers import Peer, name_ranks, spans

SECTION = "collectives"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}

# A prime, so that no algorithm's pieces are equal; large enough to be cut into pieces.
_ELEMENTS = 65_537
_PIECE = 257  # elements per process where each contributes a piece
_ADDENDS = 3  # processes that contribute to one element of a sum, so that it stays exact in bfloat16
_NAMED = 3  # faults that a message lists


@dataclass(frozen=True)
class Fault:
    """A wrong result of one collective in one group.

    Attributes:
        group: kind of group.
        members: its ranks, as ``spans`` writes them.
        collective, dtype: what was tried.
        wrong, elements: how many of the elements differ.
        first: index of the first that does.
        got, expected: its values.
    """

    group: str
    members: str
    collective: str
    dtype: str
    wrong: int
    elements: int
    first: int
    got: float
    expected: float


def check_groups(groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> dict[str, Any]:
    """Runs all collectives in all groups that this process belongs to.

    Args:
        groups: by name, in the same order on every process; those of one process are left out.
        device: of the tensors.

    Returns:
        ``groups``: by name, size, lowest rank and seconds; ``faults``: fields of each `Fault`.

    Raises:
        RuntimeError: a collective failed or reached the group's timeout; the message names collective and group.
    """
    tried: dict[str, dict[str, Any]] = {}
    faults: list[dict[str, Any]] = []
    for name, group in groups.items():
        if group.size() == 1:
            continue
        start = time.perf_counter()
        for collective, action in _COLLECTIVES.items():
            for dtype_name, dtype in DTYPES.items():
                try:
                    got, expected = action(group, dtype, device)
                    fault = _compare(name, group, collective, dtype_name, got, expected)
                except RuntimeError as error:
                    raise RuntimeError(f"{collective} of {dtype_name} in the {name} group: {error}") from error
                if fault is not None:
                    faults.append(asdict(fault))
        ranks = dist.get_process_group_ranks(group)
        tried[name] = {"size": len(ranks), "first": ranks[0], "seconds": time.perf_counter() - start}
    return {"groups": tried, "faults": faults}


def judge(results: Sequence[dict[str, Any]], peers: Sequence[Peer]) -> list[Check]:
    """One line per kind of group.

    Args:
        results: what ``check_groups`` returned on each process.
        peers: all processes.
    """
    names = list(dict.fromkeys(name for own in results for name in own["groups"]))
    checks = []
    for name in names:
        members = [own["groups"][name] for own in results if name in own["groups"]]
        count, size = len({member["first"] for member in members}), members[0]["size"]
        what = f"{name}, {size} processes" if count == 1 else f"{name}, {count} of {size}"
        faults = [
            (rank, Fault(**fault))
            for rank, own in enumerate(results)
            for fault in own["faults"]
            if fault["group"] == name
        ]
        if faults:
            found = "wrong: " + ", ".join(dict.fromkeys(f"{fault.collective} of {fault.dtype}" for _, fault in faults))
            named = "; ".join(_describe(rank, fault, peers) for rank, fault in faults[:_NAMED])
            more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            checks.append(Check(SECTION, what, "failed", found, named + more))
        else:
            seconds = max(member["seconds"] for member in members)
            tried = f"{', '.join(_COLLECTIVES)}; {', '.join(DTYPES)}"
            checks.append(Check(SECTION, what, "ok", f"all right, {seconds:.2f} s", tried))
    return checks or [Check(SECTION, "world", "off", "one process")]


def _describe(rank: int, fault: Fault, peers: Sequence[Peer]) -> str:
    return (
        f"{name_ranks([rank], peers)} got {fault.got:g} instead of {fault.expected:g} at element {fault.first} "
        f"({fault.wrong} of {fault.elements} wrong) from {fault.collective} of {fault.dtype} "
        f"among ranks {fault.members}"
    )


def _compare(
    name: str, group: dist.ProcessGroup, collective: str, dtype: str, got: torch.Tensor, expected: torch.Tensor
) -> Fault | None:
    # In float64 a NaN is unequal to everything, as it should be.
    got, expected = got.double().flatten(), expected.double().flatten()
    wrong = (got != expected).nonzero().flatten()
    if not wrong.numel():
        return None
    first = int(wrong[0])
    return Fault(
        group=name,
        members=spans(dist.get_process_group_ranks(group)),
        collective=collective,
        dtype=dtype,
        wrong=wrong.numel(),
        elements=got.numel(),
        first=first,
        got=float(got[first]),
        expected=float(expected[first]),
    )


# ------------------------------------------------------------------------------- values and collectives


def _values(source: int, target: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: what ``source`` says to ``target``; below 251, so exact in bfloat16."""
    return (torch.arange(count, device=device) + 13 * source + 7 * target) % 251


def _addends(rank: int, size: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: a process's part of a sum. Element i has parts of processes i, i + 1, i + 2 (modulo the number
    of processes) only, between 1 and 11, so that partial sums are exact in every order."""
    element = torch.arange(count, device=device)
    contributes = (rank - element) % size < _ADDENDS
    return torch.where(contributes, 1 + (element + 3 * rank) % 11, 0)


def _sum(size: int, count: int, device: torch.device) -> torch.Tensor:
    element = torch.arange(count, device=device)
    total = torch.zeros(count, dtype=torch.int64, device=device)
    for offset in range(min(_ADDENDS, size)):
        total += 1 + (element + 3 * ((element + offset) % size)) % 11
    return total


Result = tuple[torch.Tensor, torch.Tensor]
"""What a process got, and what it should have got."""


def _all_reduce(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    value = _addends(group.rank(), group.size(), _ELEMENTS, device).to(dtype)
    dist.all_reduce(value, group=group)
    return value, _sum(group.size(), _ELEMENTS, device)


def _reduce_scatter(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    rank, size = group.rank(), group.size()
    value = _addends(rank, size, size * _PIECE, device).to(dtype)
    piece = torch.empty(_PIECE, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(piece, value, group=group)
    return piece, _sum(size, size * _PIECE, device)[rank * _PIECE : (rank + 1) * _PIECE]


def _all_gather(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    size = group.size()
    gathered = torch.empty(size * _PIECE, dtype=dtype, device=device)
    dist.all_gather_into_tensor(gathered, _values(group.rank(), 0, _PIECE, device).to(dtype), group=group)
    return gathered, torch.cat([_values(source, 0, _PIECE, device) for source in range(size)])


def _broadcast(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    """From the first and from the last process."""
    got, expected = [], []
    for source in (0, group.size() - 1):
        own = _values(source, 1, _ELEMENTS, device)
        value = own.to(dtype) if group.rank() == source else torch.zeros(_ELEMENTS, dtype=dtype, device=device)
        dist.broadcast(value, group=group, group_src=source)
        got.append(value)
        expected.append(own)
    return torch.cat(got), torch.cat(expected)


def _rows(source: int, target: int) -> int:
    """Elements that travel between two processes in the uneven all-to-all; for some pairs none."""
    return (source + 2 * target) % 5 * 61


def _all_to_all(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    rank, size = group.rank(), group.size()
    sent = torch.cat([_values(rank, target, _rows(rank, target), device) for target in range(size)]).to(dtype)
    counts_in = [_rows(source, rank) for source in range(size)]
    received = torch.empty(sum(counts_in), dtype=dtype, device=device)
    counts_out = [_rows(rank, target) for target in range(size)]
    dist.all_to_all_single(received, sent, counts_in, counts_out, group=group)
    return received, torch.cat([_values(source, rank, _rows(source, rank), device) for source in range(size)])


def _ring(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Result:
    rank, size = group.rank(), group.size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(_ELEMENTS, dtype=dtype, device=device)
    operations = [
        dist.P2POp(
            dist.isend, _values(rank, following, _ELEMENTS, device).to(dtype), group=group, group_peer=following
        ),
        dist.P2POp(dist.irecv, received, group=group, group_peer=previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received, _values(previous, rank, _ELEMENTS, device)


_COLLECTIVES: dict[str, Callable[[dist.ProcessGroup, torch.dtype, torch.device], Result]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "uneven all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "point-to-point ring": _ring,
}
