"""Which tokens a context-parallel rank holds."""

from __future__ import annotations

import pytest
import torch

from steptron.parallel.sequence_shard import SequenceShard


def tokens_of(shard: SequenceShard) -> list[int]:
    return [token for start, stop in shard.ranges for token in range(start, stop)]


def test_the_whole_sequence() -> None:
    shard = SequenceShard.whole(7)
    values = torch.arange(14).view(2, 7)
    assert shard.is_whole and shard.size == 7 and tokens_of(shard) == list(range(7))
    assert shard.take(values) is values
    assert SequenceShard.balanced(7, 0, 1) == shard, "one rank holds everything, whatever the length"


def test_early_chunks_go_with_late_ones() -> None:
    shards = [SequenceShard.balanced(24, rank, 4) for rank in range(4)]
    assert [shard.ranges for shard in shards] == [
        ((0, 3), (21, 24)),
        ((3, 6), (18, 21)),
        ((6, 9), (15, 18)),
        ((9, 12), (12, 15)),
    ]
    assert not any(shard.is_whole for shard in shards)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_token_has_one_owner_and_every_rank_the_same_work(size: int) -> None:
    length = 2 * size * 5
    shards = [SequenceShard.balanced(length, rank, size) for rank in range(size)]
    assert sorted(token for shard in shards for token in tokens_of(shard)) == list(range(length))
    assert {shard.size for shard in shards} == {10}
    visible_keys = {sum(token + 1 for token in tokens_of(shard)) for shard in shards}
    assert len(visible_keys) == 1, "causal attention costs as much on each rank"
    assert all(tokens_of(shard) == sorted(tokens_of(shard)) for shard in shards)


def test_what_a_rank_takes_of_a_row() -> None:
    rows = torch.stack([torch.arange(16), 100 + torch.arange(16)])
    taken = [SequenceShard.balanced(16, rank, 2).take(rows) for rank in range(2)]
    assert taken[0].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15], [100, 101, 102, 103, 112, 113, 114, 115]]
    assert taken[1].tolist() == [list(range(4, 12)), list(range(104, 112))]
    mask = torch.ones(1, 16, dtype=torch.bool)
    assert SequenceShard.balanced(16, 1, 2).take(mask).dtype is torch.bool


@pytest.mark.parametrize(("length", "size"), [(10, 2), (6, 2), (24, 5), (8, 8)])
def test_a_length_that_cannot_be_shared_is_refused(length: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} tokens cannot be shared by {size} ranks.*multiple of {2 * size}"):
        SequenceShard.balanced(length, 0, size)
