"""Which layers each pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A contiguous run of decoder layers; the embedding is first, heads and MTP are last."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        return cls(tuple(range(num_layers)), True, True)


def split_stages(num_layers: int, num_stages: int) -> list[Stage]:
    """Splits layers as evenly as possible; earlier stages take the extra ones.

    The last stage also works for the output heads and MTP, so it gets no extra layer.

    Raises:
        ValueError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_stages} pipeline stages need at least as many layers, and there are {num_layers}")
    size, extra = divmod(num_layers, num_stages)
    stages, start = [], 0
    for rank in range(num_stages):
        stop = start + size + (rank < extra)
        stages.append(Stage(tuple(range(start, stop)), rank == 0, rank == num_stages - 1))
        start = stop
    return stages
