"""What the server makes of an iteration's frames: plain data handed from the reducers to the storage."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STATISTICS = ("count", "mean", "rms", "min", "median", "max", "p99")
"""Rows of :attr:`Aggregate.values`: over all samples of an item, that is micro-batches and replicas."""

FINISHED = "finished"
"""Kind of the event with which a run says that it has ended: it is neither live nor to be called stale."""


@dataclass(frozen=True)
class Aggregate:
    """A metric of a layer in an iteration.

    Of folded samples count, mean, rms, min and max are exact; median and p99 are those of the ranks' means.

    Attributes:
        metric, layer: which.
        values: float32 [7, items], rows as in ``STATISTICS``; items that nothing was measured of have count 0 and NaN.
    """

    metric: str
    layer: int
    values: np.ndarray


@dataclass(frozen=True)
class Derived:
    """A figure for each layer, computed from aggregates.

    Attributes:
        name: such as ``moe.output_norm_max.max_over_median``.
        layers: int32 [L], ascending.
        values: float32 [L]; NaN where it is undefined.
        items: int32 [L], the item that it is about (of max/median the largest); -1 without one.
    """

    name: str
    layers: np.ndarray
    values: np.ndarray
    items: np.ndarray


@dataclass(frozen=True)
class Event:
    """Something that a rank reported."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Iteration:
    """Everything that is kept for good of an iteration.

    Attributes:
        run: name.
        session_ns: when the session began that it belongs to.
        iteration: from 1.
        world_size: ranks that were to send.
        missing: ranks that did not; empty when it is whole.
        ended_ns: when the last rank ended it.
        seconds: the longest of the ranks' times.
        consumed_tokens: largest of the ranks'.
        dropped: frames that clients said they had to give up.
        events: in the order of the ranks.
        aggregates: by metric and layer.
        derived: by name.
    """

    run: str
    session_ns: int
    iteration: int
    world_size: int
    missing: tuple[int, ...]
    ended_ns: int
    seconds: float
    consumed_tokens: int
    dropped: int = 0
    events: tuple[Event, ...] = ()
    aggregates: tuple[Aggregate, ...] = ()
    derived: tuple[Derived, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.world_size - len(self.missing)


@dataclass(frozen=True)
class Alert:
    """Something that a rule saw, from when it began to when it ended.

    Attributes:
        number: the same for the alert's whole life; ascending in the order of beginning.
        run, rule: where, and which.
        severity: "info", "warning" or "critical".
        subject: what tells alerts of one rule apart, such as "layer 44 expert 17".
        layer, item: None where it is about none.
        since_iteration, since_ns: when it began.
        ended_iteration: None while it is open.
        last_iteration: the latest that showed it.
        value, threshold: what was seen last, and what it is held against; the worst so far is ``worst``.
        saw, cause, remedy: in sentences for people.
        wants_checkpoint: it asks the run for a checkpoint.
    """

    number: int
    run: str
    rule: str
    severity: str
    subject: str
    layer: int | None
    item: int | None
    since_iteration: int
    since_ns: int
    last_iteration: int
    ended_iteration: int | None
    value: float
    worst: float
    threshold: float
    saw: str
    cause: str
    remedy: str
    wants_checkpoint: bool = False


@dataclass(frozen=True)
class Run:
    """A run as a list shows it.

    Attributes:
        name: of the run.
        first_iteration, last_iteration: stored ones.
        iterations: their number.
        partial: of those, without frames of some rank.
        world_size: of the latest iteration.
        consumed_tokens: likewise.
        started_ns: when its first session began.
        last_ended_ns: when its latest iteration ended.
        open_alerts: their number.
        finished: its latest iteration has an event of kind ``FINISHED``.
    """

    name: str
    first_iteration: int
    last_iteration: int
    iterations: int
    partial: int
    world_size: int
    consumed_tokens: int
    started_ns: int
    last_ended_ns: int
    open_alerts: int
    finished: bool = False


@dataclass(frozen=True)
class MetricInfo:
    """What a run has of a metric: layers (ascending) and the largest number of items."""

    metric: str
    layers: tuple[int, ...]
    items: int


@dataclass(frozen=True)
class Points:
    """A statistic of a metric and layer, or a derived figure of all layers, over time.

    Attributes:
        first, last: int64 [P], the iterations that each point stands for; the same where nothing is rolled up.
        values: float32 [P, items]; [P, L] of derived figures.
        low, high: float32 like ``values``: least and largest of the iterations of a point; the values themselves where
            nothing is rolled up.
        layers: int32 [L] of derived figures; empty otherwise.
    """

    first: np.ndarray
    last: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    layers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
