"""Figures for each layer, computed from an iteration's aggregates.

Items with nothing measured (count 0, or a headline of NaN) are left out everywhere, and so are layers in which
nothing is left to say. ``x_i`` is the headline statistic (see the catalogue) of item i.

``<metric>.max_over_median``
    max_i x_i / median_i x_i of metrics that the catalogue calls relative; item: the largest. Layers with one item are
    left out. A median of 0 below a positive maximum gives inf. NaN where all are 0, or the median is infinite.
``<metric>.min_over_median``
    min_i x_i / median_i x_i; item: the smallest. A median of 0 below a positive maximum gives 0: more than half of the
    items have collapsed. NaN where all are 0, or the median is infinite.
``<metric>.median``
    median_i x_i of metrics whose levels the catalogue wants: the level of a layer, which max/median does not show where
    half of the experts or more grow. No item.
``<metric>.over_layers``
    ``<metric>.median`` over the median of the other layers' ones; of runs with two such layers and more. No item.
``moe.straggler_factor``
    The mean over micro-batches and groups of ranks of max_g of ``moe.group_load``: what waiting for the busiest
    expert-parallel rank costs; item: the rank of the group whose load is largest in the mean. It needs the loads of all
    ranks of a group in a micro-batch side by side: see ``aggregate`` for when these are known. Where they are not
    (loads that are sent folded, some ranks missing) the figure is left out: the maximum of means would be too small.
    No expert-parallel ranks, no such figure.
``moe.straggler_worst``
    max_g of the maximum of ``moe.group_load``: in the worst micro-batch; item: likewise.
``moe.group_imbalance``
    The mean over ranks and micro-batches of max_g of ``moe.group_share``: how unevenly groups of experts are chosen, in
    what the balance loss sees; item: the group whose share is largest in the mean. Left out where shares are sent
    folded.
``gradient.cosine_max.<role>``, ``gradient.cosine_min.<role>``
    max_i and min_i of c_i = d_i / (g_i w_i) with the means of ``gradient.dot_weight.<role>``, ``gradient.norm.<role>``
    and ``weight.norm.<role>``; item: that matrix. A step goes against the gradient: weights grow along themselves where
    c is negative, and shrink where it is positive. Matrices without finite, positive norms in the same iteration are
    left out.
``muon.largest``
    max over all roles and items of the maximum of ``muon.largest.<role>``; item: that one in its role.
``rank.slowdown``
    max_r t_r / median of the t of the *other* ranks with the same ``rank.stage``, with t the mean of
    ``rank.compute_seconds``; layer -1; item: the rank. Where no rank says its stage all do the same work; where some
    do, the others are left out. A rank that is alone in its stage has nothing to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from steptron_metrics import catalogue
from steptron_metrics.reducer.peers import over_others
from steptron_metrics.results import STATISTICS, Aggregate, Derived

_Figure = tuple[float, int]
"""Value and item."""
_ByKey = Mapping[tuple[str, int], Aggregate]


def derive(aggregates: Iterable[Aggregate]) -> list[Derived]:
    """All figures that the aggregates of an iteration allow, by name."""
    by_key = {(one.metric, one.layer): one for one in aggregates}
    figures: dict[str, dict[int, _Figure]] = {}
    with np.errstate(all="ignore"):
        for name, layer, figure in _figures(by_key):
            of_layer = figures.setdefault(name, {})
            # Only muon.largest comes more than once for a layer.
            if layer not in of_layer or figure[0] > of_layer[layer][0]:
                of_layer[layer] = figure
    return [_table(name, figures[name]) for name in sorted(figures)]


def _table(name: str, of_layer: Mapping[int, _Figure]) -> Derived:
    layers = sorted(of_layer)
    return Derived(
        name,
        np.array(layers, np.int32),
        np.array([of_layer[layer][0] for layer in layers]).astype(np.float32),
        np.array([of_layer[layer][1] for layer in layers], np.int32),
    )


def _figures(by_key: _ByKey) -> Iterator[tuple[str, int, _Figure]]:
    levels: dict[str, dict[int, float]] = {}
    for (name, layer), aggregate in by_key.items():
        metric = catalogue.find(name)
        if metric is None:
            continue
        if metric.relative:
            for suffix, figure in _spread(_row(aggregate, metric.headline)).items():
                yield f"{name}.{suffix}", layer, figure
        if metric.name == "moe.group_load":
            yield from _named("moe.straggler_factor", layer, _of_group(by_key, name, layer))
            yield from _named("moe.straggler_worst", layer, _largest(_row(aggregate, "max")))
        elif metric.name == "moe.group_share":
            yield from _named("moe.group_imbalance", layer, _of_group(by_key, name, layer))
        elif metric.name == "gradient.dot_weight":
            role = name.removeprefix("gradient.dot_weight.")
            cosines = _cosines(by_key, layer, role)
            yield from _named(f"gradient.cosine_max.{role}", layer, _pick(cosines, np.nanargmax))
            yield from _named(f"gradient.cosine_min.{role}", layer, _pick(cosines, np.nanargmin))
        elif metric.name == "muon.largest":
            yield from _named("muon.largest", layer, _largest(_row(aggregate, "max")))
        elif metric.name == "rank.compute_seconds":
            yield from _named("rank.slowdown", layer, _slowdown(by_key, layer))
        if metric.levels:
            measured = _row(aggregate, metric.headline)
            measured = measured[~np.isnan(measured)]
            if len(measured):
                levels.setdefault(name, {})[layer] = float(_median(measured))
    for name, of_layer in levels.items():
        layers = list(of_layer)
        beside = over_others(np.array([of_layer[layer] for layer in layers]), np.zeros(len(layers)))
        for layer, ratio in zip(layers, beside.tolist(), strict=True):
            yield f"{name}.median", layer, (of_layer[layer], -1)
            if not np.isnan(ratio):
                yield f"{name}.over_layers", layer, (ratio, -1)


def _named(name: str, layer: int, figure: _Figure | None) -> Iterator[tuple[str, int, _Figure]]:
    if figure is not None:
        yield name, layer, figure


def _row(aggregate: Aggregate, statistic: catalogue.Statistic) -> np.ndarray:
    """float64 [items], NaN where nothing was measured."""
    values = aggregate.values[STATISTICS.index(statistic)].astype(np.float64)
    return np.where(aggregate.values[0] > 0, values, np.nan)


def _pick(values: np.ndarray, argument: Callable[[np.ndarray], np.intp]) -> _Figure | None:
    if np.isnan(values).all():
        return None
    item = int(argument(values))
    return float(values[item]), item


def _largest(values: np.ndarray) -> _Figure | None:
    return _pick(values, np.nanargmax)


def _spread(values: np.ndarray) -> dict[str, _Figure]:
    """max/median and min/median."""
    measured = values[~np.isnan(values)]
    if len(measured) < 2:
        return {}
    middle = float(_median(measured))
    largest, smallest = int(np.nanargmax(values)), int(np.nanargmin(values))
    high, low = float(values[largest]), float(values[smallest])
    if np.isinf(middle) or (middle == 0 and high <= 0):
        ratios = (np.nan, np.nan)
    elif middle == 0:
        ratios = (np.inf, 0.0)
    else:
        ratios = (high / middle, low / middle)
    return {"max_over_median": (ratios[0], largest), "min_over_median": (ratios[1], smallest)}


def _median(values: np.ndarray) -> np.floating:
    """Of values without NaN; two infinite ones in the middle give an infinite one."""
    ordered = np.sort(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else (low + high) / 2


def _means(by_key: _ByKey, name: str, layer: int, items: int) -> np.ndarray:
    """float64 [items], NaN where nothing was measured."""
    values = np.full(items, np.nan)
    aggregate = by_key.get((name, layer))
    if aggregate is not None:
        row = _row(aggregate, "mean")[:items]
        values[: len(row)] = row
    return values


def _of_group(by_key: _ByKey, name: str, layer: int) -> _Figure | None:
    """The mean of the largest in each micro-batch, and the group that is largest in the mean."""
    largest = by_key.get((f"{name}_max", layer))
    busiest = _largest(_row(by_key[name, layer], "mean"))
    if largest is None or busiest is None:
        return None
    mean = _largest(_row(largest, "mean"))
    return None if mean is None else (mean[0], busiest[1])


def _cosines(by_key: _ByKey, layer: int, role: str) -> np.ndarray:
    """float64 [items], NaN where one of the three was not measured."""
    items = by_key[f"gradient.dot_weight.{role}", layer].values.shape[1]
    dot, gradient, weight = (
        _means(by_key, f"{name}.{role}", layer, items)
        for name in ("gradient.dot_weight", "gradient.norm", "weight.norm")
    )
    proper = np.isfinite(gradient) & (gradient > 0) & np.isfinite(weight) & (weight > 0) & np.isfinite(dot)
    return np.where(proper, dot / (gradient * weight), np.nan)


def _slowdown(by_key: _ByKey, layer: int) -> _Figure | None:
    seconds = _row(by_key["rank.compute_seconds", layer], "mean")
    return _largest(over_others(seconds, _means(by_key, "rank.stage", layer, len(seconds))))
