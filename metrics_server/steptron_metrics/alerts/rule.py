"""What a rule is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steptron_metrics.catalogue import Statistic

Relative = Literal["median", "mean", "stage", "none"]
Severity = Literal["info", "warning", "critical"]
IterationFigure = Literal["missing_ranks", "dropped_frames", "non_finite"]

BLOCK = 16
"""Iterations that a baseline takes together; blocks begin at multiples of it, whenever the server was started."""


@dataclass(frozen=True)
class ItemsWatch:
    """Each item of each layer of a metric (of all roles, where it has roles).

    Attributes:
        metric: name, for metrics by role without the role.
        statistic: over micro-batches and replicas.
        relative_to: each value is divided by that of the layer's items; stage: by the median of the other ranks of the
            same ``rank.stage``.
        own_metric: the name is none of the catalogue.
    """

    metric: str
    statistic: Statistic
    relative_to: Relative = "none"
    own_metric: bool = False


@dataclass(frozen=True)
class DerivedWatch:
    """A derived figure of each layer.

    Attributes:
        derived: its name.
        same_item: iterations count one after the other only while the figure is about the same item.
        own_metric: it is derived from a metric that the catalogue has not.
    """

    derived: str
    same_item: bool = False
    own_metric: bool = False


@dataclass(frozen=True)
class IterationWatch:
    """A figure of the iteration as a whole."""

    iteration: IterationFigure


@dataclass(frozen=True)
class EventWatch:
    """How many events of a kind came with the iteration."""

    event: str


@dataclass(frozen=True)
class SilenceWatch:
    """Seconds since anything came from a run.

    Attributes:
        over_after: seconds after which a silent run counts as over: its alert ends, and none begins.
    """

    over_after: float = 86_400.0


Watch = ItemsWatch | DerivedWatch | IterationWatch | EventWatch | SilenceWatch


@dataclass(frozen=True)
class Baseline:
    """A value's own running level: the median, over the latest blocks of 16 iterations, of their geometric means.

    Values that are beyond the threshold, of the warm-up, or of an open alert do not count. There is a baseline from two
    complete blocks on.

    Such a level follows what changes slowly. The best level does not: it is the lowest (``above``) or highest
    (``below``) that the median of four blocks one after the other has ever been.

    Attributes:
        times: a value has to be beyond the baseline times this (``above``) or divided by it (``below``).
        iterations: that it looks back, a multiple of 16.
        best: or beyond the best level times this, or divided by it; None: the best level does not count.
        before: after the warm-up, as long as there is no level, beyond this; None: nothing counts.
    """

    times: float
    iterations: int = 256
    best: float | None = None
    before: float | None = None

    @property
    def blocks(self) -> int:
        return self.iterations // BLOCK


@dataclass(frozen=True)
class Companion:
    """What has to hold of the same item of the same layer in the same iteration.

    Attributes:
        watch: what is looked at.
        above, below: one of them is given.
    """

    watch: ItemsWatch
    above: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Rule:
    """A condition on what is measured, and what to say when it holds.

    Attributes:
        name: [a-z][a-z0-9_]*
        watch: what is looked at.
        severity: of its alerts.
        threshold: (``above`` or ``below`` in YAML) that the value has to be beyond; None where the baseline alone
            decides, and of silence where the server's settings do.
        is_below: beyond means below.
        baseline: where given, the value has to be beyond its own level too.
        regardless: beyond this it counts whatever the baseline, in the warm-up too.
        companion: has to hold too (``while`` in YAML).
        warm_up: the first iterations of a run (by number), in which nothing else counts.
        for_iterations: that the condition holds one after the other before an alert begins (``for`` in YAML).
        clear_at: an alert ends when the value is back by this share of its threshold ...
        clear_for: ... in so many iterations one after the other.
        max_open: more alerts than this of one rule and run become one.
        checkpoint: its alerts ask the run for a checkpoint.
        saw, cause, remedy: for people; ``saw`` is a template, see ``loading.FIELDS``.
    """

    name: str
    watch: Watch
    severity: Severity
    threshold: float | None
    is_below: bool
    saw: str
    cause: str
    remedy: str
    baseline: Baseline | None = None
    regardless: float | None = None
    companion: Companion | None = None
    warm_up: int = 0
    for_iterations: int = 1
    clear_at: float = 1.0
    clear_for: int = 1
    max_open: int = 8
    checkpoint: bool = False

    @property
    def look_back(self) -> int:
        """Iterations from which its state can be made anew: of the baseline, and of the counting."""
        blocks = 0 if self.baseline is None else self.baseline.iterations + BLOCK
        return max(blocks, self.for_iterations + self.clear_for)
