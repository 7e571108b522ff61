"""The schedule's order against Megatron-Core's own functions, and what follows from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from steptron.planning.pipeline import Pass, ideal_idle_share, idle_share, most_in_flight, passes_of


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches"), [(4, 1, 8), (4, 1, 2), (4, 2, 8), (4, 2, 4), (8, 3, 32)]
)
def test_order_is_megatron_s(pipeline: int, chunks: int, micro_batches: int) -> None:
    table = get_schedule_table(micro_batches, chunks, pipeline if chunks > 1 else micro_batches)
    for rank in range(pipeline):
        group = SimpleNamespace(size=lambda: pipeline, rank=lambda rank=rank: rank)
        engine = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
        _, _, warmup, _ = get_pp_rank_microbatches(micro_batches, chunks, pipeline, p2p_communicator=engine)
        forward = [Pass(micro_batch, chunk, True) for micro_batch, chunk in table]
        backward = [Pass(micro_batch, chunks - 1 - chunk, False) for micro_batch, chunk in table]
        steady = [step for pair in zip(forward[warmup:], backward, strict=False) for step in pair]
        expected = forward[:warmup] + steady + backward[len(forward) - warmup :]
        assert passes_of(rank, pipeline, chunks, micro_batches) == expected


@pytest.mark.parametrize(
    ("rank", "pipeline", "chunks", "micro_batches", "expected"),
    [
        (0, 1, 1, 4, 1),  # one at a time
        (0, 4, 1, 8, 4),  # 1F1B: as many as ranks that follow, itself included
        (3, 4, 1, 8, 1),
        (0, 4, 1, 2, 2),  # no more than there are
        (0, 4, 2, 8, 11),  # 2 (p - 1) + (v - 1) p + 1
        (3, 4, 2, 8, 5),
        (0, 8, 3, 8, 24),  # all passes before the first comes back
    ],
)
def test_in_flight(rank: int, pipeline: int, chunks: int, micro_batches: int, expected: int) -> None:
    assert most_in_flight(rank, pipeline, chunks, micro_batches) == expected


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches"), [(1, 1, 4), (4, 1, 8), (8, 1, 32), (8, 3, 32), (4, 2, 4)]
)
def test_equal_stages_wait_as_the_formula_says(pipeline: int, chunks: int, micro_batches: int) -> None:
    idle = idle_share([[1.0] * chunks] * pipeline, micro_batches)
    assert idle == pytest.approx([float(ideal_idle_share(pipeline, chunks, micro_batches))] * pipeline)


def test_a_slow_rank_keeps_the_others_waiting() -> None:
    """Two ranks, times 1 and 3, backward twice as long, 4 micro-batches: the second computes 36 and starts after 1."""
    idle = idle_share([[1.0], [3.0]], 4)
    length = 1 + 4 * 9 + 2  # the first forward, the second rank's work, the last backward of the first rank
    assert idle == pytest.approx([1 - 12 / length, 1 - 36 / length])


def test_an_empty_chunk_takes_no_time() -> None:
    assert idle_share([[1.0, 0.0]], 3) == pytest.approx([0.0])
    with pytest.raises(ValueError, match="no pipeline rank has any work"):
        idle_share([[0.0], [0.0]], 3)
