"""The parameters of requests, each with its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query

from steptron_metrics.catalogue import Statistic
from steptron_metrics.protocol.description import MAX_METRIC_LENGTH, METRIC_NAME, RUN_NAME

LAST_ITERATION = (1 << 53) - 1
"""The largest number of an iteration that JSON's numbers hold exactly."""
MAX_POINTS = 5000
MAX_LAYERS = 128
MAX_FIGURES = 16
MAX_ROWS = 5000
MAX_ITEMS_CHOSEN = 64
MAX_EXPORTED_METRICS = 64
MAX_TABLE_ROWS = 5_000_000
"""Of one request: about 200 MB of Arrow."""
MAX_RAW_VALUES = 20_000_000
MAX_RANK = 65_535

RunName = Annotated[str, Path(description="Name of a run.", pattern=f"^{RUN_NAME.pattern}$", max_length=128)]

First = Annotated[
    int, Query(ge=0, le=LAST_ITERATION, description="Iterations before this one are left out.", examples=[1])
]
Last = Annotated[
    int, Query(ge=0, le=LAST_ITERATION, description="Iterations after this one are left out.", examples=[10_000])
]
MaxPoints = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_POINTS,
        description="At most so many points; where there are more iterations, each point stands for several, with "
        "their mean, their least and their largest value.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=MAX_ROWS, description="At most so many rows.")]

_METRIC = f"^{METRIC_NAME.pattern}$"
MetricName = Annotated[
    str,
    Query(
        pattern=_METRIC,
        max_length=MAX_METRIC_LENGTH,
        description="Name of a metric, see the run's `metrics`.",
        examples=["moe.output_norm_max"],
    ),
]
StatisticName = Annotated[
    Statistic | None,
    Query(
        description="What of the samples of an item in an iteration, those of its micro-batches and replicas; the "
        "metric's headline without it."
    ),
]
Layers = Annotated[
    list[Annotated[int, Query(ge=-1, le=65_535)]],
    Query(
        min_length=1,
        max_length=MAX_LAYERS,
        description="Layers, the parameter once for each; -1 for what is not of a layer.",
    ),
]
Items = Annotated[
    list[Annotated[int, Query(ge=0, le=1 << 30)]] | None,
    Query(
        max_length=MAX_ITEMS_CHOSEN,
        description="Only these items (experts, ranks, ...), the parameter once for each; all without it.",
    ),
]
# Derived figures are called like a metric with one or two parts more.
FigureNames = Annotated[
    list[Annotated[str, Query(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9][a-z0-9_]*){0,5}$", max_length=160)]],
    Query(
        min_length=1,
        max_length=MAX_FIGURES,
        description="Names of derived figures, the parameter once for each, see the run's `figures`.",
        examples=[["moe.output_norm_max.max_over_median"]],
    ),
]
Plane = Literal["values", "low", "high"]
Planes = Annotated[
    list[Plane],
    Query(
        min_length=1,
        max_length=3,
        description="`values`: means over the iterations of a point; `low`, `high`: the least and the largest of them. "
        "The parameter once for each.",
    ),
]
Form = Annotated[
    Literal["json", "binary"],
    Query(
        description="`json`, or `binary` (application/vnd.steptron.points): the four bytes `STP1`; the length of the "
        "header, uint32 little-endian; the header in JSON, the same as the answer in JSON but each array is "
        "`{offset, shape, type}`; spaces up to a multiple of 8; the arrays, little-endian, at their offsets from there."
    ),
]
FoldItems = Annotated[
    bool,
    Query(
        description="Folds each layer's items into three: their least, median and largest. `low` is then the least, "
        "median and largest of the items' lows, and `high` likewise."
    ),
]
