"""The answers of the API, documented by OpenAPI."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, PlainSerializer, WithJsonSchema

from steptron_metrics import catalogue
from steptron_metrics.results import Alert, MetricInfo, Run


def number(value: float) -> float | str | None:
    """A number for JSON, which knows neither NaN (null here) nor infinity ("Infinity", "-Infinity")."""
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def numbers(values: np.ndarray) -> list[object]:
    """Nested lists of an array's values, likewise."""
    plain: list[object] = values.tolist()
    if not np.isfinite(values).all():
        return [[number(value) for value in row] for row in values.tolist()]
    return plain


Number = Annotated[
    float,
    PlainSerializer(number),
    WithJsonSchema(
        {
            "anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity"]}, {"type": "null"}],
            "description": "null: not measured.",
        }
    ),
]


class Failure(BaseModel):
    """Why a request is not answered."""

    reason: str = Field(description="For people.")


class RunModel(BaseModel):
    """A run."""

    name: str
    first_iteration: int = Field(description="The first one stored.")
    last_iteration: int = Field(description="The last one stored.")
    iterations: int = Field(description="How many are stored.")
    partial: int = Field(description="Of those, how many lack the frames of some rank.")
    world_size: int = Field(description="Ranks, in the latest iteration.")
    consumed_tokens: int = Field(description="Tokens that the run has consumed.")
    started_ns: int = Field(description="When its first session began, nanoseconds since 1970.")
    last_ended_ns: int = Field(description="When its latest iteration ended, likewise.")
    open_alerts: int
    finished: bool = Field(description="It has said that it has ended.")
    live: bool = Field(
        description="It has not, and an iteration ended within the time after which the server calls a run stale."
    )

    @classmethod
    def of(cls, run: Run, live: bool) -> RunModel:
        return cls(**vars(run), live=live)


class MetricModel(BaseModel):
    """What a run has of a metric."""

    name: str
    layers: list[int] = Field(description="Layers that have it, ascending; -1: it is not of a layer.")
    items: int = Field(description="Largest number of items.")
    item: Literal["one", "expert", "matrix", "group", "rank", "depth"] | None = Field(
        description="What its items are; null of a metric that is not in the server's catalogue."
    )
    cadence: Literal["micro_batch", "iteration", "sampled"] | None = Field(description="How often it is measured.")
    headline: Literal["count", "mean", "rms", "min", "median", "max", "p99"] = Field(
        description="The statistic that says most of an item."
    )
    description: str = Field(description="What it is, with its unit.")
    role: str | None = Field(description="Of what matrices it is, where there is one metric for each role.")
    relative: bool = Field(description="Its max/median and min/median over the items are derived.")

    @classmethod
    def of(cls, info: MetricInfo) -> MetricModel:
        known = catalogue.find(info.metric)
        return cls(
            name=info.metric,
            layers=list(info.layers),
            items=info.items,
            item=known.items if known else None,
            cadence=known.cadence if known else None,
            headline=known.headline if known else "mean",
            description=known.description if known else "",
            role=info.metric.rpartition(".")[2] if known and known.by_role else None,
            relative=bool(known and known.relative),
        )


class IterationModel(BaseModel):
    """A stored iteration."""

    iteration: int
    session_ns: int = Field(description="When the session began that it belongs to, nanoseconds since 1970.")
    world_size: int
    num_ranks: int = Field(description="Ranks whose frames it was made from.")
    missing: list[int] = Field(description="Ranks whose frames it lacks; the first 100.")
    ended_ns: int = Field(description="When the last rank ended it, nanoseconds since 1970.")
    seconds: Number = Field(description="The longest of the ranks' times.")
    consumed_tokens: int
    dropped: int = Field(description="Frames that clients had to give up since the iteration before.")


class EventModel(BaseModel):
    """Something that a rank reported."""

    iteration: int
    kind: str
    detail: str


class AlertModel(BaseModel):
    """Something that a rule saw, from when it began to when it ended."""

    number: int = Field(description="The same for the alert's whole life.")
    run: str
    rule: str
    severity: str = Field(description="info, warning or critical.")
    subject: str = Field(description="What tells alerts of one rule apart.")
    layer: int | None
    item: int | None = Field(description="Expert, group or rank.")
    since_iteration: int
    since_ns: int
    last_iteration: int = Field(description="The latest that showed it.")
    ended_iteration: int | None = Field(description="null while it is open.")
    value: Number = Field(description="What was seen last.")
    worst: Number = Field(description="The worst so far.")
    threshold: Number = Field(description="What it is held against.")
    saw: str
    cause: str
    remedy: str
    wants_checkpoint: bool = Field(description="It asks the run for a checkpoint.")

    @classmethod
    def of(cls, alert: Alert) -> AlertModel:
        return cls(**vars(alert))


class Block(BaseModel):
    """A table of points by items."""

    metric: str | None = Field(None, description="Of points.")
    layer: int | None = Field(None, description="Likewise.")
    statistic: str | None = Field(None, description="Likewise.")
    figure: str | None = Field(None, description="Of derived figures.")
    columns: list[int | str] = Field(
        description="What the columns are: items of a metric, or `min`, `median`, `max` where they are folded; layers "
        "of a derived figure; names on a time line."
    )
    first: list[int] = Field(description="The first iteration that a point stands for.")
    last: list[int] = Field(description="The last one; the same where a point is one iteration.")
    values: list[list[Number]] | None = Field(
        None, description="[points][columns]: means over the iterations of a point."
    )
    low: list[list[Number]] | None = Field(None, description="Likewise, their least.")
    high: list[list[Number]] | None = Field(None, description="Likewise, their largest.")


class Blocks(BaseModel):
    """Points over time."""

    run: str
    blocks: list[Block]


class ReceiverModel(BaseModel):
    """A receiver process, with what it counted since it was started."""

    number: int
    pid: int
    restarts: int
    connections: int
    frames: int
    bytes: int
    refused: int
    later: int = Field(description="Messages put off because the journal or the disk was full.")


class ReducerModel(BaseModel):
    """A reducer process."""

    number: int
    pid: int
    restarts: int
    iterations: int
    busy_seconds: float


class WaitingModel(BaseModel):
    """An iteration that is not stored yet."""

    run: str
    iteration: int
    ranks: int = Field(description="That have sent.")
    world_size: int
    since_ns: int
    missing: list[int] = Field(description="Ranks that have not sent, the first 10.")


class ServerModel(BaseModel):
    """How the server does."""

    software: str
    started_ns: int
    now_ns: int
    receivers: list[ReceiverModel]
    reducers: list[ReducerModel]
    pending_iterations: int = Field(description="Frames have arrived, and they are not stored yet.")
    waiting: list[WaitingModel] = Field(description="The oldest of those, at most 100; of runs that you may read.")
    stored_iterations: int
    journal_bytes: int
    journal_limit_bytes: int
    database_bytes: int
    free_bytes: int
    dropped_frames: int = Field(description="Frames that clients had to give up.")
    ignored_frames: dict[str, int] = Field(
        description="Frames that changed nothing, by reason: `duplicate`, `void` (of iterations that a later session "
        "has made again), `refused` (they contradict others of their session), `gone` (no longer in the journal)."
    )
    webhook_waiting: int
    webhook_failed: int
    set_aside: int = Field(description="Iterations that the database has refused and that are in files instead.")
    trouble: str | None = Field(description="What keeps the server from storing; null when nothing does.")


class Health(BaseModel):
    """The server answers."""

    status: Literal["ok", "trouble"] = Field(description="`trouble`: it takes frames, and cannot store what it makes.")
