"""Learning rate and bias-update rate as pure functions of the step.

Steps count from 0 and name the optimizer step about to be taken, so a resumed run asks for its step
and gets what an uninterrupted run got. Conventions are those of Megatron-Core's
``optimizer_param_scheduler.OptimizerParamScheduler`` (0.16.1): step s of the warm-up uses
``lr * s / warmup_steps`` (the first step has rate 0), the peak is first used at step
``warmup_steps``, and ``min_lr`` would be used at step ``total_steps``, one past the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptron.config.schema import BiasScheduleConfig, OptimizerConfig, ScheduleSegmentConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of one optimizer step.

    Linear warm-up from 0 to ``lr``, then:

    - ``cosine``: half a cosine from ``lr`` at ``warmup_steps`` to ``min_lr`` at ``total_steps`` and after;
    - ``constant``: ``lr``;
    - ``staged``: segments one after the other. ``linear`` and ``cosine`` go from the rate before them
      to their ``end_lr``; ``constant`` holds its ``end_lr`` from its first step. The last ``end_lr``
      is kept afterwards.

    Border values are exact, not rounded: step ``warmup_steps`` gives ``lr`` itself, the first step
    after a segment starts from its ``end_lr`` itself.

    Args:
        config: optimizer section; ``lr`` and ``schedule`` are read.
        step: optimizer step, from 0.
        total_steps: optimizer steps of the whole run.

    Raises:
        ValueError: a negative step, a cosine that has no steps after its warm-up or rises, or stages
            without segments.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more, not {step}")
    schedule = config.schedule
    if schedule.kind == "cosine" and schedule.warmup_steps >= total_steps:
        raise ValueError(
            f"optimizer.schedule.warmup_steps ({schedule.warmup_steps}) must be less than train.steps ({total_steps}): "
            "the cosine needs steps after the warm-up"
        )
    if schedule.kind == "cosine" and schedule.min_lr > config.lr:
        raise ValueError(f"optimizer.schedule.min_lr ({schedule.min_lr}) must not exceed optimizer.lr ({config.lr})")
    if schedule.kind == "staged" and not schedule.segments:
        raise ValueError("optimizer.schedule.segments is empty: kind 'staged' needs at least one segment")

    if step < schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    step -= schedule.warmup_steps
    if schedule.kind == "constant":
        return config.lr
    if schedule.kind == "cosine":
        return _cosine(config.lr, schedule.min_lr, step, total_steps - schedule.warmup_steps)
    return _staged(config.lr, schedule.segments, step)


def bias_update_rate(config: BiasScheduleConfig, step: int) -> float:
    """Rate u of the selection-bias update of one step: constant, then falling linearly to 0.

    The report keeps u = 0.001 and lets it decay to 0 during annealing; the shape of the decay is
    unpublished, linear is our choice. The first smaller rate is that of step ``decay_start_step + 1``.

    Args:
        config: bias schedule.
        step: optimizer step, from 0.

    Raises:
        ValueError: a negative step, or only one of the two decay fields is set.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more, not {step}")
    start, steps = config.decay_start_step, config.decay_steps
    if (start is None) != (steps is None):
        raise ValueError(
            "balance.bias.decay_start_step and balance.bias.decay_steps belong together: "
            f"set both or neither (they are {start} and {steps})"
        )
    if start is None or steps is None:
        return config.rate
    return _linear(config.rate, 0.0, max(step - start, 0), steps)


def _staged(start_lr: float, segments: Sequence[ScheduleSegmentConfig], step: int) -> float:
    for segment in segments:
        if step < segment.steps:
            if segment.kind == "linear":
                return _linear(start_lr, segment.end_lr, step, segment.steps)
            if segment.kind == "cosine":
                return _cosine(start_lr, segment.end_lr, step, segment.steps)
            return segment.end_lr
        step -= segment.steps
        start_lr = segment.end_lr
    return start_lr


def _linear(start: float, end: float, step: int, steps: int) -> float:
    return _blend(start, end, 1.0 - min(step / steps, 1.0))


def _cosine(start: float, end: float, step: int, steps: int) -> float:
    return _blend(start, end, 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))


def _blend(start: float, end: float, weight: float) -> float:
    """Weighted mean, exact for weights 0 and 1 (``end + weight * (start - end)`` is not)."""
    return weight * start + (1.0 - weight) * end
