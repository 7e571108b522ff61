"""Every layout computes what one process computes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.layouts import Outcome, assemble
from tests.worker_pool import WorkerPool

LAYOUTS = {
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP4": (4, ["parallel.pipeline=4"]),
    "EP2": (2, ["parallel.expert=2"]),
    "EP2 allgather": (2, ["parallel.expert=2", "parallel.dispatcher=allgather"]),
    "EP4": (4, ["parallel.expert=4"]),
    "EP4 allgather": (4, ["parallel.expert=4", "parallel.dispatcher=allgather"]),
    "DP2": (2, []),
    "DP4": (4, []),
    "PP2xDP2": (4, ["parallel.pipeline=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "DP2xEP2": (4, ["parallel.expert=2"]),
}
SEED = "train.seed=10"
"""Leaves the smallest gap between selected and rejected experts near 4e-6 in all steps of both optimizers."""
SGD = [SEED, "optimizer.name=sgd", "optimizer.clip_grad_norm=1.0"]
ADAMW = [SEED, "optimizer.name=adamw", "optimizer.clip_grad_norm=0.5"]
STEPS = 3
EMBEDDING = "embedding.weight"
"""Used by the first stage and, for MTP, by the last: its gradient is added up in another order."""


@functools.cache
def one_process(pool: WorkerPool, optimizer: tuple[str, ...]) -> Outcome:
    (outcome,) = pool.run(1, layouts.run, list(optimizer), STEPS)
    assert outcome.smallest_gap > layouts.NEAR_TIE, "this seed has a routing near-tie: choose another"
    return outcome


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("optimizer, tolerance", [(SGD, 1e-5), (ADAMW, 1e-4)], ids=["sgd", "adamw"])
def test_layout_gives_the_numbers_of_one_process(
    pool: WorkerPool, name: str, optimizer: list[str], tolerance: float
) -> None:
    world_size, overrides = LAYOUTS[name]
    reference = one_process(pool, tuple(optimizer))
    outcomes = pool.run(world_size, layouts.run, [*overrides, *optimizer], STEPS)

    _assert_close(assemble([o.gradients for o in outcomes]), assemble([reference.gradients]), 2e-6)
    _assert_close(assemble([o.parameters for o in outcomes]), assemble([reference.parameters]), tolerance)
    for outcome in outcomes:
        assert outcome.smallest_gap > layouts.NEAR_TIE
        for own, expected in zip(outcome.losses, reference.losses, strict=True):
            for a, b in zip(
                (own.lm, *own.mtp, own.ep, own.total),
                (expected.lm, *expected.mtp, expected.ep, expected.total),
                strict=True,
            ):
                assert math.isclose(a, b, rel_tol=1e-6)
        for own_counts, expected_counts in zip(outcome.tokens_per_expert, reference.tokens_per_expert, strict=True):
            assert torch.equal(own_counts, expected_counts)
        assert outcome.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-6)
        assert min(outcome.gradient_norms) > 1.0, "clipping must act"


@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_is_bit_identical(pool: WorkerPool, stages: int) -> None:
    """Stages run the same operations in the same order; only the embedding that MTP shares is excepted,
    and with it everything after the first update, so that MTP is off here."""
    alone = ["loss.mtp_train_depths=0", "model.mtp.depths=0", "optimizer.clip_grad_norm=0"]
    (reference,) = pool.run(1, layouts.run, alone, STEPS)
    outcomes = pool.run(stages, layouts.run, [*alone, f"parallel.pipeline={stages}"], STEPS)
    for kind in ("gradients", "parameters"):
        own, expected = assemble([getattr(o, kind) for o in outcomes]), assemble([getattr(reference, kind)])
        assert own.keys() == expected.keys()
        assert [name for name in own if not torch.equal(own[name], expected[name])] == []
    for outcome in outcomes:
        assert [losses.lm for losses in outcome.losses] == [losses.lm for losses in reference.losses]
        # The mean over layers is added up stage by stage, in float64.
        for own_losses, expected_losses in zip(outcome.losses, reference.losses, strict=True):
            assert math.isclose(own_losses.ep, expected_losses.ep, rel_tol=1e-14)


@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_with_mtp_is_bit_identical_but_for_the_embedding(pool: WorkerPool, stages: int) -> None:
    reference = one_process(pool, tuple(SGD))
    outcomes = pool.run(stages, layouts.run, [f"parallel.pipeline={stages}", *SGD], 0)
    own, expected = assemble([o.gradients for o in outcomes]), assemble([reference.gradients])
    assert {name for name in own if not torch.equal(own[name], expected[name])} <= {EMBEDDING}


def test_cutting_the_batch_differently_changes_rounding_only(pool: WorkerPool) -> None:
    """Without the EP term, which is defined per micro-batch."""
    off = ["balance.ep_loss_coefficient=0", *SGD]
    batches = layouts.make_batches()
    whole = type(batches[0])(
        *(torch.cat([getattr(b, field) for b in batches]) for field in batches[0].__dataclass_fields__)
    )
    (cut,) = pool.run(1, layouts.run, off, 1, batches)
    (uncut,) = pool.run(1, layouts.run, off, 1, [whole])
    _assert_close(assemble([cut.gradients]), assemble([uncut.gradients]), 2e-6)
    assert math.isclose(cut.losses[0].lm, uncut.losses[0].lm, rel_tol=1e-6)
    assert math.isclose(cut.losses[0].mtp[0], uncut.losses[0].mtp[0], rel_tol=1e-6)
    assert not math.isclose(cut.losses[0].ep, uncut.losses[0].ep, rel_tol=1e-6)


def _assert_close(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert own.keys() == expected.keys()
    worst = {
        name: float((own[name] - expected[name]).double().norm() / expected[name].double().norm().clamp(min=1e-30))
        for name in own
    }
    beyond = {name: error for name, error in worst.items() if error > tolerance}
    assert not beyond, f"relative errors above {tolerance}: {beyond}"
