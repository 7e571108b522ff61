"""What a rank's frames carry, as plain data: one :class:`Series` after the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise

from google.protobuf.message import DecodeError

from steptron_metrics.protocol import messages

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9][a-z0-9_]*){0,3}")
MAX_METRIC_LENGTH = 96
MAX_ITERATION = (1 << 53) - 1
"""Iterations are exact in the numbers of JSON."""


class Folding(IntEnum):
    """What has been done to an iteration's micro-batches before sending."""

    NONE = 0
    MOMENTS = 1


class Combination(IntEnum):
    """What values of several ranks for the same item are to each other."""

    SAMPLES = 0
    SUM = 1
    ROOT_SUM_SQUARES = 2


MOMENTS = ("count", "sum", "sum_of_squares", "min", "max")
"""Rows of a folded series."""


@dataclass(frozen=True)
class Series:
    """Values of one metric for consecutive items.

    Attributes:
        metric: its name.
        layer: -1 where it is not of a layer.
        first, count: its items are ``first`` to ``first + count - 1``.
        micro_batches: how many have a value of their own; 0 where there is one for the iteration.
        folding, combination: see the enumerations.
    """

    metric: str
    layer: int = -1
    first: int = 0
    count: int = 1
    micro_batches: int = 0
    folding: Folding = Folding.NONE
    combination: Combination = Combination.SAMPLES

    @property
    def rows(self) -> int:
        """Its values are float32 [rows, count]."""
        return len(MOMENTS) if self.folding is Folding.MOMENTS else max(self.micro_batches, 1)

    @property
    def size(self) -> int:
        """Number of values."""
        return self.rows * self.count


def serialize(series: Sequence[Series]) -> bytes:
    """The description on the wire; the same bytes for the same series."""
    description = messages.Description()
    for one in series:
        description.series.add(
            metric=one.metric,
            layer=one.layer,
            first=one.first,
            count=one.count,
            micro_batches=one.micro_batches,
            folding=int(one.folding),
            combination=int(one.combination),
        )
    return bytes(description.SerializeToString(deterministic=True))


@dataclass(frozen=True)
class Limits:
    """What a description may hold at most, and all descriptions of a run together.

    Attributes:
        series: of a description.
        items: largest index of an item, plus 1.
        layers: largest layer, plus 1.
        micro_batches: of a series.
        total_items: largest index of an item, plus 1, summed over metrics and layers: of a description, and of a run,
            where each is rounded up to a power of two. The reducers take no more.
        run_metrics: names of metrics of a run.
        run_series: pairs of metric and layer of a run.
        run_sessions: sessions of a run that have sent frames.
    """

    series: int = 65_536
    items: int = 1 << 20
    layers: int = 4096
    micro_batches: int = 65_536
    total_items: int = 1 << 21
    run_metrics: int = 1000
    run_series: int = 20_000
    run_sessions: int = 10_000


def parse(content: bytes, limits: Limits) -> tuple[Series, ...]:
    """Reads and checks a description.

    Raises:
        ValueError: it is malformed or beyond the limits; the message names the series and the field.
    """
    try:
        description = messages.Description.FromString(content)
    except DecodeError as error:
        raise ValueError("the description is no protobuf message of this protocol") from error
    if len(description.series) > limits.series:
        raise ValueError(f"{len(description.series)} series, at most {limits.series} are taken")
    parsed = []
    ranges: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for index, one in enumerate(description.series):
        try:
            series = _checked(one, limits)
        except ValueError as error:
            raise ValueError(f"series {index}: {error}") from None
        ranges.setdefault((series.metric, series.layer), []).append((series.first, series.first + series.count, index))
        parsed.append(series)
    total = 0
    for (metric, layer), of_layer in ranges.items():
        if len(of_layer) > 1:
            _check_ranges(metric, layer, of_layer)
        total += of_layer[-1][1]
    if total > limits.total_items:
        raise ValueError(
            f"{total} items in all metrics and layers together, each counted up to its largest; "
            f"at most {limits.total_items} are taken"
        )
    return tuple(parsed)


def _check_ranges(metric: str, layer: int, ranges: list[tuple[int, int, int]]) -> None:
    """Sorts (first, end, index of the series), which must not overlap."""
    ranges.sort()
    for (_, end, one), (first, _, other) in pairwise(ranges):
        if first < end:
            raise ValueError(
                f"series {max(one, other)}: {metric} of layer {layer}, item {first} twice (also in series "
                f"{min(one, other)})"
            )


_FOLDINGS = {int(one): one for one in Folding}
_COMBINATIONS = {int(one): one for one in Combination}


@lru_cache(maxsize=4096)
def _is_metric_name(name: str) -> bool:
    return len(name) <= MAX_METRIC_LENGTH and METRIC_NAME.fullmatch(name) is not None


def _checked(one: object, limits: Limits) -> Series:
    m: messages.Any = one
    if not _is_metric_name(m.metric):
        raise ValueError(f"metric {m.metric[:MAX_METRIC_LENGTH]!r} is no name like moe.output_rms")
    if not -1 <= m.layer < limits.layers:
        raise ValueError(f"layer {m.layer}: expected -1 to {limits.layers - 1}")
    if not 1 <= m.count <= limits.items or m.first > limits.items - m.count:
        raise ValueError(
            f"items {m.first} to {m.first + m.count - 1}: expected 1 to {limits.items} of them, below that"
        )
    if m.micro_batches > limits.micro_batches:
        raise ValueError(f"micro_batches {m.micro_batches}: at most {limits.micro_batches}")
    folding, combination = _FOLDINGS.get(m.folding), _COMBINATIONS.get(m.combination)
    if folding is None or combination is None:
        raise ValueError(f"folding {m.folding} or combination {m.combination} is unknown")
    if folding is Folding.MOMENTS and m.micro_batches:
        raise ValueError(f"folded over micro-batches, and yet with {m.micro_batches} of them")
    if combination is not Combination.SAMPLES and (folding is not Folding.NONE or m.micro_batches):
        raise ValueError("parts of a quantity need folding none and micro_batches 0")
    return Series(m.metric, m.layer, m.first, m.count, m.micro_batches, folding, combination)
