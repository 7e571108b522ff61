"""Which keys and values travel between context-parallel ranks, and that their gradients come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from steptron.parallel.key_exchange import (
    KeyExchange,
    Run,
    exchange_keys,
    plan_exchange,
    rows_received,
    rows_sent,
)
from steptron.parallel.sequence_shard import SequenceShard
from tests.worker_pool import WorkerPool

CHUNK = 3
WINDOWS = [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 2, 4 * CHUNK + 1, 1000, None]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tokens_of(runs: tuple[Run, ...]) -> list[int]:
    return [token for start, stop in runs for token in range(start, stop)]


def visible_from(query: int, window: int | None) -> range:
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def plans(size: int, window: int | None) -> list[KeyExchange]:
    return [plan_exchange(2 * size * CHUNK, size, rank, window) for rank in range(size)]


def carried_out(size: int, window: int | None) -> list[list[int]]:
    """The token in each seen row of each rank, moved as the plans say, each row written once."""
    shards = [tokens_of(SequenceShard.balanced(2 * size * CHUNK, rank, size).ranges) for rank in range(size)]
    all_plans, results = plans(size, window), []
    for rank, plan in enumerate(all_plans):
        arriving = [(tokens_of(plan.own), shards[rank])]
        for other in range(size):
            sent = [shards[other][place] for place in tokens_of(all_plans[other].sent[rank])]
            arriving.append((tokens_of(plan.received[other]), sent))
        seen: dict[int, int] = {}
        for places, tokens in arriving:
            for place, token in zip(places, tokens, strict=True):
                assert place not in seen
                seen[place] = token
        assert sorted(seen) == list(range(plan.seen_rows))
        results.append([seen[place] for place in range(plan.seen_rows)])
    return results


# ---------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_rank_gets_what_its_queries_can_see_and_no_more(size: int, window: int | None) -> None:
    for rank, seen in enumerate(carried_out(size, window)):
        shard = SequenceShard.balanced(2 * size * CHUNK, rank, size)
        visible = {key for query in tokens_of(shard.ranges) for key in visible_from(query, window)}
        assert seen == sorted(visible)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_keys_of_a_range_are_successive_and_end_with_its_own(size: int, window: int | None) -> None:
    for rank, seen in enumerate(carried_out(size, window)):
        shard = SequenceShard.balanced(2 * size * CHUNK, rank, size)
        keys = plan_exchange(2 * size * CHUNK, size, rank, window).keys
        for (start, stop), run in zip(shard.ranges, keys, strict=True):
            assert seen[slice(*run)] == list(range(visible_from(start, window).start, stop))


def test_a_sliding_layer_receives_a_window_less_one_per_range() -> None:
    # Chunks of 100 on four ranks: 0 7 | 1 6 | 2 5 | 3 4.
    received = [rows_received(800, 4, rank, 31) for rank in range(4)]
    assert received == [30, 60, 60, 30], "nothing is before chunk 0; what is before chunk 4 is the rank's own chunk 3"
    assert [rows_sent(800, 4, rank, 31) for rank in range(4)] == [30, 60, 60, 30]
    assert [rows_received(800_000, 4, rank, 31) for rank in range(4)] == received, "however long the sequence"


def test_a_window_of_one_moves_nothing() -> None:
    assert [rows_received(80, 4, rank, 1) + rows_sent(80, 4, rank, 1) for rank in range(4)] == [0] * 4


def test_a_full_layer_receives_all_that_is_before_the_late_chunk() -> None:
    # Rank r sees 8 - r chunks and holds two of them.
    assert [rows_received(800, 4, rank, None) for rank in range(4)] == [600, 500, 400, 300]
    # Chunk c goes to each rank whose late chunk is after it, but for the owner.
    assert [rows_sent(800, 4, rank, None) for rank in range(4)] == [300, 400, 500, 600]


def test_a_window_over_several_chunks_comes_from_several_ranks() -> None:
    # Chunks of 3, window 8: rank 3's chunks [9, 12) and [12, 15) see the rows from 2 and from 5 on.
    plan = plan_exchange(24, 4, 3, 8)
    assert plan.seen_rows == 13 and plan.keys == ((0, 10), (3, 13))  # tokens 2 to 14
    # Token 2 is rank 0's, 3 to 5 rank 1's, 6 to 8 rank 2's.
    assert plan.received == (((0, 1),), ((1, 4),), ((4, 7),), ())
    assert plan.own == ((7, 10), (10, 13))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_what_is_sent_is_received(size: int, window: int | None) -> None:
    all_plans, length = plans(size, window), 2 * size * CHUNK
    for sender, plan in enumerate(all_plans):
        assert plan.sent[sender] == () and plan.received[sender] == (), "own rows do not travel"
        for receiver in range(size):
            arriving = all_plans[receiver].received[sender]
            assert [b - a for a, b in plan.sent[receiver]] == [b - a for a, b in arriving]
    assert sum(rows_sent(length, size, rank, window) for rank in range(size)) == sum(
        rows_received(length, size, rank, window) for rank in range(size)
    )
    for rank, plan in enumerate(all_plans):
        assert rows_received(length, size, rank, window) == plan.seen_rows - plan.local_rows


def test_a_plan_is_made_once() -> None:
    assert plan_exchange(48, 4, 1, 7) is plan_exchange(48, 4, 1, 7)


def test_a_window_without_the_token_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0; it counts the token itself"):
        plan_exchange(48, 4, 1, 0)


# ------------------------------------------------------------------------------ the exchange


class Counter:
    """Stands in for the all-to-all: counts its calls, and the elements that this rank exchanges with others."""

    def __init__(self, rank: int) -> None:
        self._rank, self._original = rank, dist.all_to_all_single
        self.calls: list[tuple[int, int]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], **kw: Any
    ) -> None:
        row = output.shape[1:].numel()
        assert output_split_sizes[self._rank] == input_split_sizes[self._rank] == 0
        assert (output.numel(), input.numel()) == (sum(output_split_sizes) * row, sum(input_split_sizes) * row)
        self.calls.append((input.numel(), output.numel()))
        self.dtypes.add(input.dtype)
        self._original(output, input, output_split_sizes, input_split_sizes, **kw)


def keys_and_gradients(
    rank: int, size: int, k: Tensor, v: Tensor, d_k: Tensor, d_v: Tensor, window: int | None
) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]], set[torch.dtype], int]:
    """Seen keys and values, and the gradients of the local ones where those of seen row t of rank r are d_k[r, t]."""
    length = len(k)
    shard = SequenceShard.balanced(length, rank, size)
    own = torch.tensor(tokens_of(shard.ranges))
    leaves = [x[own].requires_grad_() for x in (k, v)]
    with pytest.MonkeyPatch.context() as patch:
        counter = Counter(rank)
        patch.setattr(dist, "all_to_all_single", counter)
        pairs = exchange_keys(leaves[0], leaves[1], plan_exchange(length, size, rank, window), world())
        results = [x for pair in pairs for x in pair]
        gradients = []
        for i, (start, stop) in enumerate(shard.ranges):
            tokens = torch.arange(visible_from(start, window).start, stop)
            gradients += [d_k[rank, i, tokens], d_v[rank, i, tokens]]
        torch.autograd.backward(results, gradients)
    storages = len({x.untyped_storage().data_ptr() for x in results})
    values = [x.detach().clone() for x in results]
    return values, [leaf.grad for leaf in leaves], counter.calls, counter.dtypes, storages


def tensors(size: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, generator = 2 * size * CHUNK, torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, length, 2, 2, 5, generator=generator, dtype=torch.float64).to(dtype)
    d_k, d_v = torch.randn(2, size, 2, length, 2, 2, 5, generator=generator, dtype=torch.float64).to(dtype)
    return k, v, d_k, d_v


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_arrive_and_gradients_come_back(pool: WorkerPool, size: int, window: int | None) -> None:
    k, v, d_k, d_v = tensors(size, torch.float64)
    results = pool.run(size, keys_and_gradients, k, v, d_k, d_v, window)
    # Of each row, the sum of what every range of every rank that sees it gives.
    expected = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(size):
        for i, (start, stop) in enumerate(SequenceShard.balanced(len(k), rank, size).ranges):
            first = visible_from(start, window).start
            assert torch.equal(results[rank][0][2 * i], k[first:stop])
            assert torch.equal(results[rank][0][2 * i + 1], v[first:stop])
            expected[0][first:stop] += d_k[rank, i, first:stop]
            expected[1][first:stop] += d_v[rank, i, first:stop]
    for rank in range(size):
        own = tokens_of(SequenceShard.balanced(len(k), rank, size).ranges)
        for gradient, whole in zip(results[rank][1], expected, strict=True):
            torch.testing.assert_close(gradient, whole[own], rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, CHUNK + 1, None])
def test_only_the_planned_rows_travel_in_the_keys_own_dtype(
    pool: WorkerPool, window: int | None, dtype: torch.dtype
) -> None:
    for rank, result in enumerate(pool.run(4, keys_and_gradients, *tensors(4, dtype), window)):
        values, gradients, calls, dtypes, storages = result
        row = 2 * 2 * 2 * 5  # B, groups, keys and values, head_dim
        sent, received = (f(8 * CHUNK, 4, rank, window) * row for f in (rows_sent, rows_received))
        assert calls == [(sent, received), (received, sent)], "one exchange each way, gradients the other way round"
        assert dtypes == {dtype} and {x.dtype for x in [*values, *gradients]} == {dtype}
        assert storages == 1, "all results are views of one buffer"


def sum_of_gradients(rank: int, size: int, dtype: torch.dtype, terms: list[float], early: float = 0.0) -> float:
    """The gradient of token 0's key where rank r's late range gives it terms[r], and rank 0's early one ``early``."""
    length = 2 * size
    k = torch.zeros(2, 1, 1, 1, dtype=dtype, requires_grad=True)
    pairs = exchange_keys(k, torch.zeros_like(k), plan_exchange(length, size, rank, None), world())
    late = (pairs[1][0][0] * terms[rank]).sum()
    (late + (pairs[0][0][0] * early).sum() if rank == 0 else late).backward()
    assert k.grad is not None
    return float(k.grad[0])


