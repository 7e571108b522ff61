"""Bytes per expert parameter and step: one reduce-scatter to owners, against an all-reduce to all.

Both schemes end with updated parameters on every rank. With n expert-data ranks, padding p and parameters of e bytes,
rings send, per rank and parameter, (n - 1) / n times (4 + e)(1 + p) for reduce-scatter and all-gather, and 8 + e
for all-reduce and broadcasts.

`nano` trains with Muon in up to four local processes; counted is what the second step hands to the collectives of
the expert-data group. For Step 3.5 Flash on 4,096 ranks (EP8, 64 expert-data ranks) the plan's figures are shown, by
pipeline rank, with the memory of the rank that needs most; "(no)" marks padding that is refused.

    python -m benchmarks.ownership
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import print_result, print_table
from benchmarks.layouts import Layout, configuration, measure
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.parallel.traffic import CommunicationVolume
from steptron.planning.memory import assume
from steptron.planning.ownership import rank_buffers
from steptron.planning.placement import Placement, placement
from steptron.planning.plan import PipelineRankPlan, plan_layout

FLASH = Path(__file__).resolve().parents[1] / "configs" / "pretrain" / "step3p5-flash.yaml"
FLASH_RANKS = 4096
FLASH_LAYOUTS: dict[str, tuple[str, ...]] = {
    "as configured": (),
    "PP8xVPP3, even": ("parallel.virtual_pipeline=3", "parallel.pipeline_layout=null"),
}
ALL_REDUCED = "optimizer.sharding.reduction=all_reduce"
CASES = {
    "DP2": Layout(2, ()),
    "DP4": Layout(4, ()),
    "EP2xDP2": Layout(4, ("parallel.expert=2",)),
    "DP2, bf16": Layout(2, ("train.precision=bf16",)),
    # 126 matrices over 4 ranks: two places stay empty.
    "DP4, 6 experts": Layout(4, ("model.moe.num_experts=6", "balance.ep_groups=2")),
}
MAX_PADDING = 0.09
"""Of the experts of Flash, on every stage with at least ``MANY_LAYERS`` of them and in all."""
MANY_LAYERS = 4


class Scheme(NamedTuple):
    """Bytes per expert parameter, step and rank.

    Attributes:
        counted: on the wire, by counted or planned collectives.
        theory: by the formula.
    """

    counted: float
    theory: float


def expert_parameters(place: Placement, rank: int) -> int:
    """Elements of the routed experts on a rank."""
    return sum(part.shard.size for part in place.held(rank) if part.shard.parameter.is_expert)


def scheme(config: PretrainConfig, place: Placement, rank: int, wire: float) -> Scheme:
    """A rank's bytes over its expert-data group, per expert parameter."""
    (experts,) = (b.layout for b in rank_buffers(config, place, rank) if b.replicas == "expt_dp")
    element = 2 if config.train.precision == "bf16" else 4
    size, others = expert_parameters(place, rank), (experts.ranks - 1) / experts.ranks
    scattered = (4 + element) * experts.length / size
    theory = scattered if experts.has_cells else 8 + element
    return Scheme(wire / size, others * theory)


def mean_scheme(layout: Layout, volumes: Sequence[CommunicationVolume]) -> Scheme:
    """Of the ranks of a layout of nano, from what each has communicated."""
    config = configuration(layout.world_size, layout.overrides)
    place = placement(config, layout.world_size)
    schemes = [scheme(config, place, rank, volume.total("expt_dp").wire) for rank, volume in enumerate(volumes)]
    return Scheme(*(sum(values) / len(schemes) for values in zip(*schemes, strict=True)))


def both(name: str) -> dict[str, Layout]:
    """A case under either scheme."""
    world_size, overrides = CASES[name]
    return {name: CASES[name], f"{name}, all-reduced": Layout(world_size, (*overrides, ALL_REDUCED))}


class Stage(NamedTuple):
    """The experts of one pipeline rank of Flash.

    Attributes:
        layers: MoE layers.
        parameters, padding: elements of a rank.
        scattered_padding: what reduce-scattering would have, chosen or not.
        chosen, all_reduced: bytes.
        rank: everything else.
    """

    layers: int
    parameters: int
    padding: int
    scattered_padding: int
    chosen: Scheme
    all_reduced: Scheme
    rank: PipelineRankPlan


