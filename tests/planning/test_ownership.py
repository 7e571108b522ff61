"""Ownership in figures: bytes against the theory, padding of the released model, owners' balance."""

from __future__ import annotations

import pytest

from benchmarks import layouts, ownership
from steptron.config.loader import load
from steptron.optim.ownership import Reduction
from steptron.optim.rules import Algorithm
from steptron.planning.ownership import cells_of, figures_of, muon_batches, owned_pieces, rank_buffers
from steptron.planning.placement import placement
from steptron.train.step import TrainStep
from tests.planning.layouts import CONFIGS, EVEN, WORLD_SIZE, report
from tests.worker_pool import WorkerPool

SHORT = ("data.sequence_length=32", "train.global_batch_size=4")


@pytest.mark.parametrize("name", ["DP2", "DP4, 6 experts"])
def test_bytes_per_expert_parameter(pool: WorkerPool, name: str) -> None:
    """Counted in the collectives: as the theory says, and what reduce-scattering saves."""
    chosen, reduced = (
        ownership.mean_scheme(layout, pool.run(layout.world_size, layouts.count, [*SHORT, *layout.overrides]))
        for layout in ownership.both(name).values()
    )
    for own in (chosen, reduced):
        assert own.counted == pytest.approx(own.theory, rel=1e-12)
    padding = {"DP2": 1.0, "DP4, 6 experts": 128 / 126}[name]
    assert chosen.counted / reduced.counted == pytest.approx((4 + 4) * padding / (8 + 4))


@pytest.mark.parametrize(
    ("overrides", "padded", "largest", "in_all"),
    [
        # By pipeline rank the MoE layers are 2, 6, 7, 7, 7, 5, 6 and 2; 108 matrices each, for 64 owners.
        ((), [256, 704, 768, 768, 768, 576, 704, 256], 56 / 648, 264 / 4536),
        # As even as possible they are 4, 5, 6, 6, 6, 5, 5 and 5: 3.7 to 8.6 %, and 7.2 % in all.
        (EVEN, [448, 576, 704, 704, 704, 576, 576, 576], 56 / 648, 328 / 4536),
    ],
    ids=["as configured", "even"],
)
def test_expert_padding_of_the_released_model(
    overrides: tuple[str, ...], padded: list[int], largest: float, in_all: float
) -> None:
    """At most 9 % on every stage with four MoE layers or more, and in all; stages with fewer are all-reduced."""
    matrix = 1280 * 4096
    stages = ownership.flash(overrides)
    assert [(stage.parameters + stage.scattered_padding) // matrix for stage in stages] == padded
    for stage in stages:
        assert stage.parameters == stage.layers * 108 * matrix
        if stage.layers >= ownership.MANY_LAYERS:
            assert stage.padding == stage.scattered_padding <= ownership.MAX_PADDING * stage.parameters
        else:
            assert stage.padding == 0
        assert stage.chosen.counted == pytest.approx(stage.chosen.theory, rel=1e-12)
        assert stage.all_reduced.counted == pytest.approx(63 / 64 * 10, rel=1e-12)
    size = sum(stage.parameters for stage in stages)
    shares = [stage.scattered_padding / stage.parameters for stage in stages if stage.layers >= ownership.MANY_LAYERS]
    assert max(shares) == pytest.approx(largest)
    assert sum(stage.scattered_padding for stage in stages) / size == pytest.approx(in_all)
    assert in_all <= ownership.MAX_PADDING
    assert ownership.total_bytes(stages)[0] < 0.72 * ownership.total_bytes(stages)[1]


def test_buffers_in_figures() -> None:
    """Of stage 0: 216 experts' matrices on 64 ranks would leave 40 places empty, 18.5 %; others have 28 matrices."""
    config = report()
    figures = {
        f.title: f
        for f in (figures_of(b, config.optimizer) for b in rank_buffers(config, placement(config, WORLD_SIZE), 0))
    }
    experts = figures["matrices over expt_dp"]
    assert (experts.ranks, experts.reduction, experts.padding) == (64, Reduction.ALL_REDUCE, 0)
    assert experts.scattered_padding == 40 * 1280 * 4096
    assert experts.imbalance == pytest.approx(4 / (216 / 64))
    others = figures["matrices over dp_cp"]
    assert (others.ranks, others.reduction, others.padding) == (512, Reduction.ALL_REDUCE, 0)
    assert others.scattered_padding > 40 * others.parameters
    embedding = figures["shared embedding over dp_cp"]
    assert (embedding.reduction, embedding.parameters, embedding.imbalance) == (
        Reduction.REDUCE_SCATTER,
        128896 * 4096,
        None,
    )
    allowed = report("optimizer.sharding.max_padding=0.2")
    (experts,) = (
        f
        for f in (figures_of(b, allowed.optimizer) for b in rank_buffers(allowed, placement(allowed, WORLD_SIZE), 0))
        if f.group == "expt_dp"
    )
    assert (experts.reduction, experts.padding) == (Reduction.REDUCE_SCATTER, 40 * 1280 * 4096)


def test_owners_are_balanced_by_the_work_of_orthogonalising() -> None:
    """Nano's dense matrices on two ranks: unequal costs, and the busiest within 10 % of the mean."""
    config = load(CONFIGS / "pretrain" / "nano.yaml", ["optimizer.name=muon"]).config
    for buffer in rank_buffers(config, placement(config, 2), 0):
        if buffer.holds_matrices:
            imbalance = figures_of(buffer, config.optimizer).imbalance
            assert imbalance is not None and 1 <= imbalance < 1.1


def test_cells_by_node() -> None:
    assert cells_of((4, 6, 8), None) == {4: 0, 6: 1, 8: 2}
    # The first members of both nodes own the first two cells.
    assert cells_of((0, 1, 2, 4, 5, 6), 4) == {0: 0, 4: 1, 1: 2, 5: 3, 2: 4, 6: 5}
    assert cells_of((0, 4, 8), 4) == {0: 0, 4: 1, 8: 2}


@pytest.mark.parametrize("others", [["train.deterministic=true"], ["optimizer.muon.batch_elements=5000"]], ids=str)
def test_muon_batches_are_those_of_the_optimizer(pool: WorkerPool, others: list[str]) -> None:
    overrides = ["parallel.tensor=2", *others]
    config = layouts.configuration(2, overrides)
    place = placement(config, 2)
    for rank, real in enumerate(pool.run(2, batches_of_the_optimizer, overrides)):
        owned = owned_pieces(config, place, rank, rank_buffers(config, place, rank))
        batches = muon_batches(owned, config.optimizer, config.train.deterministic)
        assert [(len(batch.indices), batch.size) for batch in batches] == real
        assert sum(len(batch.indices) for batch in batches) == sum(
            piece.rule.algorithm is Algorithm.MUON for piece in owned
        )


def batches_of_the_optimizer(rank: int, world_size: int, overrides: list[str]) -> list[tuple[int, int]]:
    """Matrices and size of every batch of a training's Muon."""
    import torch

    from steptron.optim.combined import Combined
    from steptron.optim.muon import Muon
    from steptron.parallel.mesh import build_mesh

    config = layouts.configuration(world_size, overrides)
    step = TrainStep(config, build_mesh(config.parallel), torch.device("cpu"))
    assert isinstance(step.optimizer, Combined)
    (muon,) = (member for member in step.optimizer.members if isinstance(member, Muon))
    return [(len(batch.indices), batch.size) for batch in muon._batches]
