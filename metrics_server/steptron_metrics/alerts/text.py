"""How alerts name what they are about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from steptron_metrics.catalogue import find

_RANK = "expert-parallel rank"
_OWN_NAMES = {
    "moe.group_load": _RANK,
    "moe.straggler_factor": _RANK,
    "moe.straggler_worst": _RANK,
    "moe.group_share": "group",
    "moe.group_imbalance": "group",
    "rank.slowdown": "rank",
}


def figure(value: float) -> str:
    """Three digits, thousands apart."""
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "unknown"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def item_kind(metric: str) -> str | None:
    """What the items of a metric or derived figure are: "expert", "matrix", ...; None where there is one only."""
    if metric in _OWN_NAMES:
        return _OWN_NAMES[metric]
    known = find(metric) or find(metric.rpartition(".")[0])
    if known is None:
        return "item"
    return None if known.items == "one" else known.items


def subject(metric: str, layer: int, item: int, with_role: bool) -> str:
    """Such as "layer 44 expert 17 expert_up"; "run" for what is of no layer and no item."""
    kind = item_kind(metric)
    parts = [f"layer {layer}"] if layer >= 0 else []
    parts += [f"{kind} {item}"] if kind is not None and item >= 0 else []
    parts += [metric.rpartition(".")[2]] if with_role else []
    return " ".join(parts) or "run"


def where(metric: str, layer: int, item: int) -> str:
    """Such as "expert 17 of layer 44"."""
    kind = item_kind(metric)
    parts = [f"{kind} {item}"] if kind is not None and item >= 0 else []
    parts += [f"layer {layer}"] if layer >= 0 else []
    return " of ".join(parts) or "the run"


def sentence(template: str, fields: Mapping[str, str]) -> str:
    """The template filled in, beginning with a capital letter."""
    filled = template.format_map(fields)
    return filled[:1].upper() + filled[1:]


def listed(numbers: Sequence[int | str], most: int = 10) -> str:
    """The first ones, and how many more."""
    more = len(numbers) - most
    return ", ".join(str(number) for number in numbers[:most]) + (f" and {more:,} more" if more > 0 else "")
