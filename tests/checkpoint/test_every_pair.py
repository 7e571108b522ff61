"""Every pair of ten layouts: what one writes the other loads bit by bit, and trains on with the same losses.

A layout's model is built once in each precision; it loads the checkpoints of all layouts in turn, compares them where
they lie, and trains on from each in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from steptron.checkpoint import loading, saving
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.train.step import TrainStep
from tests.checkpoint.states import BF16, MUON, PROGRESS, State, assembled, configuration, forget, state_of, stored
from tests.parallel.layouts import make_batches
from tests.worker_pool import WorkerPool

LAYOUTS = {
    "one process": (1, []),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP4": (4, ["parallel.pipeline=4"]),
    "EP2": (2, ["parallel.expert=2"]),
    "EP4": (4, ["parallel.expert=4"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "DP2": (2, []),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
}
HALF_OF_NANO = ["model.num_layers=5", "model.num_dense_layers=1", "model.clamp={routed: {4: 1.0}, shared: {4: 1.0}}"]
"""A dense layer, three sliding ones and a full one with experts, and an MTP depth: half as many tensors to read."""
EXACT = "optimizer.muon.precision=fp32"
"""In fp16, Muon's own precision, a last bit of a gradient may come out as 1e-3 of an update."""
PRECISIONS = {"fp32": [*HALF_OF_NANO, MUON, EXACT], "bf16": [*HALF_OF_NANO, MUON, BF16]}
KINDS = {"momentum", "exp_avg", "exp_avg_sq"}
"""Of optimizer state; and "master", fp32 weights, under bf16."""
NEXT_STEPS = 3


@dataclass(frozen=True)
class Loaded:
    """What one rank found after it had loaded a checkpoint.

    Attributes:
        different: keys of parts that are not what the checkpoint holds.
        sizes: elements of this rank by key: of parameters those that it holds, of optimizer state those that it owns.
        losses: total losses of the next steps; none in bf16.
    """

    different: list[str]
    sizes: dict[str, int]
    losses: list[float]


def next_losses(train: TrainStep, mesh: Mesh) -> list[float]:
    losses = []
    for step in range(NEXT_STEPS):
        batches = make_batches(seed=1 + step)[mesh.data_rank :: mesh.data_size]
        losses.append(train.run(batches, 1e-3, 1e-3).observed.losses.total)
    return losses


def save_both(rank: int, world_size: int, folder: Path, layout: Sequence[str]) -> tuple[dict[str, State], list[float]]:
    """A run of two steps and its checkpoint in each precision: what was saved on this rank, by precision, and the
    losses of the next steps in float32."""
    mesh = build_mesh(configuration(folder, layout).parallel)
    saved, losses = {}, []
    for precision, settings in PRECISIONS.items():
        config = configuration(folder / precision, [*layout, *settings])
        train = TrainStep(config, mesh, torch.device("cpu"))
        for _ in range(PROGRESS.step):
            train.run(make_batches()[mesh.data_rank :: mesh.data_size], 1e-2, 1e-3)
        saving.save(config, PROGRESS, ["hash"], train.chunks, train.optimizer, mesh)
        saved[precision] = state_of(train)
        if precision == "fp32":
            losses = next_losses(train, mesh)
    return saved, losses


def load_all(rank: int, world_size: int, root: Path, layout: Sequence[str]) -> dict[tuple[str, str], Loaded]:
    """Loads every layout's checkpoints, by (layout, precision)."""
    mesh = build_mesh(configuration(root, layout).parallel)
    found = {}
    for precision, settings in PRECISIONS.items():
        train = TrainStep(configuration(root, [*layout, *settings]), mesh, torch.device("cpu"))
        for name in LAYOUTS:
            forget(train)
            folder = root / name / precision
            progress = loading.load(folder / "checkpoints" / "step_00000002", train.chunks, train.optimizer, mesh)
            assert (progress, train.optimizer.num_steps) == (PROGRESS, PROGRESS.step)
            expected = torch.load(folder / "expected.pt", mmap=True)
            different, sizes = compare(state_of(train), expected)
            found[name, precision] = Loaded(different, sizes, next_losses(train, mesh) if precision == "fp32" else [])
    return found


def compare(state: State, expected: dict[str, torch.Tensor]) -> tuple[list[str], dict[str, int]]:
    """Keys of what differs, and how many elements were there; NaN is what another rank owns."""
    different, sizes = [], {}
    for key, part in state.items():
        length = part.tensor.shape[part.axis]
        whole = expected[key].narrow(part.axis, part.index * length, length)
        here = ~part.tensor.isnan()
        if whole.dtype != part.tensor.dtype or not torch.equal(whole[here], part.tensor[here]):
            different.append(key)
        sizes[key] = int(here.sum())
    return different, sizes


@pytest.fixture(scope="module")
def written(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Checkpoints of all layouts, whose files hold what was in memory by torch's own reader; the writers' losses."""
    root, losses = tmp_path_factory.mktemp("runs"), {}
    for name, (world_size, layout) in LAYOUTS.items():
        answers = pool.run(world_size, save_both, root / name, layout)
        losses[name] = answers[0][1]
        for precision in PRECISIONS:
            saved = assembled([states[precision] for states, _ in answers])
            folder = root / name / precision
            files = stored(folder / "checkpoints" / "step_00000002")
            assert files.keys() == saved.keys()
            assert [key for key in saved if not torch.equal(saved[key], files[key])] == [], (name, precision)
            kinds = {key.split(".")[1] for key in files if key.startswith("optimizer.")}
            assert kinds == (KINDS | {"master"} if precision == "bf16" else KINDS)
            assert all(tensor.count_nonzero() > 0 for key, tensor in files.items() if key.startswith("optimizer."))
            torch.save(files, folder / "expected.pt")
    return root, losses


@pytest.mark.parametrize("target", LAYOUTS)
def test_it_loads_what_every_layout_wrote(
    pool: WorkerPool, written: tuple[Path, dict[str, list[float]]], target: str
) -> None:
    root, losses = written
    world_size, layout = LAYOUTS[target]
    answers = pool.run(world_size, load_all, root, layout)
    for (source, precision), first in answers[0].items():
        ranks = [answer[source, precision] for answer in answers]
        case = f"{source} -> {target}, {precision}"
        assert [key for rank in ranks for key in rank.different] == [], case
        expected = torch.load(root / source / precision / "expected.pt", mmap=True)
        assert {key for rank in ranks for key in rank.sizes} == expected.keys(), case
        for key, tensor in expected.items():
            sizes = [rank.sizes[key] for rank in ranks if key in rank.sizes]
            if key.startswith("optimizer.") and not key.endswith(".embedding.weight"):
                assert sum(sizes) == tensor.numel(), f"{case}: {key}"  # every element has one owner
            else:
                assert sum(sizes) >= tensor.numel(), f"{case}: {key}"
        if precision == "fp32":
            assert first.losses == pytest.approx(losses[source], rel=0, abs=1e-5), case
