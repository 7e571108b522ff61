"""Silent data corruption: whether all ranks that hold the same part of a parameter hold the same bits.

Replicas are made equal by construction (one rank updates a part, the others get its bits), so a difference of a single
bit is a fault of memory, of a link or of arithmetic, and training would go on with it unnoticed. Each part is summed up
to 64 bits where it lies, and only the sums travel: 8 bytes per part to every other rank that holds it, in one
collective per group of replicas. Parameters are read once and nothing is copied.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from steptron.errors import UserError, some_of
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import ParameterRole
from steptron.model.parameter_shards import replicas_of
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh
from steptron.parallel.replica_group import ReplicaGroup, WholeGroup
from steptron.parallel.sharded_model import shares_embedding
from steptron.platform.distributed import gather_to_all

_BLOCK = 1 << 15
"""Elements that are weighted alike in every block; part of what a checksum means."""
_BLOCKS_AT_ONCE = {"cpu": 1}
"""Blocks that are widened to 64 bits at once, by type of device: as many as stay in a core's cache."""
_MANY_BLOCKS = 1 << 8
"""On other devices: few kernels, and 64 MiB."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Difference:
    """Copies that are not all equal.

    Attributes:
        name: of the tensor.
        sides: global ranks, those with equal bits together; the largest side first.
    """

    name: str
    sides: tuple[tuple[int, ...], ...]


@torch.no_grad()
def check_replicas(chunks: ModelChunks, optimizer: Optimizer, mesh: Mesh, device: torch.device, step: int) -> None:
    """Compares, bit by bit, what several ranks hold of parameters, selection biases and the embedding's optimizer
    state, of which both pipeline stages that have the embedding keep one. Collective.

    The rest of the optimizer's state exists once. One changed element always changes a part's sum; other differences
    go unseen once in 2^32 cases if only signs differ, once in 2^63 if any bit may.

    An update gives every rank its owner's bits anew: what has happened to a copy since the last one shows only before
    it, what has happened on the way only after it.

    Args:
        chunks: the model, with all parameters up to date.
        optimizer: of this process.
        mesh: the process groups.
        device: what collectives work on.
        step: completed optimizer steps, for the message.

    Raises:
        UserError: on every rank, with the same message: copies differ. It names all of them and the ranks that differ
            from the majority; where there is none, those on every side.
    """
    if dist.get_world_size() == 1:
        return
    differences = list(_differences(chunks, optimizer, mesh))
    if not mesh.add_up(torch.tensor(len(differences), device=device)).item():
        return
    gathered = gather_to_all((socket.gethostname(), differences))
    found = dict.fromkeys(difference for _, own in gathered for difference in own)
    raise UserError(_describe(found, [host for host, _ in gathered], step))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of a contiguous tensor's bits: int64 scalar, on its device.

    Element i, its bits as a signed integer, counts a(i mod 2^15) · b(i div 2^15) times, modulo 2^64, with odd
    pseudo-random factors a and b. Sums of integers do not depend on their order: every device gets the same one.
    """
    integers = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    blocks, rest = integers.numel() // _BLOCK, integers.numel() % _BLOCK
    weights_B, factors_N = (odd.to(tensor.device) for odd in _factors(blocks + 1))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole_NB = integers[: blocks * _BLOCK].view(blocks, _BLOCK)
    at_once = _BLOCKS_AT_ONCE.get(tensor.device.type, _MANY_BLOCKS)
    for part_NB, own_N in zip(whole_NB.split(at_once), factors_N[:blocks].split(at_once), strict=True):
        total += ((part_NB * weights_B).sum(dim=1) * own_N).sum()
    if rest:
        total += (integers[-rest:] * weights_B[:rest]).sum() * factors_N[blocks]
    return total


