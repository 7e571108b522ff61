"""Figures of an iteration as a whole that rules may watch, with what to say about them."""

from __future__ import annotations

import numpy as np

from steptron_metrics.alerts import text
from steptron_metrics.alerts.rule import IterationFigure
from steptron_metrics.results import STATISTICS, Iteration

_ALWAYS_FINITE = ("train.loss", "train.lm_loss", "train.grad_norm")
"""Single values that are measured in each iteration: NaN, "not measured" elsewhere, is a result that is no number."""
_SAMPLED_ROWS = [STATISTICS.index(name) for name in ("mean", "min", "max")]
_NAMED = 5


def figure_of(figure: IterationFigure, iteration: Iteration) -> tuple[float, str]:
    """The figure's value, and what it is about in words."""
    if figure == "missing_ranks":
        missing = iteration.missing
        return float(len(missing)), f"{'rank' if len(missing) == 1 else 'ranks'} {text.listed(missing)}"
    if figure == "dropped_frames":
        return float(iteration.dropped), ""
    return _non_finite(iteration)


def _non_finite(iteration: Iteration) -> tuple[float, str]:
    total = 0
    places: list[str] = []
    for aggregate in iteration.aggregates:
        bad = (aggregate.values[0] > 0) & ~np.isfinite(aggregate.values[_SAMPLED_ROWS]).all(axis=0)
        if aggregate.metric in _ALWAYS_FINITE and not iteration.missing:
            bad |= aggregate.values[0] == 0
        for item in np.flatnonzero(bad).tolist():
            total += 1
            if len(places) < _NAMED:
                where = text.where(aggregate.metric, aggregate.layer, item)
                places.append(aggregate.metric + ("" if where == "the run" else f" of {where}"))
    more = total - len(places)
    return float(total), ", ".join(places) + (f" and {more:,} more" if more else "")