def test_gradients_in_bf16_are_added_in_float32(pool: WorkerPool) -> None:
    # In bf16 256 + 1 is 256.
    assert pool.run(4, sum_of_gradients, torch.bfloat16, [256.0, 1.0, 1.0, 0.0])[0] == 258.0
    # Both ranges of the owner's shard see the key too.
    assert pool.run(2, sum_of_gradients, torch.bfloat16, [1.0, 1.0], 256.0)[0] == 258.0


def test_gradients_are_added_rank_by_rank(pool: WorkerPool) -> None:
    assert pool.run(3, sum_of_gradients, torch.float64, [1.0, 1e17, -1e17])[0] == 0.0
    assert pool.run(3, sum_of_gradients, torch.float64, [1e17, -1e17, 1.0])[0] == 1.0


def without_gradients(rank: int, size: int) -> bool:
    k = torch.randn(4, 1, 1, 2)
    with torch.no_grad():
        pairs = exchange_keys(k, k, plan_exchange(8, size, rank, 2), world())
    return any(x.requires_grad for pair in pairs for x in pair)


def test_without_gradients_nothing_is_recorded(pool: WorkerPool) -> None:
    assert pool.run(2, without_gradients) == [False, False]


def refused(rank: int, size: int) -> list[str]:
    messages = []
    k = torch.zeros(6, 1, 1, 2)
    for keys, values, ranks in [(k[1:], k[1:], 2), (k, k[..., :1], 2), (k, k, 4)]:
        with pytest.raises(ValueError) as error:
            exchange_keys(keys, values, plan_exchange(6 * ranks, ranks, rank, 2), world())
        messages.append(str(error.value))
    return messages


def test_tensors_or_groups_of_another_size_are_refused(pool: WorkerPool) -> None:
    for rows, shapes, ranks in pool.run(2, refused):
        assert (
            rows == "keys (5, 1, 1, 2) and values (5, 1, 1, 2) must have the same shape, with the 6 rows of the shard"
        )
        assert shapes.startswith("keys (6, 1, 1, 2) and values (6, 1, 1, 1) must have the same shape")
        assert ranks == "the group has 2 ranks, the exchange is planned for 4"
