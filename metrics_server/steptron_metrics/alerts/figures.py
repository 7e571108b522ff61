"""Figures of an iteration as a whole that rules may watch, with what to say about them."""

from __future__ import annotations

import numpy as np

from steptron_metrics.alerts import text
from steptron_metrics.alerts.rule import IterationFigure
from steptron_metrics.results import STATISTICS, Iteration

_MEAN = STATISTICS.index("mean")
_ALWAYS_FINITE = ("train.loss", "train.lm_loss", "train.grad_norm")
"""Single values that are measured in each iteration: NaN, "not measured" elsewhere, is a result that is no number."""
_OF_TOKENS = ("moe.intermediate_norm_rms", "moe.intermediate_norm_max", "moe.output_norm_rms", "moe.output_norm_max")
"""Measured of every expert that gets tokens: where one has none of them, they were no numbers."""
_NAMED = 5
SKIPPED = "skipped"
"""Kind of the event with which a run says that it has made no update in a step."""


def figure_of(figure: IterationFigure, iteration: Iteration) -> tuple[float, str]:
    """The figure's value, NaN where the iteration says nothing about it, and what it is about in words."""
    if figure == "missing_ranks":
        missing = iteration.missing
        return float(len(missing)), f"{'rank' if len(missing) == 1 else 'ranks'} {text.listed(missing)}"
    if figure == "dropped_frames":
        return float(iteration.dropped), ""
    return _non_finite(iteration)


def events_of(kind: str, iteration: Iteration) -> tuple[float, str]:
    """How many events of a kind there are, and what the first says."""
    details = [event.detail for event in iteration.events if event.kind == kind]
    return float(len(details)), details[0] if details else ""


def _non_finite(iteration: Iteration) -> tuple[float, str]:
    total = 0
    places: list[str] = []
    tokens = {one.layer: one.values for one in iteration.aggregates if one.metric == "moe.tokens"}
    for aggregate in iteration.aggregates:
        measured = aggregate.values[0] > 0
        bad = measured & np.isinf(aggregate.values[1:]).any(axis=0)
        if aggregate.metric in _ALWAYS_FINITE:
            bad |= ~measured
        elif aggregate.metric in _OF_TOKENS and aggregate.layer in tokens and measured.any():
            count, mean = tokens[aggregate.layer][[0, _MEAN], : len(bad)]
            reached = (count > 0) & (mean > 0)
            bad[: len(reached)] |= reached & ~measured[: len(reached)]
        for item in np.flatnonzero(bad).tolist():
            total += 1
            if len(places) < _NAMED:
                where = text.where(aggregate.metric, aggregate.layer, item)
                places.append(aggregate.metric + ("" if where == "the run" else f" of {where}"))
    if total == 0 and any(event.kind == SKIPPED for event in iteration.events):
        # Not over yet, whether or not what was wrong is measured in a step that is skipped.
        return float("nan"), ""
    more = total - len(places)
    return float(total), ", ".join(places) + (f" and {more:,} more" if more else "")