def _factors(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the elements of a block, and of as many blocks."""
    table = _odd_numbers(_BLOCK + (1 << max(10, blocks.bit_length())))
    return table[:_BLOCK], table[_BLOCK : _BLOCK + blocks]


@functools.lru_cache(maxsize=4)
def _odd_numbers(count: int) -> torch.Tensor:
    """The first outputs of SplitMix64 (Steele, Lea and Flood 2014) with seed 0, made odd, as int64."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


def _differences(chunks: ModelChunks, optimizer: Optimizer, mesh: Mesh) -> Iterator[_Difference]:
    """Those that this rank takes part in."""
    roles = {parameter.name: parameter.role for parameter in chunks.spec.parameters()}
    is_shared = any(map(shares_embedding, chunks))

    def is_on_two_stages(name: str) -> bool:
        return is_shared and roles[name] is ParameterRole.EMBEDDING

    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in chunks.logical_tensors():
        group = replicas_of(roles[name], mesh.tensor_size)
        if mesh.replicas(group).size() > 1 or is_on_two_stages(name):
            groups.setdefault(group, {})[name] = tensor
    # In the same order on all ranks, whose groups overlap.
    for group, tensors in sorted(groups.items()):
        sums_RP = _gather(torch.stack([checksum(tensor) for tensor in tensors.values()]), mesh.replicas(group))
        ranks, names = mesh.replicas(group).ranks_by_cell, list(tensors)
        for index, name in enumerate(names):
            if is_on_two_stages(name):
                yield from _between_stages(name, ranks, sums_RP[:, index], optimizer, mesh)
        on_one = [index for index, name in enumerate(names) if not is_on_two_stages(name)]
        yield from _compare([names[index] for index in on_one], ranks, sums_RP[:, on_one])


def _gather(sums_P: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """[R, P]: the sums of every member, in the order of its cell."""
    sums_RP = sums_P.new_zeros(group.size(), len(sums_P))
    sums_RP[group.cell] = sums_P
    if group.size() > 1:
        group.all_gather(sums_RP).wait()
    return sums_RP


def _between_stages(
    name: str, ranks: Sequence[int], sums_R: torch.Tensor, optimizer: Optimizer, mesh: Mesh
) -> Iterator[_Difference]:
    """The embedding that the first and the last stage have, over all replicas on both, and its optimizer state, which
    has one owner on either."""
    state = [
        (f"optimizer state {kind} of {name}", checksum(tensor.tensor))
        for kind, tensors in optimizer.state().items()
        for tensor in tensors
        if tensor.owned.piece.shard.parameter.role is ParameterRole.EMBEDDING
    ]
    own = torch.stack([*sums_R, *(total for _, total in state), *sums_R.new_tensor([dist.get_rank(), *ranks])])
    size = len(ranks)
    sums_2R, states_2P, ranks_2R = _gather(own, WholeGroup(mesh.groups.embd)).split([size, len(state), 1 + size], dim=1)
    stages = ranks_2R.tolist()
    yield from _compare([name], [rank for _, *members in stages for rank in members], sums_2R.reshape(2 * size, 1))
    yield from _compare([title for title, _ in state], [first for first, *_ in stages], states_2P)


def _compare(names: Sequence[str], ranks: Sequence[int], sums_RP: torch.Tensor) -> Iterator[_Difference]:
    """What differs among the ranks whose sums are the rows."""
    for index in (sums_RP != sums_RP[:1]).any(dim=0).nonzero().flatten().tolist():
        sides: dict[int, list[int]] = {}
        for rank, total in zip(ranks, sums_RP[:, index].tolist(), strict=True):
            sides.setdefault(total, []).append(rank)
        ordered = sorted((tuple(sorted(side)) for side in sides.values()), key=lambda side: (-len(side), side))
        yield _Difference(names[index], tuple(ordered))


def _describe(found: Iterable[_Difference], hosts: Sequence[str], step: int) -> str:
    by_sides: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for difference in found:
        by_sides.setdefault(difference.sides, []).append(difference.name)
    lines = []
    for (largest, *others), names in sorted(by_sides.items()):
        if 2 * len(largest) > len(largest) + sum(map(len, others)):
            wrong = sorted(rank for side in others for rank in side)
            verb = "differs" if len(wrong) == 1 else "differ"
            lines.append(f"{_ranks(wrong, hosts)} {verb} from {_ranks(largest, hosts)} in {some_of(names)}")
        else:
            sides = " and ".join(_ranks(side, hosts) for side in (largest, *others))
            lines.append(f"{sides} differ from each other, and no majority tells which is right, in {some_of(names)}")
    return "\n".join(
        [
            f"training stopped after step {step}: ranks that must hold the same bits do not "
            "(train.faults.replica_check_every_steps):",
            *(f"  {line}" for line in lines),
            "Memory, a processor or a link of the node that differs has failed without a sign. Take that node out of "
            "service, examine it with `steptron doctor`, and give the same command without it: it goes on from the "
            "last checkpoint",
        ]
    )


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``ranks 1, 3 (on a) and 4 (on b)``"""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    places = [f"{some_of(own)} (on {host})" for host, own in by_host.items()]
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of(places)}"
