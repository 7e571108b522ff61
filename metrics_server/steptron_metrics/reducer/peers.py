"""How a rank does beside others that do the same work."""

from __future__ import annotations

import numpy as np


def over_others(seconds: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """Times over the median of the *other* ranks of the same stage.

    Of the others, so that of two ranks the slow one is not held against half of its own time.

    Args:
        seconds: [ranks], NaN of ranks that are missing.
        stages: [ranks], NaN of ranks that say none. Where no rank says its stage, all do the same work; where some do,
            the others are left out.

    Returns:
        float64 [ranks]: NaN of ranks that are alone in their stage, and where the others' median is not positive.
    """
    seconds, stages = seconds.astype(np.float64), stages.astype(np.float64)
    if np.isnan(stages).all():
        stages = np.zeros(len(seconds))
    ratios = np.full(len(seconds), np.nan)
    for stage in np.unique(stages[~np.isnan(stages)]):
        among = np.flatnonzero((stages == stage) & ~np.isnan(seconds))
        number = len(among)
        if number < 2:
            continue
        order = among[np.argsort(seconds[among], kind="stable")]
        ordered = seconds[order]
        place = np.arange(number)
        # Without the rank itself what lies behind it moves up by one.
        low, high = (ordered[middle + (middle >= place)] for middle in ((number - 2) // 2, (number - 1) // 2))
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            median = np.where(low == high, low, (low + high) / 2)
            ratios[order] = np.where(median > 0, ordered / median, np.nan)
    return ratios
