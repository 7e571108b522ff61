"""Comparison of replicas: one changed bit in any kind of tensor, on any rank, is found and named."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from steptron.errors import UserError
from steptron.model.layer_spec import ParameterRole
from steptron.parallel.replica_check import check_replicas, checksum
from steptron.train.step import TrainStep
from tests.optim.muon_runs import build
from tests.parallel.layouts import make_batches
from tests.worker_pool import WorkerPool

# ----------------------------------------------------------------------------------------- checksum

MASK = (1 << 64) - 1


def split_mix(state: int) -> int:
    """SplitMix64's output for a state, as published."""
    z = state & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def reference(bits: np.ndarray) -> int:
    """The definition, element by element, in Python's integers."""

    def odd(index: int) -> int:
        return split_mix((index + 1) * 0x9E3779B97F4A7C15) | 1

    total = sum(int(b) * odd(i % 32768) * odd(32768 + i // 32768) for i, b in enumerate(bits))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize(
    "dtype, integers, count",
    [
        (torch.float32, np.int32, 2 * 32768 + 16),
        (torch.float32, np.int32, 32768),
        (torch.float32, np.int32, 1),
        (torch.bfloat16, np.int16, 3000),
        (torch.float64, np.int64, 100),
        (torch.uint8, np.int8, 100),
    ],
)
def test_checksum_is_its_definition(dtype: torch.dtype, integers: type, count: int) -> None:
    width = np.dtype(integers).itemsize
    bits: np.ndarray = np.random.default_rng(count).integers(0, 256, count * width, dtype=np.uint8).view(integers)
    tensor = torch.from_numpy(bits.view(np.uint8)).view(dtype)
    assert int(checksum(tensor)) == reference(bits)
    if count % 4 == 0:
        assert int(checksum(tensor.view(4, -1))) == reference(bits)


def test_reference_uses_the_published_generator() -> None:
    assert split_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of seed 0


def test_every_single_bit_and_every_swap_changes_the_checksum() -> None:
    values = torch.randn(40)
    sums = {int(checksum(values))}
    for index in range(40):
        for bit in range(32):
            changed = values.clone().view(torch.int32)
            changed[index] ^= 1 << bit if bit < 31 else -(1 << 31)
            sums.add(int(checksum(changed.view(torch.float32))))
    assert len(sums) == 1 + 40 * 32
    for first in range(40):
        for second in range(first):
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            sums.add(int(checksum(swapped)))
    assert len(sums) == 1 + 40 * 32 + 40 * 39 // 2


def test_swaps_that_sums_of_moments_do_not_see() -> None:
    """Equal sums of values, of places and of squares of places (Prouhet, Tarry and Escott), and swapped blocks."""
    ones = torch.zeros(2, 8)
    ones[0, [0, 3, 5, 6]] = ones[1, [1, 2, 4, 7]] = 1.0
    assert int(checksum(ones[0])) != int(checksum(ones[1]))
    blocks = torch.randn(3, 32768)
    assert int(checksum(blocks)) != int(checksum(blocks[[1, 0, 2]]))


def test_zero_and_minus_zero_differ() -> None:
    assert int(checksum(torch.tensor([1.0, 0.0]))) != int(checksum(torch.tensor([1.0, -0.0])))


# --------------------------------------------------------------------------------------- the check

EMBEDDING, HEAD, STATE = "embedding.weight", "head.weight", "optimizer state exp_avg_sq of embedding.weight"
NORM, QUERY = "layers.8.attention_norm.weight", "layers.8.attention.input_projection.weight"
EXPERTS, ROUTER, BIAS = "layers.8.ffn.experts.down_projection", "layers.8.ffn.router.weight", "layers.8.ffn.router.bias"


@dataclass(frozen=True)
class Case:
    """What is done to a tensor on some ranks, and all ranks that hold the same part of it."""

    name: str
    damage: str
    bad: tuple[int, ...]
    holders: tuple[int, ...]


ALL = (0, 1, 2, 3)
LAYOUTS: dict[str, tuple[int, list[str], list[Case]]] = {
    "DP2": (
        2,
        [],
        [
            Case(NORM, "sign of zero", (1,), (0, 1)),
            Case(EXPERTS, "swap", (0,), (0, 1)),
            Case(BIAS, "bit", (1,), (0, 1)),
            Case(HEAD, "bit", (0,), (0, 1)),
        ],
    ),
    "DP2, bf16": (
        2,
        ["train.precision=bf16"],
        [
            Case(NORM, "sign of zero", (1,), (0, 1)),
            Case(EXPERTS, "bit", (1,), (0, 1)),
            Case(QUERY, "swap", (0,), (0, 1)),
        ],
    ),
    "DP4 by nodes": (
        4,
        ["parallel.node_size=2"],
        [Case(EMBEDDING, "bit", (bad,), ALL) for bad in ALL] + [Case(ROUTER, "swap", (2,), ALL)],
    ),
    "EP2xDP2": (
        4,
        ["parallel.expert=2"],
        [Case(EXPERTS, "bit", (3,), (1, 3)), Case(BIAS, "bit", (2,), ALL), Case(QUERY, "swap", (1,), ALL)],
    ),
    "TP2xDP2": (
        4,
        ["parallel.tensor=2"],
        [
            Case(NORM, "bit", (3,), ALL),
            Case(NORM, "sign of zero", (0,), ALL),
            Case(BIAS, "bit", (1,), ALL),
            Case(QUERY, "bit", (2,), (0, 2)),
            Case(HEAD, "swap", (1,), (1, 3)),
            Case(EXPERTS, "bit", (2,), ALL),
        ],
    ),
    "TP2 attention, EP4 experts": (
        4,
        ["parallel.tensor=2", "parallel.expert=4"],
        [Case(ROUTER, "bit", (1,), ALL), Case(QUERY, "bit", (3,), (1, 3))],
    ),
    "CP2": (2, ["parallel.context=2"], [Case(QUERY, "bit", (1,), (0, 1)), Case(EXPERTS, "bit", (0,), (0, 1))]),
    "PP2": (
        2,
        ["parallel.pipeline=2"],
        [Case(EMBEDDING, "bit", (1,), (0, 1)), Case(STATE, "bit", (0,), (0, 1))],
    ),
    "PP2xDP2": (
        4,
        ["parallel.pipeline=2"],
        [
            Case(EMBEDDING, "bit", (2,), ALL),
            Case(EMBEDDING, "swap", (0,), ALL),
            Case(STATE, "bit", (3,), (1, 3)),
            Case(EXPERTS, "bit", (2,), (2, 3)),
        ],
    ),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"], [Case(BIAS, "bit", (3,), (2, 3))]),
}


def bit(tensor: torch.Tensor) -> None:
    """The lowest one of the last element."""
    tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[-1] ^= 1


def swap(tensor: torch.Tensor) -> None:
    """Elements 1 and 2."""
    flat = tensor.view(-1)
    assert flat[1] != flat[2]
    flat[1:3] = flat[1:3].flip(0)


def sign_of_zero(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    tensor.view(-1)[0] *= -1.0
    assert torch.equal(before, tensor)


DAMAGES = {"bit": bit, "swap": swap, "sign of zero": sign_of_zero}


def tensor_of(train: TrainStep, name: str) -> torch.Tensor | None:
    if name == STATE:
        states = train.optimizer.state()["exp_avg_sq"]
        own = [s.tensor for s in states if s.owned.piece.shard.parameter.role is ParameterRole.EMBEDDING]
        return own[0] if own else None
    return {key: tensor.detach() for key, tensor in train.chunks.logical_tensors()}.get(name)


def checked(train: TrainStep) -> str:
    """What the check says; nothing where all is well."""
    try:
        check_replicas(train.chunks, train.optimizer, train.mesh, train.device, step=7)
    except UserError as error:
        return str(error)
    return ""


def prepared(world_size: int, overrides: Sequence[str]) -> TrainStep:
    """After a step; on all ranks an element of the norm is zero, one of the head NaN."""
    train = build(world_size, overrides)
    train.run(make_batches()[train.mesh.data_rank :: train.mesh.data_size], 1e-2, 1e-3)
    for name, value in ((NORM, 0.0), (HEAD, math.nan)):
        if (tensor := tensor_of(train, name)) is not None:
            tensor.view(-1)[0] = value
    return train


def damage_each(rank: int, world_size: int, overrides: Sequence[str], cases: Sequence[Case]) -> list[str]:
    """What is said before, after each damage, which is then undone, and at the end."""
    train = prepared(world_size, overrides)
    said = [checked(train)]
    for case in cases:
        tensor = tensor_of(train, case.name) if rank in case.bad else None
        assert tensor is not None or rank not in case.bad
        if tensor is not None:
            whole = tensor.clone()
            DAMAGES[case.damage](tensor)
        said.append(checked(train))
        if tensor is not None:
            tensor.copy_(whole)
    return [*said, checked(train)]


def ranks(*numbers: int) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} (on {socket.gethostname()})"


def expected_line(case: Case) -> str:
    right = [rank for rank in case.holders if rank not in case.bad]
    if len(right) > len(case.bad):
        return f"  {ranks(*case.bad)} differs from {ranks(*right)} in {case.name}"
    first, second = sorted((tuple(right), case.bad))
    sides = f"{ranks(*first)} and {ranks(*second)}"
    return f"  {sides} differ from each other, and no majority tells which is right, in {case.name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_found_and_named_on_every_rank(pool: WorkerPool, layout: str) -> None:
    world_size, overrides, cases = LAYOUTS[layout]
    before, *said, after = zip(*pool.run(world_size, damage_each, overrides, cases), strict=True)
    assert set(before) == set(after) == {""}
    for case, messages in zip(cases, said, strict=True):
        assert len(set(messages)) == 1
        first, *found, advice = messages[0].splitlines()
        assert first.startswith("training stopped after step 7: ")
        assert found == [expected_line(case)]
        assert "steptron doctor" in advice and "last checkpoint" in advice


def damage_in_several_places(rank: int, world_size: int) -> str:
    train = prepared(world_size, ["parallel.expert=2"])
    for bad, name, damage in ((3, EXPERTS, bit), (0, EXPERTS, swap), (1, BIAS, bit), (1, ROUTER, bit), (2, QUERY, bit)):
        if rank == bad:
            tensor = tensor_of(train, name)
            assert tensor is not None
            damage(tensor)
    for bad, damage in ((1, bit), (2, swap)):
        if rank == bad:
            tensor = tensor_of(train, NORM)
            assert tensor is not None
            damage(tensor)
    return checked(train)


def test_all_differences_are_named_at_once(pool: WorkerPool) -> None:
    first, *others = pool.run(4, damage_in_several_places)
    assert others == [first] * 3
    no_majority = "differ from each other, and no majority tells which is right, in"
    assert first.splitlines()[1:-1] == [
        f"  {ranks(0)} and {ranks(2)} {no_majority} {EXPERTS}",
        f"  {ranks(2)} differs from {ranks(0, 1, 3)} in {QUERY}",
        f"  {ranks(1)} differs from {ranks(0, 2, 3)} in {ROUTER}, {BIAS}",
        f"  {ranks(0, 3)} and {ranks(1)} and {ranks(2)} {no_majority} {NORM}",
        f"  {ranks(1)} and {ranks(3)} {no_majority} {EXPERTS}",
    ]
