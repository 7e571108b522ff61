"""Probes of MoE layers: each names what a layer was seen to do, and whose items it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from steptron.model.moe_watch import MoeWatch
from steptron.parallel.mesh import Mesh
from steptron.telemetry.frame import Measured
from steptron.telemetry.quantities import Due
from steptron_metrics.protocol.description import Folding, Series

Items = Literal["own_experts", "all_experts", "groups", "own_rank", "one"]


@dataclass(frozen=True)
class Probe:
    """A quantity of MoE layers.

    Attributes:
        metric: its name.
        site: where a micro-batch has it, by layer: [items], or a scalar.
        items: which items this rank's values are about.
    """

    metric: str
    site: Callable[[MoeWatch], dict[int, Tensor]]
    items: Items


def _row(values: dict[int, Tensor], row: int) -> dict[int, Tensor]:
    return {layer: value[row] for layer, value in values.items()}


PROBES = (
    Probe("moe.tokens", lambda watch: watch.tokens, "own_experts"),
    Probe("moe.intermediate_norm_rms", lambda watch: _row(watch.intermediate_norm, 0), "own_experts"),
    Probe("moe.intermediate_norm_max", lambda watch: _row(watch.intermediate_norm, 1), "own_experts"),
    Probe("moe.output_norm_rms", lambda watch: _row(watch.output_norm, 0), "own_experts"),
    Probe("moe.output_norm_max", lambda watch: _row(watch.output_norm, 1), "own_experts"),
    Probe("moe.probability", lambda watch: watch.probability, "all_experts"),
    Probe("moe.group_share", lambda watch: watch.group_share, "groups"),
    Probe("moe.group_load", lambda watch: watch.load, "own_rank"),
    Probe("moe.confidence", lambda watch: watch.confidence, "one"),
)
ALIGNMENT = Probe("moe.alignment", lambda watch: watch.alignment, "own_experts")
"""Of the step's first micro-batch only."""


def watches(count: int, num_groups: int, due: Due) -> list[MoeWatch | None]:
    """What looks at each micro-batch of a step."""
    with_alignment = due.measures(ALIGNMENT.metric)
    if not (with_alignment or any(due.measures(probe.metric) for probe in PROBES)):
        return [None] * count
    return [MoeWatch(num_groups, with_alignment and index == 0) for index in range(count)]


def measure(micro_batches: Sequence[MoeWatch], mesh: Mesh, due: Due) -> list[Measured]:
    """What a step's micro-batches have shown, in this step's quantities."""
    measured = [_measure(probe, micro_batches, mesh, due) for probe in PROBES if due.measures(probe.metric)]
    if due.measures(ALIGNMENT.metric):
        measured.append(_sampled(ALIGNMENT, micro_batches[0], mesh))
    return [part for part in measured if part.series]


def fold(values_LMI: Tensor) -> Tensor:
    """[L, 5, I]: count, sum, sum of squares, minimum, maximum over the micro-batches M that are not NaN."""
    absent = values_LMI.isnan()
    present = values_LMI.masked_fill(absent, 0.0)
    return torch.stack(
        [
            (~absent).sum(dim=1).to(values_LMI.dtype),
            present.sum(dim=1),
            present.square().sum(dim=1),
            values_LMI.masked_fill(absent, torch.inf).amin(dim=1),
            values_LMI.masked_fill(absent, -torch.inf).amax(dim=1),
        ],
        dim=1,
    )


def _measure(probe: Probe, micro_batches: Sequence[MoeWatch], mesh: Mesh, due: Due) -> Measured:
    """Series of all layers of this rank; with one group there is nothing to balance."""
    by_layer = [probe.site(watch) for watch in micro_batches]
    layers = sorted(by_layer[0])
    if not layers or _is_trivial(probe, mesh, micro_batches[0]):
        return Measured((), torch.empty(0))
    values_LMI = torch.stack(
        [torch.stack([values[layer].reshape(-1) for values in by_layer]) for layer in layers]
    ).float()
    first, count = _first(probe, mesh, values_LMI.shape[2]), values_LMI.shape[2]
    if due.keeps_micro_batches(probe.metric):
        kept = len(micro_batches)
        return Measured([Series(probe.metric, layer, first, count, kept) for layer in layers], values_LMI)
    folded = [Series(probe.metric, layer, first, count, 0, Folding.MOMENTS) for layer in layers]
    return Measured(folded, fold(values_LMI))


def _sampled(probe: Probe, watch: MoeWatch, mesh: Mesh) -> Measured:
    values = probe.site(watch)
    layers = sorted(values)
    if not layers:
        return Measured((), torch.empty(0))
    values_LI = torch.stack([values[layer] for layer in layers])
    first = _first(probe, mesh, values_LI.shape[1])
    return Measured([Series(probe.metric, layer, first, values_LI.shape[1]) for layer in layers], values_LI)


def _is_trivial(probe: Probe, mesh: Mesh, watch: MoeWatch) -> bool:
    if probe.items == "groups":
        return watch.num_groups == 1
    return probe.items == "own_rank" and mesh.expert_size == 1


def _first(probe: Probe, mesh: Mesh, count: int) -> int:
    """Index of the first item: experts lie rank after rank."""
    return mesh.expert_rank * count if probe.items in ("own_experts", "own_rank") else 0
