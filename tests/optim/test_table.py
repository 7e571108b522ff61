"""The optimizer's table: every element of the model once, with the owner that really updates it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steptron.config.loader import load
from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import LogicalMatrix, ModelSpec, ParameterRole, ParameterSpec
from steptron.model.parameter_shards import Place, shard
from steptron.optim import ownership
from steptron.optim.buffer_plan import plan_buffers
from steptron.optim.ownership import Reduction
from steptron.optim.table import BufferSummary, Holding, console_lines, holding, merge
from steptron.parallel.mesh import build_mesh
from steptron.train.ownership import report_ownership
from steptron.train.step import TrainStep
from tests.parallel.layouts import NANO
from tests.worker_pool import WorkerPool

LAST_STAGE = ("layers.5", "layers.6", "layers.7", "layers.8", "mtp", "head", "final_norm")
Owned = dict[str, list[tuple[int, int]]]
LAYOUTS = {
    "DP2": (2, []),
    "EP2xDP2": (4, ["parallel.expert=2"]),
    "PP2xDP2": (4, ["parallel.pipeline=2", "optimizer.roles={norm: {decay: false}, router: {optimizer: muon}}"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.mtp.depths=2"]),
    "TP2xDP2": (4, ["parallel.tensor=2", "model.vocab_size=511", "optimizer.roles={norm: {lr_multiplier: 0.5}}"]),
    "AdamW, DP4 on 2 nodes": (4, ["optimizer.name=adamw", "parallel.node_size=2"]),
    "frozen router": (2, ["balance.freeze_router=true", "loss.mtp_train_depths=0"]),
}


@pytest.fixture(autouse=True)
def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells to the element, so that small numbers show what is meant."""
    monkeypatch.setattr(ownership, "ALIGNMENT", 1)


def tabulate(
    rank: int, world_size: int, overrides: list[str], output: str
) -> tuple[str | None, ModelSpec, Owned, bool]:
    """The table in short; the model; which runs of which stored parameters this rank updates; whether the table came
    before there were gradients."""
    config = load(NANO, ["optimizer.name=muon", f"train.output={output}", *overrides]).config
    mesh = build_mesh(config.parallel)
    text, early = [], []

    def report(chunks: object, plans: object) -> None:
        early.append(not any(hasattr(parameter, "main_grad") for _, parameter in chunks.named_parameters()))  # type: ignore[attr-defined]
        text.append(report_ownership(config, chunks, plans, mesh))  # type: ignore[arg-type]

    train = TrainStep(config, mesh, torch.device("cpu"), before_buffers=report)
    owned: Owned = defaultdict(list)
    for piece in train.sharded.owned:
        owned[piece.piece.shard.parameter.name].append((piece.piece.start, piece.piece.stop))
    return text[0], train.spec, dict(owned), early[0]


