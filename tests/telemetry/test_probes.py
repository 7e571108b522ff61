"""What is measured under a layout against a direct computation in float64 from what went in and out of the modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steptron.config.loader import load
from steptron.model.experts import GroupedExperts
from steptron.model.layer_spec import ModelSpec, ParameterRole, model_spec
from steptron.model.moe import MoeFfn
from steptron.optim.diagnostics import muon_of
from steptron.optim.muon import Muon
from steptron.optim.rules import rule_of
from steptron.parallel.gradient_norm import gradient_norm
from steptron.telemetry.frame import Measured
from steptron.telemetry.matrices import items_of
from steptron.telemetry.probes import Probes
from steptron.telemetry.quantities import DEFAULTS, Quantity
from steptron.train.step import TrainStep
from steptron_metrics.protocol.description import Combination
from tests.optim.muon_runs import MUON, build, make_batches, parameters_of
from tests.parallel.layouts import NANO, Part, assemble, parts_of, reduced_gradients
from tests.worker_pool import WorkerPool

LR = 1e-2
RECOMPUTE = "train.recompute=[{layers: all, parts: [ffn]}, {layers: moe, parts: [moe_permutation, activation]}]"
Value = tuple[str, int, int]
"""Metric, layer, item."""


def every_step(keep: str) -> dict[str, Quantity]:
    return {name: Quantity(1, quantity.keep and keep) for name, quantity in DEFAULTS.items()}  # type: ignore[arg-type]


def values_of(measured: Sequence[Measured]) -> dict[Value, list[float]]:
    """Of every item its rows, as they go out."""
    values: dict[Value, list[float]] = {}
    for part in measured:
        flat, at = part.values.reshape(-1).double(), 0
        for series in part.series:
            rows = flat[at : at + series.size].view(series.rows, series.count)
            at += series.size
            for column in range(series.count):
                key = (series.metric, series.layer, series.first + column)
                assert key not in values
                values[key] = rows[:, column].tolist()
        assert at == flat.numel()
    return values


# ------------------------------------------------------------------------------------------ experts


class Saved:
    """Inputs of every MoE layer's router and experts, micro-batch after micro-batch; what recomputation runs again,
    with the same numbers, is there once."""

    def __init__(self, train: TrainStep) -> None:
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.routing: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.experts: dict[int, GroupedExperts] = {}
        for chunk in train.chunks:
            for index, layer in chunk.layers.items():
                if isinstance(layer.ffn, MoeFfn):
                    self._save(int(index), layer.ffn)

    def _save(self, layer: int, ffn: MoeFfn) -> None:
        rows, routings = self.rows.setdefault(layer, []), self.routing.setdefault(layer, [])
        self.experts[layer] = ffn.experts

        def see_rows(module: Any, inputs: tuple[Any, ...]) -> None:
            x, counts, _, plan = inputs
            x = x if plan is None else x[plan.slot_N // plan.rows_TK.shape[1]]
            if not any(torch.equal(x, seen) for seen, _ in rows):
                rows.append((x.detach().clone(), counts.clone()))

        def see_routing(module: Any, inputs: Any, routing: Any) -> None:
            scores, chosen = routing.scores_TE.detach(), routing.experts_TK
            if not any(torch.equal(scores, seen) for seen, _ in routings):
                routings.append((scores.clone(), chosen.clone()))

        ffn.experts.register_forward_pre_hook(see_rows)
        ffn.router.register_forward_hook(see_routing)


def expert_by_hand(experts: GroupedExperts, expert: int, x: torch.Tensor) -> dict[str, float]:
    """Of one expert and micro-batch, over its rows one by one."""
    spec = experts.spec
    found: dict[str, list[float]] = {"intermediate": [], "output": [], "alignment": []}
    for row in x.double():
        gate, up = (experts.gate_up_projection[expert].detach().double() @ row).chunk(2)
        silu = gate / (1 + torch.exp(-gate))
        found["alignment"].append(float((silu * up).norm() / (silu.norm() * up.norm())))
        if spec.expert_clamp is not None:
            silu, up = silu.clamp(max=spec.expert_clamp), up.clamp(-spec.expert_clamp, spec.expert_clamp)
        hidden = silu * up
        found["intermediate"].append(float(hidden.norm()))
        found["output"].append(float((experts.down_projection[expert].detach().double() @ hidden).norm()))
    values = {"moe.tokens": float(len(x))}
    for name in ("intermediate", "output"):
        norms = found[name]
        values[f"moe.{name}_norm_rms"] = math.sqrt(sum(n * n for n in norms) / len(norms)) if norms else math.nan
        values[f"moe.{name}_norm_max"] = max(norms, default=math.nan)
    values["moe.alignment"] = sum(found["alignment"]) / len(norms) if norms else math.nan
    return values


def experts_by_hand(train: TrainStep, saved: Saved, valid: list[torch.Tensor]) -> dict[Value, list[float]]:
    """Of every item a value for each micro-batch (of alignment for the first one)."""
    mesh, values = train.mesh, {}
    for layer, experts in saved.experts.items():
        local = experts.down_projection.shape[0]
        top_k = saved.routing[layer][0][1].shape[1]
        assert len(saved.rows[layer]) == len(saved.routing[layer]) == len(valid)
        for x, counts in saved.rows[layer]:
            starts = [0, *counts.cumsum(0).tolist()]
            for e in range(local):
                for metric, value in expert_by_hand(experts, e, x[starts[e] : starts[e + 1]]).items():
                    values.setdefault((metric, layer, mesh.expert_rank * local + e), []).append(value)
            if mesh.expert_size > 1:
                load = len(x) / (saved.routing[layer][0][0].shape[0] * top_k)
                values.setdefault(("moe.group_load", layer, mesh.expert_rank), []).append(load)
        for (scores, chosen), keep in zip(saved.routing[layer], valid, strict=True):
            p = scores.double()[keep] / scores.double()[keep].sum(dim=1, keepdim=True)
            for e in range(p.shape[1]):
                values.setdefault(("moe.probability", layer, e), []).append(float(p[:, e].mean()))
            picked = [sum(float(p[t, e]) for e in chosen[keep][t]) for t in range(len(p))]
            values.setdefault(("moe.confidence", layer, 0), []).append(sum(picked) / len(picked))
            counts = torch.bincount(chosen[keep].flatten(), minlength=p.shape[1])
            dist.all_reduce(counts, group=mesh.groups.tp_cp)  # of the whole micro-batch, as the balance loss
            for g, count in enumerate(counts.view(4, -1).sum(dim=1).tolist()):
                values.setdefault(("moe.group_share", layer, g), []).append(4 * count / int(counts.sum()))
    return {
        key: row[:1] if key[0] == "moe.alignment" else row  # of the first micro-batch only
        for key, row in values.items()
    }


def folded(row: list[float]) -> list[float]:
    present = [value for value in row if not math.isnan(value)]
    extremes = [min(present), max(present)] if present else [math.inf, -math.inf]
    return [len(present), sum(present), sum(value * value for value in present), *extremes]


def measure_experts(rank: int, world_size: int, overrides: list[str], keep: str) -> tuple[list[str], int, set[str]]:
    """Where a step's values are not those by hand, how many there are, and of which metrics."""
    train = build(world_size, ["balance.ep_groups=4", *overrides])
    # Skewed routers: on every rank experts of very different load, and some with none.
    for router in train.chunks.routers().values():
        router.bias += torch.tensor([0.6, 0.1, -0.1, -0.6]).repeat(router.bias.numel() // 4)
    own = make_batches()[train.mesh.data_rank :: train.mesh.data_size]
    probes, saved = Probes(train, 4, every_step(keep)), Saved(train)
    probes.begin(1)
    train.accumulate_gradients(own)
    measured = probes.end()
    valid = [train._own_tokens(batch.documents_BS >= 0) for batch in own]
    expected, got = experts_by_hand(train, saved, valid), values_of(measured)
    if keep == "folded":
        expected = {key: row if key[0] == "moe.alignment" else folded(row) for key, row in expected.items()}
    wrong = [f"{key} is missing" for key in expected.keys() - got.keys()]
    wrong += [f"{key} is more than expected" for key in got.keys() - expected.keys()]
    for key in expected.keys() & got.keys():
        if got[key] != pytest.approx(expected[key], rel=2e-5, abs=1e-7, nan_ok=True):
            wrong.append(f"{key}: {got[key]}, by hand {expected[key]}")
    return sorted(wrong), len(got), {metric for metric, _, _ in got}


LAYOUTS = {
    "one process": (1, []),
    "plain operations": (1, ["train.kernels=plain"]),
    "recompute": (1, [RECOMPUTE]),
    "EP2": (2, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2", "train.global_batch_size=8"]),
    "PP2xEP2 recompute": (4, ["parallel.pipeline=2", "parallel.expert=2", "train.global_batch_size=8", RECOMPUTE]),
}


@pytest.mark.parametrize("keep", ["folded", "micro_batches"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(pool: WorkerPool, layout: str, keep: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    results = pool.run(world_size, measure_experts, overrides, keep)
    with_experts = [result for result in results if result[1]]
    assert with_experts
    for wrong, _, metrics in with_experts:
        assert not wrong, wrong[:5]
        per_micro_batch = {name for name, quantity in DEFAULTS.items() if name.startswith("moe.")}
        assert metrics == per_micro_batch - (set() if "expert=2" in str(overrides) else {"moe.group_load"})


# ------------------------------------------------------------------------------------------ matrices


def measure_update(
    rank: int, world_size: int, overrides: list[str]
) -> tuple[dict[str, Part], dict[str, Part], dict[str, Part], dict[Value, tuple[int, list[float]]], dict[str, float]]:
    """Parameters before, the gradients as clipped, parameters after, what was measured with how ranks' values go
    together, and Muon's own account of its intermediates."""
    train = build(world_size, overrides)
    own = make_batches()[train.mesh.data_rank :: train.mesh.data_size]
    before = parameters_of(train)
    train.accumulate_gradients(own)
    norm, _ = gradient_norm(train.sharded.owned, train.device)
    most = train.config.optimizer.clip_grad_norm
    assert 0 < most < norm
    clipped = {name: gradient * (most / (norm + 1e-6)) for name, gradient in reduced_gradients(train).items()}
    gradients = parts_of(train.spec, train.mesh.place, clipped)
    probes = Probes(train, 1, every_step("folded"))
    probes.begin(8)
    train.run(own, LR, 0.0)
    measured = probes.end()
    combinations = {
        (series.metric, series.layer, item): int(series.combination)
        for part in measured
        for series in part.series
        for item in range(series.first, series.first + series.count)
    }
    values = {
        key: (combinations[key], row) for key, row in values_of(measured).items() if not key[0].startswith("moe.")
    }
    muon = muon_of(train.optimizer)
    largest = muon.largest() if isinstance(muon, Muon) else {}
    return before, gradients, parameters_of(train), values, largest


def together(ranks: list[dict[Value, tuple[int, list[float]]]]) -> dict[Value, float]:
    """What the server makes of the ranks' values; samples must be of one rank."""
    rows: dict[Value, list[float]] = {}
    how: dict[Value, int] = {}
    for values in ranks:
        for key, (combination, row) in values.items():
            rows.setdefault(key, []).extend(row)
            how[key] = combination
    combined = {}
    for key, row in rows.items():
        if how[key] == Combination.ROOT_SUM_SQUARES:
            combined[key] = math.sqrt(sum(value**2 for value in row))
        elif how[key] == Combination.SUM:
            combined[key] = sum(row)
        else:
            (combined[key],) = row
    return combined


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (1, ["optimizer.name=adamw"]),
        (1, ["optimizer.name=sgd", "train.kernels=plain"]),
        (2, ["parallel.expert=2"]),
        (2, ["parallel.tensor=2"]),
        (2, ["optimizer.name=adamw"]),
        (4, ["parallel.pipeline=2", "parallel.expert=2", "train.global_batch_size=8"]),
        (4, ["parallel.pipeline=2", "parallel.tensor=2"]),
    ],
    ids=["Muon", "AdamW", "SGD", "EP2", "TP2", "AdamW DP2", "PP2xEP2", "PP2xTP2"],
)
def test_matrices(pool: WorkerPool, world_size: int, overrides: list[str]) -> None:
    """Every trained matrix of the model once, whoever owns what of it: norms of weights, of gradients as clipped, and
    of the update apart from weight decay."""
    config = load(NANO, [*MUON, *overrides]).config
    results = pool.run(world_size, measure_update, ["optimizer.clip_grad_norm=0.5", *overrides])
    got = together([values for _, _, _, values, _ in results])
    before, gradients, after = (assemble([result[index] for result in results]) for index in range(3))  # type: ignore[misc]
    expected: dict[Value, float] = {}
    for name, item in items_of(spec_of_nano()).items():
        if name not in gradients:
            continue
        stacked = item.role.startswith("expert_")
        for offset in range(before[name].shape[0] if stacked else 1):
            w, g, v = (
                (tensors[name][offset] if stacked else tensors[name]).double() for tensors in (before, gradients, after)
            )
            at = (item.layer, item.item + offset if not stacked else offset)
            expected[f"weight.norm.{item.role}", *at] = float(w.norm())
            expected[f"gradient.norm.{item.role}", *at] = float(g.norm())
            rule = rule_of(config.optimizer, ParameterRole(item.role))
            decayed = w * (1 - LR * rule.lr_multiplier * rule.weight_decay)
            expected[f"update.norm.{item.role}", *at] = float((v - decayed).norm())
            expected[f"gradient.dot_weight.{item.role}", *at] = float((g * w).sum())
    own = {
        key: value
        for key, value in got.items()
        if key[0].startswith(("weight", "gradient.norm", "update", "gradient.dot"))
    }
    assert own.keys() == expected.keys() and len(own) > 200
    for key, value in own.items():
        scale = expected[key]
        if key[0].startswith("gradient.dot"):
            role = key[0].removeprefix("gradient.dot_weight.")
            scale = expected[f"gradient.norm.{role}", *key[1:]] * expected[f"weight.norm.{role}", *key[1:]]
        # Of an update the difference of two rounded parameters is what it is held against.
        rounding = expected["weight.norm" + key[0].removeprefix("update.norm"), *key[1:]] if "update" in key[0] else 0.0
        assert abs(value - expected[key]) <= 1e-5 * abs(scale) + 1e-7 * rounding + 1e-12, (key, value, expected[key])
    largest: dict[str, float] = {}
    for result in results:
        largest |= result[4]
    assert len([key for key in got if key[0].startswith("muon.largest")]) == len(largest)
    items = items_of(spec_of_nano())
    for name, value in largest.items():
        matrix, _, expert = name.removesuffix("]").partition("[")
        item = items[matrix]
        assert got[f"muon.largest.{item.role}", item.layer, int(expert or item.item)] == pytest.approx(value, rel=1e-6)
    ranks = [(key, value) for key, value in got.items() if key[0].startswith("gradient.stable_rank")]
    assert bool(ranks) == bool(largest)
    for (metric, layer, item), value in ranks:
        role = metric.removeprefix("gradient.stable_rank.")
        (name,) = (name for name, own in items.items() if (own.role, own.layer) == (role, layer))
        singular = torch.linalg.svdvals(gradients[name][item].double())
        assert value == pytest.approx(float(singular.square().sum() / singular[0] ** 2), rel=1e-4)


def spec_of_nano() -> ModelSpec:
    return model_spec(load(NANO, []).config.model)


# ------------------------------------------------------------------------------------------ looking


def trained(rank: int, world_size: int, overrides: list[str], looks: bool) -> dict[str, torch.Tensor]:
    train, batches = build(world_size, overrides), make_batches()
    probes = Probes(train, 4, every_step("folded"))
    for step in range(1, 4):
        if looks:
            probes.begin(step)
        train.run(batches, LR, 1e-3)
        if looks:
            assert probes.end()
    train.evaluate(batches)
    return {name: tensor.detach().clone() for name, tensor in train.chunks.logical_tensors()}


@pytest.mark.parametrize("overrides", [["balance.ep_groups=4"], [RECOMPUTE, "train.kernels=plain"]])
def test_looking_changes_no_bit(pool: WorkerPool, overrides: list[str]) -> None:
    ((without,), (with_probes,)) = (pool.run(1, trained, overrides, looks) for looks in (False, True))
    assert [name for name in without if not torch.equal(without[name], with_probes[name])] == []


def what_is_due(rank: int, world_size: int) -> list[tuple[bool, set[str]]]:
    train, batches = build(world_size, []), make_batches()
    quantities = dict(DEFAULTS) | {name: Quantity(0) for name in DEFAULTS}
    quantities |= {"moe.tokens": Quantity(2, "folded"), "weight.norm": Quantity(3), "weight.norm.query": Quantity(4)}
    probes, seen = Probes(train, 1, quantities), []
    for step in range(1, 7):
        probes.begin(step)
        looking = any(watch is not None for watch in probes.watch(2))
        train.run(batches, LR, 0.0)
        seen.append((looking, {series.metric for part in probes.end() for series in part.series}))
    return seen


def test_measures_what_is_due_and_looks_at_nothing_else(pool: WorkerPool) -> None:
    (seen,) = pool.run(1, what_is_due)
    roles = {"norm", "query", "expert_up", "router"}
    for step, (looking, metrics) in enumerate(seen, start=1):
        assert looking == (step % 2 == 0) == ("moe.tokens" in metrics)
        assert ("weight.norm.query" in metrics) == (step % 4 == 0)
        others = {f"weight.norm.{role}" for role in roles - {"query"}}
        assert (metrics & others == others) if step % 3 == 0 else not metrics & others
        assert metrics <= {"moe.tokens"} | {name for name in metrics if name.startswith("weight.norm")}


def watched_norms(rank: int, world_size: int, kernels: str) -> list[list[float]]:
    """Largest norms of layer 5's experts when one weight of expert 3 is NaN."""
    train, batches = build(world_size, [f"train.kernels={kernels}"]), make_batches()
    probes = Probes(train, 1, every_step("micro_batches"))
    with torch.no_grad():
        train.chunks[0].layers["5"].ffn.experts.down_projection[3, 0, 0] = torch.nan
    probes.begin(1)
    train.accumulate_gradients(batches)
    values = values_of(probes.end())
    return [values["moe.output_norm_max", 5, expert] for expert in range(8)]


@pytest.mark.parametrize("kernels", ["plain", "native"])
def test_what_is_not_finite_is_told_apart_from_what_is_not_measured(pool: WorkerPool, kernels: str) -> None:
    (norms,) = pool.run(1, watched_norms, kernels)
    assert any(math.isinf(value) for value in norms[3]) and not any(math.isnan(value) for value in norms[3][:1])
    assert not any(math.isinf(value) for expert, row in enumerate(norms) if expert != 3 for value in row)