def flash(overrides: Sequence[str]) -> list[Stage]:
    """Step 3.5 Flash with Muon, by pipeline rank."""
    plans = []
    for reduction in ((), (ALL_REDUCED,)):
        config = load(FLASH, ["optimizer.name=muon", *overrides, *reduction]).config
        plans.append((config, plan_layout(config, FLASH_RANKS, assume(config))))
    (config, plan), (reduced_config, reduced_plan) = plans
    place, moe = plan.placement, {layer.index for layer in plan.placement.spec.moe_layers}
    stages = []
    for own, other in zip(plan.ranks, reduced_plan.ranks, strict=True):
        (experts,) = (buffer for buffer in own.buffers if buffer.group == "expt_dp")
        stages.append(
            Stage(
                sum(len(moe.intersection(chunk.layers)) for chunk in place.chunks(own.pipeline_rank)),
                experts.parameters,
                experts.padding,
                experts.scattered_padding,
                scheme(config, place, own.rank, own.communication.total("expt_dp").wire),
                scheme(reduced_config, place, other.rank, other.communication.total("expt_dp").wire),
                own,
            )
        )
    return stages


def total_bytes(stages: Sequence[Stage]) -> tuple[float, float]:
    """Per expert parameter over all stages, as chosen and all-reduced."""
    size = sum(stage.parameters for stage in stages)
    chosen = sum(stage.parameters * stage.chosen.counted for stage in stages) / size
    return chosen, sum(stage.parameters * stage.all_reduced.counted for stage in stages) / size


def _print_flash(title: str, stages: Sequence[Stage]) -> None:
    rows = []
    for stage in stages:
        memory = stage.rank.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.fixed, memory.peak)
        rows.append(
            [
                str(stage.rank.pipeline_rank),
                str(stage.layers),
                f"{stage.scattered_padding / stage.parameters:.1%}" + ("" if stage.padding else " (no)"),
                f"{stage.chosen.counted:.3f}",
                f"{stage.chosen.theory:.3f}",
                f"{stage.all_reduced.counted:.3f}",
                *(f"{size / 2**30:.2f}" for size in sizes),
            ]
        )
    columns = ["stage", "layers", "padding", "bytes", "theory", "to all", "params", "grads", "state", "fixed", "peak"]
    heading = "bytes per expert parameter; memory of a rank, GiB"
    print_table(f"Step 3.5 Flash, EP8, 64 expert-data ranks, {title}: {heading}", columns, rows)


def main() -> None:
    measured = measure({name: layout for case in CASES for name, layout in both(case).items()})
    rows, ratios, targets = [], {}, {}
    for case in CASES:
        (chosen, reduced) = (mean_scheme(layout, measured[name]) for name, layout in both(case).items())
        for name, own in ((case, chosen), (f"{case}, all-reduced", reduced)):
            ratios[f"{name}: counted over theory"] = own.counted / own.theory
            targets[f"{name}: counted over theory"] = 1.0
        ratios[f"{case}: over all-reduced"] = chosen.counted / reduced.counted
        rows.append(
            [case, *(f"{value:.4f}" for value in (*chosen, *reduced)), f"{chosen.counted / reduced.counted:.3f}"]
        )
    columns = ["nano", "counted", "theory", "all-reduced", "theory", "ratio"]
    print_table("Bytes per expert parameter, step and rank", columns, rows)
    for title, overrides in FLASH_LAYOUTS.items():
        stages = flash(overrides)
        _print_flash(title, stages)
        chosen_bytes, reduced_bytes = total_bytes(stages)
        shares = [stage.scattered_padding / stage.parameters for stage in stages if stage.layers >= MANY_LAYERS]
        in_all = sum(stage.scattered_padding for stage in stages) / sum(stage.parameters for stage in stages)
        ratios |= {
            f"Flash, {title}: over all-reduced": chosen_bytes / reduced_bytes,
            f"Flash, {title}: largest padding": max(shares),
            f"Flash, {title}: padding in all": in_all,
        }
        targets |= {f"Flash, {title}: largest padding": MAX_PADDING, f"Flash, {title}: padding in all": MAX_PADDING}
    print_result("ownership", ratios, targets)


if __name__ == "__main__":
    main()
