"""Which layers each pipeline stage holds, and which stages each pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steptron.config.pipeline_layout import parse_pipeline_layout
from steptron.config.schema import ModelConfig, ParallelConfig


@dataclass(frozen=True)
class Stage:
    """A contiguous run of decoder layers, which may be empty; the embedding is first, heads and MTP are last."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        return cls(tuple(range(num_layers)), True, True)


def split_stages(num_layers: int, num_stages: int, layout: str | None = None) -> list[Stage]:
    """Splits layers as a layout says, or as evenly as possible; earlier stages then take the extra ones.

    The last stage also works for the output heads and MTP, so it gets no extra layer.

    Args:
        num_layers: decoder layers.
        num_stages: stages, pipeline x virtual_pipeline.
        layout: what each stage holds, as in ``parallel.pipeline_layout``.

    Returns:
        The stages in the order in which they are passed through.

    Raises:
        ValueError: there are more stages than layers, or the layout does not fit.
    """
    if layout is not None:
        sizes = [stage.layers for stage in parse_pipeline_layout(layout, num_stages, num_layers)]
    elif num_stages > num_layers:
        raise ValueError(f"{num_stages} pipeline stages need at least as many layers, and there are {num_layers}")
    else:
        size, extra = divmod(num_layers, num_stages)
        sizes = [size + (stage < extra) for stage in range(num_stages)]
    stages, start = [], 0
    for stage, size in enumerate(sizes):
        stages.append(Stage(tuple(range(start, start + size)), stage == 0, stage == num_stages - 1))
        start += size
    return stages


def stages_of(model: ModelConfig, parallel: ParallelConfig) -> list[Stage]:
    """The pipeline x virtual_pipeline stages of a checked configuration."""
    return split_stages(model.num_layers, parallel.pipeline * parallel.virtual_pipeline, parallel.pipeline_layout)


def chunks_of(stages: Sequence[Stage], pipeline_rank: int, pipeline_size: int) -> list[Stage]:
    """The stages that a pipeline rank holds as its model chunks 0, 1, ...: stage s is chunk s // size of rank s % size.

    Raises:
        ValueError: the stages cannot be shared equally.
    """
    if len(stages) % pipeline_size:
        raise ValueError(f"{len(stages)} stages cannot be shared equally by {pipeline_size} pipeline ranks")
    return list(stages[pipeline_rank::pipeline_size])
