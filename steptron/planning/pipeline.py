"""The order in which pipeline ranks work, and what follows from it: micro-batches in flight, and idle time.

The order is that of Megatron-Core's schedules (``megatron.core.pipeline_parallel.schedules`` of 0.16 and 0.19): 1F1B,
and with several chunks per rank its interleaved form, in groups of as many micro-batches as pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pass:
    """The forward or the backward pass of a micro-batch through a chunk."""

    micro_batch: int
    chunk: int
    is_forward: bool


def passes_of(pipeline_rank: int, pipeline: int, chunks: int, micro_batches: int) -> list[Pass]:
    """What a pipeline rank does, in order.

    Args:
        pipeline_rank: 0 to pipeline - 1.
        pipeline: pipeline ranks.
        chunks: model chunks per rank.
        micro_batches: of a step, through the whole pipeline.
    """
    before = pipeline - pipeline_rank - 1
    if chunks > 1:
        # Later ranks must have work while the first micro-batches come back: two passes per rank between them.
        before = 2 * before + (chunks - 1) * pipeline
    forward = _order(pipeline, chunks, micro_batches)
    backward = [Pass(p.micro_batch, chunks - 1 - p.chunk, False) for p in forward]
    before = min(before, len(forward))
    passes = list(forward[:before])
    for index in range(len(forward)):
        if before + index < len(forward):
            passes.append(forward[before + index])
        passes.append(backward[index])
    return passes


def _order(pipeline: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Forward passes: groups of ``pipeline`` micro-batches, each through every chunk before the next group."""
    group = pipeline if chunks > 1 else micro_batches
    return [
        Pass(micro_batch, chunk, True)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def most_in_flight(pipeline_rank: int, pipeline: int, chunks: int, micro_batches: int) -> int:
    """The most passes through chunks of a rank whose activations are kept at the same time."""
    alive = most = 0
    for work in passes_of(pipeline_rank, pipeline, chunks, micro_batches):
        alive += 1 if work.is_forward else -1
        most = max(most, alive)
    return most


def idle_share(
    forward_times: Sequence[Sequence[float]], micro_batches: int, backward_factor: float = 2.0
) -> list[float]:
    """Share of a step that each pipeline rank waits, when nothing but computing takes time.

    Args:
        forward_times: by pipeline rank and chunk, the time of a forward pass, in any unit.
        micro_batches: of a step.
        backward_factor: time of a backward pass over that of the forward pass.

    Returns:
        By pipeline rank, 1 - busy / length of the step.

    Raises:
        ValueError: no rank has any work.
    """
    pipeline, chunks = len(forward_times), len(forward_times[0])
    queues = [passes_of(rank, pipeline, chunks, micro_batches) for rank in range(pipeline)]
    busy = [micro_batches * (1.0 + backward_factor) * sum(times) for times in forward_times]
    if not any(busy):
        raise ValueError("no pipeline rank has any work")
    done: dict[tuple[int, int, bool], float] = {}  # micro-batch, stage, forward
    position, clock = [0] * pipeline, [0.0] * pipeline
    last_stage = pipeline * chunks - 1
    waiting = True
    while waiting:
        waiting = False
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                work = queue[position[rank]]
                stage = work.chunk * pipeline + rank
                needs = _needs(work, stage, last_stage)
                if needs is not None and needs not in done:
                    waiting = True
                    break
                time = forward_times[rank][work.chunk] * (1.0 if work.is_forward else backward_factor)
                clock[rank] = max(clock[rank], 0.0 if needs is None else done[needs]) + time
                done[work.micro_batch, stage, work.is_forward] = clock[rank]
                position[rank] += 1
    length = max(clock)
    return [1.0 - share / length for share in busy]


def _needs(work: Pass, stage: int, last_stage: int) -> tuple[int, int, bool] | None:
    """The pass that must be over before this one, unless the rank's own order sees to it."""
    if work.is_forward:
        return (work.micro_batch, stage - 1, True) if stage > 0 else None
    return (work.micro_batch, stage + 1, False) if stage < last_stage else (work.micro_batch, stage, True)


def ideal_idle_share(pipeline: int, chunks: int, micro_batches: int) -> Fraction:
    """Idle share of a pipeline whose stages take the same time: (p - 1) / (v m + p - 1)
    (arXiv 2104.04473, section 2.2)."""
    return Fraction(pipeline - 1, chunks * micro_batches + pipeline - 1)
