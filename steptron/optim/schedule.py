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

from steptron.config.schema import BiasScheduleConfig, OptimizerConfig, ScheduleConfig, ScheduleSegmentConfig


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
        total_steps: optimizer steps of the whole run, or of the stage that ``step`` is counted in.

    Raises:
        ValueError: a negative step, a cosine that has no steps after its warm-up or rises, or stages
            without segments.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more, not {step}")
    schedule = config.schedule
    warmup = warmup_steps(schedule, total_steps)
    if schedule.kind == "cosine" and warmup >= total_steps:
        raise ValueError(
            f"optimizer.schedule.warmup_steps ({warmup}) must be less than train.steps ({total_steps}): "
            "the cosine needs steps after the warm-up"
        )
    if schedule.kind == "cosine" and schedule.min_lr > config.lr:
        raise ValueError(f"optimizer.schedule.min_lr ({schedule.min_lr}) must not exceed optimizer.lr ({config.lr})")
    if schedule.kind == "staged" and not schedule.segments:
        raise ValueError("optimizer.schedule.segments is empty: kind 'staged' needs at least one segment")

    if step < warmup:
        return config.lr * step / warmup
    step -= warmup
    if schedule.kind == "constant":
        return config.lr
    if schedule.kind == "cosine":
        return _cosine(config.lr, schedule.min_lr, step, total_steps - warmup)
    return _staged(config.lr, schedule.segments, step)


def warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of linear warm-up, which a schedule gives as such or as a share of all."""
    return schedule.warmup_steps or round(schedule.warmup_fraction * total_steps)


def bias_update_rate(config: BiasScheduleConfig, step: int, total_steps: int) -> float:
    """Rate u of the selection-bias update of one step: constant, then falling linearly to 0, or going linearly to
    ``final_rate`` over all steps.

    The report keeps u = 0.001 and lets it decay to 0 during annealing (its second stage); the shape of the decay is
    unpublished, linear is our choice. With ``decay_start_step`` the first smaller rate is that of the step after it;
    ``final_rate`` would be used at step ``total_steps``, one past the last.

    Args:
        config: bias schedule.
        step: optimizer step, from 0.
        total_steps: optimizer steps of the whole run, or of the stage that ``step`` is counted in.

    Raises:
        ValueError: a negative step, only one of the two decay fields is set, or both ways to decay are.
    """
    if step < 0:
        raise ValueError(f"step must be 0 or more, not {step}")
    start, steps = config.decay_start_step, config.decay_steps
    if (start is None) != (steps is None):
        raise ValueError(
            "balance.bias.decay_start_step and balance.bias.decay_steps belong together: "
            f"set both or neither (they are {start} and {steps})"
        )
    if config.final_rate is not None:
        if start is not None:
            raise ValueError("balance.bias.final_rate and balance.bias.decay_steps are two ways to decay: set one")
        return _linear(config.rate, config.final_rate, step, total_steps)
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
