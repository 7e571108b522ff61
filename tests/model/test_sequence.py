"""Shifts along a row, and the memo that layers share."""

from __future__ import annotations

import pytest
import torch

from steptron.model.sequence import SequenceContext, shift_left
from steptron.parallel.sequence_shard import SequenceShard


@pytest.mark.parametrize("places", [0, 1, 2, 4])
@pytest.mark.parametrize("fill", [0, -1, 7])
def test_shift_left(places: int, fill: int) -> None:
    values = torch.arange(1, 11).view(2, 5)
    shifted = shift_left(values, places, fill)
    for row in range(2):
        for t in range(5):
            expected = int(values[row, t + places]) if t + places < 5 else fill
            assert int(shifted[row, t]) == expected
    assert torch.equal(values, torch.arange(1, 11).view(2, 5))


@pytest.mark.parametrize("places", [5, 6, 100])
def test_shift_past_the_row_leaves_fill_alone(places: int) -> None:
    assert shift_left(torch.arange(10).view(2, 5), places, 3).tolist() == [[3] * 5] * 2


def test_shift_keeps_bool() -> None:
    mask = torch.tensor([[True, False, True]])
    assert shift_left(mask, 1, False).tolist() == [[False, True, False]]
    assert shift_left(mask, 1, False).dtype is torch.bool


def test_the_last_tokens_of_a_shard_get_the_next_token_of_the_row() -> None:
    # The shift comes first: labels of a shard's last tokens are tokens of another rank, or the late chunk's own.
    row = torch.arange(16).view(1, 16)
    labels = [SequenceShard.balanced(16, rank, 2).take(shift_left(row, 1, -1)) for rank in range(2)]
    assert labels[0].tolist() == [[1, 2, 3, 4, 13, 14, 15, -1]]
    assert labels[1].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]


def test_what_layers_share_is_computed_once_per_micro_batch() -> None:
    calls = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    positions = torch.arange(4).unsqueeze(0)
    context = SequenceContext(positions, None, SequenceShard.whole(4))
    assert [context.once("a", compute), context.once("a", compute), context.once(("b", 1), compute)] == [1, 1, 2]
    another = SequenceContext(positions, None, SequenceShard.whole(4))
    assert another.once("a", compute) == 3