def read(path: Path) -> list[dict[str, str]]:
    head, *lines = path.read_text().splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_in_the_table_once_with_its_owner(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    results = pool.run(world_size, tabulate, overrides, str(tmp_path))
    assert all(text is None for text, *_ in results[1:]) and all(early for *_, early in results)
    spec = results[0][1]
    rows = read(tmp_path / "parameters.tsv")
    roles = {matrix.name: matrix.role.value for p in spec.parameters() for matrix in p.matrices}
    runs: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    of_owner: dict[int, int] = defaultdict(int)
    for row in rows:
        assert row["role"] == roles[row["matrix"].partition("[")[0]]
        start, stop = map(int, row["owned"].split(":"))
        runs[row["matrix"], row["held"], row["copy"]].append((start, stop))
        if row["owner"] != "-":
            of_owner[int(row["owner"])] += stop - start
    covered: dict[str, int] = defaultdict(int)
    for (matrix, _, copy), parts in runs.items():
        border = 0
        for start, stop in sorted(parts):
            assert start == border, f"{matrix} has a gap or an overlap at {border}"
            border = stop
        if copy == "-":
            covered[matrix.partition("[")[0]] += border
    sizes = {m.name: math.prod(p.matrix_shape(m)) for p in spec.parameters() for m in p.matrices}
    assert covered == sizes
    # Rows that fill a vocabulary up have an owner too, and are in no matrix: here one of 64 numbers in each of three.
    updated = [sum(stop - start for runs in owned.values() for start, stop in runs) for _, _, owned, _ in results]
    fill = sum(updated[rank] - of_owner[rank] for rank in range(world_size))
    assert fill == (3 * 64 if "model.vocab_size=511" in overrides else 0)


def test_owners_are_global_ranks_and_rules_are_the_roles(pool: WorkerPool, tmp_path: Path) -> None:
    """PP2xDP2: stage 1 is on ranks 2 and 3; the embedding that MTP has on the last stage is a copy."""
    world_size, overrides = LAYOUTS["PP2xDP2"]
    pool.run(world_size, tabulate, overrides, str(tmp_path))
    rows = read(tmp_path / "parameters.tsv")
    for row in rows:
        last_stage = row["copy"] == "copy" or row["matrix"].startswith(LAST_STAGE)
        if row["owner"] != "-":
            assert (int(row["owner"]) >= 2) == last_stage, row
        if row["role"] == "router_bias":
            assert (row["optimizer"], row["owner"], row["weight_decay"]) == ("bias update", "-", "-")
        elif row["role"] == "norm":
            assert (row["optimizer"], row["weight_decay"]) == ("adamw", "0")
        elif row["role"] in ("embedding", "head"):
            assert (row["optimizer"], row["weight_decay"]) == ("adamw", "0.1")
        else:
            assert (row["optimizer"], row["weight_decay"]) == ("muon", "0.1")
    assert {row["copy"] for row in rows if row["matrix"] == "embedding.weight"} == {"-", "copy"}


@pytest.mark.parametrize("name", ["EP2xDP2", "PP2xVPP2", "AdamW, DP4 on 2 nodes"])
def test_owners_have_what_the_table_says(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Where nodes are factored, cells are not in the order of ranks."""
    world_size, overrides = LAYOUTS[name]
    results = pool.run(world_size, tabulate, overrides, str(tmp_path))
    stored = {matrix.name: (p, matrix) for p in results[0][1].parameters() for matrix in p.matrices}
    local_experts = 4 if "parallel.expert=2" in overrides else 8
    owners = set()
    for row in read(tmp_path / "parameters.tsv"):
        if row["owner"] == "-":
            continue
        matrix, _, expert = row["matrix"].rstrip("]").partition("[")
        parameter, logical = stored[matrix]
        columns = math.prod(parameter.shape[2:] if parameter.is_expert else parameter.shape[1:])
        first = logical.rows[0] + (int(expert) % local_experts * parameter.shape[1] if expert else 0)
        start, stop = (first * columns + int(border) for border in row["owned"].split(":"))
        owned = results[int(row["owner"])][2][parameter.name]
        assert any(low <= start and stop <= high for low, high in owned), row
        owners.add(row["owner"])
    assert len(owners) == world_size


def test_what_is_not_trained_is_in_the_table_too(pool: WorkerPool, tmp_path: Path) -> None:
    world_size, overrides = LAYOUTS["frozen router"]
    (text, *_), _ = pool.run(world_size, tabulate, overrides, str(tmp_path))
    rows = read(tmp_path / "parameters.tsv")
    frozen = {row["matrix"] for row in rows if row["optimizer"] == "frozen"}
    assert {row["matrix"] for row in rows if row["role"] == "router"} <= frozen
    assert {name for name in frozen if name.startswith("mtp.0")} == {
        row["matrix"] for row in rows if row["matrix"].startswith("mtp.")
    }
    assert any(line.split()[0] == "frozen" and str(len(frozen)) in line for line in text.splitlines())


# ----------------------------------------------------------------------------------------- console


def one(name: str, shape: tuple[int, ...], role: ParameterRole, rows: tuple[int, int] | None = None) -> ParameterSpec:
    return ParameterSpec(
        name, shape, (LogicalMatrix(name, role, rows or (0, shape[-2] if len(shape) == 3 else shape[0])),)
    )


PARAMETERS = [
    one("layers.0.ffn.gate.weight", (20, 8), ParameterRole.FFN_GATE),
    one("layers.0.ffn.up.weight", (20, 8), ParameterRole.FFN_UP),
    one("layers.0.norm.weight", (8,), ParameterRole.NORM),
    one("layers.1.ffn.experts.down_projection", (10, 8, 4), ParameterRole.EXPERT_DOWN),
    one("layers.2.ffn.up.weight", (24, 8), ParameterRole.FFN_UP),
]


def plain_holding(ranks: int, **sharding: object) -> Holding:
    config = OptimizerConfig(lr=1.0, roles={"norm": {"lr_multiplier": 0.5}}, sharding=sharding)  # type: ignore[arg-type]
    shards = [shard(parameter, Place()) for parameter in PARAMETERS]
    sizes = {"dp_cp": ranks, "expt_dp": ranks}
    plans = plan_buffers(shards, config, 1, sizes)
    return holding(plans, {name: range(ranks) for name in sizes}, element_size=2)


def test_lines_by_role_and_buffer() -> None:
    """Ten experts on four ranks: cells for twelve. 20, 20 and 24 rows of eight on four: cells of 24 rows, 50 % more."""
    assert console_lines(plain_holding(4)) == [
        "updated by  role         matrices  shapes      decay  lr x",
        "muon        ffn_gate     1         20x8        0.1    1",
        "muon        ffn_up       2         20x8, 24x8  0.1    1",
        "muon        expert_down  10        8x4         0.1    1",
        "adamw       norm         1         8           0.1    0.5",
        "buffers  gradients of      over               elements  added up by     padding",
        "1        matrices          4 ranks (dp_cp)    512       all_reduce      none (reduce_scatter: 50 %)",
        "1        matrices          4 ranks (expt_dp)  320       all_reduce      none (reduce_scatter: 20 %)",
        "1        other parameters  4 ranks (dp_cp)    8         reduce_scatter  none",
    ]


def test_lines_for_buffers_that_are_alike() -> None:
    """Two stages whose buffers differ in size, the second one's padded more."""
    first = BufferSummary("matrices over expt_dp", 0, 8, Reduction.REDUCE_SCATTER, 3 << 18, 1 << 16, 1 / 12, 6)
    second = replace(first, first_rank=8, elements=1 << 18, padding=1 << 17, scattered_padding=0.5)
    (line,) = (line for line in console_lines(Holding((), (first, second))) if line.startswith("2"))
    assert line == (
        "2        matrices      8 ranks (expt_dp)  262,144 to 786,432  reduce_scatter  8.33 to 50 %, 0.375 to 0.75 MiB"
    )


def test_padding_is_in_elements_and_in_memory_of_gradient_and_parameter() -> None:
    whole = plain_holding(4, max_padding=0.2)
    (experts,) = (buffer for buffer in whole.buffers if "expt_dp" in buffer.title)
    assert (experts.elements, experts.padding, experts.scattered_padding) == (320, 64, 0.2)
    assert experts.bytes_per_element == 4 + 2  # fp32 gradient, bf16 parameter
    (dense,) = (buffer for buffer in whole.buffers if buffer.title == "matrices over dp_cp")
    assert (dense.elements, dense.padding, dense.scattered_padding) == (512, 0, 0.5)
    assert dense.bytes_per_element == 4


def test_what_ranks_share_is_taken_once() -> None:
    whole = plain_holding(4)
    assert merge([whole, whole]) == whole
