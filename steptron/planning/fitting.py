"""Whether the stages of a run fit the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from steptron.config.schema import PretrainConfig
from steptron.config.stages import Curriculum
from steptron.errors import ConfigError
from steptron.planning.memory import Assumptions, assume
from steptron.planning.plan import check_elsewhere, plan_layout

_GIB = 2**30


def check_memory(
    curriculum: Curriculum, processes: int, device: Literal["cpu", "cuda"] | None, card_gib: float
) -> None:
    """Refuses a run of which a stage is planned to need more memory than a device has.

    Args:
        curriculum: the run.
        processes: their number.
        device: as in ``steptron plan``.
        card_gib: memory of a device, GiB.

    Raises:
        ConfigError: names each such stage, what it needs, and the context parallelism that would let it fit.
    """
    problems = []
    for stage in curriculum.stages:
        assumed = assume(stage.config, device)
        peak = _peak(stage.config, processes, assumed)
        if peak <= card_gib * _GIB:
            continue
        where = f"stage {stage.name}" if stage.name else "the run"
        problems.append(
            f"{where}: sequences of {stage.config.data.sequence_length:,} tokens take {peak / _GIB:.1f} GiB on the "
            f"fullest rank, the device has {card_gib:g}: {_remedy(stage.config, processes, assumed, card_gib)}"
        )
    if problems:
        raise ConfigError(f"memory of {processes} process{'' if processes == 1 else 'es'}", problems)


def _peak(config: PretrainConfig, processes: int, assumed: Assumptions) -> float:
    check_elsewhere(config, processes, assumed)
    return plan_layout(config, processes, assumed).fullest.memory.peak


def _remedy(config: PretrainConfig, processes: int, assumed: Assumptions, card_gib: float) -> str:
    """Splitting the sequences further, over twice as many ranks each time, as long as the layout takes it."""
    for context in _doublings(config.parallel.context, config.data.sequence_length):
        split = config.model_copy(update={"parallel": config.parallel.model_copy(update={"context": context})})
        size = processes * context // config.parallel.context
        try:
            if _peak(split, size, assumed) <= card_gib * _GIB:
                return f"parallel.context={context} would make it fit (on {size:,} processes with the same data ranks)"
        except ConfigError:
            break
    return "no context parallelism makes it fit: recompute more (train.recompute) or use more pipeline stages"


def _doublings(context: int, length: int) -> Iterator[int]:
    while (context := 2 * context) <= min(64, length // 2):
        yield context
