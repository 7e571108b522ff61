"""Batch-size ramp against direct arithmetic and Megatron-Core's calculators."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from steptron.config.batch_schedule import BatchSchedule
from steptron.config.schema import TrainConfig


def schedule(global_batch_size: int, ramp: tuple[int, int, int] | None = None) -> BatchSchedule:
    fields: dict[str, Any] = dict(output=Path("run"), steps=10, global_batch_size=global_batch_size, micro_batch_size=1)
    if ramp is not None:
        fields["batch_ramp"] = dict(zip(("start", "increment", "sequences"), ramp, strict=True))
    return BatchSchedule(TrainConfig(**fields))


def megatron_sizes(start: int, increment: int, final: int, sequences: int, consumed: list[int]) -> list[int]:
    """Sizes by Megatron-Core's own calculator: the ramp's in 0.16.1, the step schedule's where that is gone."""
    from megatron.core import num_microbatches_calculator as calculators

    if hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
        calculator = calculators.RampupBatchsizeNumMicroBatchesCalculator(
            final, 1, 1, False, 1, start, increment, sequences
        )
    else:
        sizes = range(start, final + 1, increment)
        share = sequences / (len(sizes) - 1)
        steps = " ".join(f"{round(number * share)}:{size}" for number, size in enumerate(sizes))
        calculator = calculators.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, steps)
    result = []
    for value in consumed:
        calculator.update(value, False)
        result.append(calculator.get_current_global_batch_size())
    return result


RAMP_SEQUENCES = 400_000_000_000 // 4096
"""The report: 4,096 to 16,384 sequences over the first 400B tokens, at 4,096 tokens per sequence."""


def test_the_reports_ramp() -> None:
    batches = schedule(16384, (4096, 4096, RAMP_SEQUENCES))
    assert batches.sizes == (4096, 8192, 12288, 16384)
    third = RAMP_SEQUENCES / 3
    for consumed, size in [
        (0, 4096),
        (int(third) - 1, 4096),
        (int(third) + 1, 8192),
        (int(2 * third) - 1, 8192),
        (int(2 * third) + 1, 12288),
        (RAMP_SEQUENCES - 1, 12288),
        (RAMP_SEQUENCES, 16384),
        (10**12, 16384),
    ]:
        assert batches.global_batch_size(consumed) == size


@pytest.mark.parametrize(
    ("start", "increment", "final", "sequences"), [(4096, 4096, 16384, RAMP_SEQUENCES), (2, 2, 8, 96), (8, 8, 64, 7000)]
)
def test_equals_megatrons_calculator_in_any_order(start: int, increment: int, final: int, sequences: int) -> None:
    increments = (final - start) // increment
    borders = [number * sequences // increments for number in range(increments + 1)]
    random_values = random.Random(0)
    consumed = [max(border + offset, 0) for border in borders for offset in (-2, 2)]
    consumed += [0, sequences, sequences + 1] + [random_values.randrange(2 * sequences) for _ in range(500)]
    random_values.shuffle(consumed)
    batches = schedule(final, (start, increment, sequences))
    assert [batches.global_batch_size(value) for value in consumed] == megatron_sizes(
        start, increment, final, sequences, consumed
    )


def test_a_border_belongs_to_the_larger_batch() -> None:
    batches = schedule(8, (2, 2, 96))
    assert [batches.global_batch_size(value) for value in (31, 32, 63, 64, 95, 96)] == [2, 4, 4, 6, 6, 8]


@pytest.mark.parametrize(
    ("final", "ramp"),
    [
        (8, None),
        (8, (2, 2, 96)),
        (8, (2, 2, 97)),
        (9, (3, 2, 10)),
        (64, (8, 8, 7000)),
        (8, (8, 2, 50)),
        (100, (1, 33, 4)),
    ],
)
def test_consumed_after_equals_step_by_step_consumption(final: int, ramp: tuple[int, int, int] | None) -> None:
    batches, consumed = schedule(final, ramp), 0
    for step in range(300):
        assert batches.consumed_after(step) == consumed
        consumed += batches.global_batch_size(consumed)


def test_constant_without_a_ramp() -> None:
    batches = schedule(2048)
    assert batches.sizes == (2048,)
    assert {batches.global_batch_size(consumed) for consumed in (0, 1, 10**12)} == {2048}


@pytest.mark.parametrize(
    ("final", "ramp", "message"),
    [
        (8, (16, 4, 100), r"train.batch_ramp.start \(16\) must not exceed train.global_batch_size \(8\)"),
        (16, (4, 5, 100), r"train.batch_ramp.increment \(5\) must divide .* which is 12"),
    ],
)
def test_impossible_ramps_are_refused(final: int, ramp: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(final, ramp)


def test_negative_consumption_is_refused() -> None:
    with pytest.raises(ValueError, match="consumed_sequences must be 0 or more"):
        schedule(8).global_batch_size(-1)
