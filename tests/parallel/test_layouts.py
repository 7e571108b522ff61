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
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "PP4xVPP2": (4, ["parallel.pipeline=4", "parallel.virtual_pipeline=2"]),
    "PP4, uneven and empty": (4, ["parallel.pipeline=4", "parallel.pipeline_layout=Et|ttttttt||tmL"]),
    "PP2xVPP2, uneven and empty": (
        2,
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layout=Ettt||tttttt|mL"],
    ),
    "EP2": (2, ["parallel.expert=2"]),
    "EP2 allgather": (2, ["parallel.expert=2", "parallel.dispatcher=allgather"]),
    "EP4": (4, ["parallel.expert=4"]),
    "EP4 allgather": (4, ["parallel.expert=4", "parallel.dispatcher=allgather"]),
    "DP2": (2, []),
    "DP4": (4, []),
    "DP4 by nodes": (4, ["parallel.node_size=2"]),
    "DP2xEP2": (4, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "CP4": (4, ["parallel.context=4"]),
    "PP2xDP2": (4, ["parallel.pipeline=2"]),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "PP2xTP2": (4, ["parallel.pipeline=2", "parallel.tensor=2"]),
    "PP2xVPP2xCP2": (4, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.context=2"]),
    "TP2xEP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "TP2xEP2 allgather": (2, ["parallel.tensor=2", "parallel.expert=2", "parallel.dispatcher=allgather"]),
    "TP2 attention, EP4 experts": (4, ["parallel.tensor=2", "parallel.expert=4"]),
    "CP2xEP2": (2, ["parallel.context=2", "parallel.expert=2"]),
    "CP2xTP2": (4, ["parallel.context=2", "parallel.tensor=2"]),
    "CP2xTP2, EP4 experts": (4, ["parallel.context=2", "parallel.tensor=2", "parallel.expert=4"]),
    "DP2xTP2, EP2 experts": (4, ["parallel.tensor=2", "parallel.expert=2"]),
}
PIPELINES = ["PP2", "PP4", "PP2xVPP2", "PP4xVPP2", "PP4, uneven and empty", "PP2xVPP2, uneven and empty"]
WITH_ADAMW = ["PP4xVPP2", "EP4", "DP2xEP2", "TP2", "CP4", "PP2xTP2", "TP2 attention, EP4 experts", "CP2xEP2"]
ON_PYTHON_312 = ["PP2xVPP2", "CP4", "TP2 attention, EP4 experts", "CP2xTP2, EP4 experts"]
"""Also run with Megatron-Core 0.19.2, by ``make test-py312``."""
RECOMPUTE = (
    "train.recompute=[{layers: all, parts: [norm, activation, moe_permutation]}, {layers: full, parts: [attention]}, "
    "{layers: '5-6', parts: [ffn]}, {layers: mtp, parts: [attention, ffn]}]"
)
SEED = "train.seed=10"
"""Leaves the smallest gap between selected and rejected experts near 4e-6 in all steps of both optimizers."""
SGD = [SEED, "optimizer.name=sgd", "optimizer.clip_grad_norm=1.0"]
ADAMW = [SEED, "optimizer.name=adamw", "optimizer.clip_grad_norm=0.5"]
STEPS = 2
EMBEDDING = "embedding.weight"
"""Used by the first stage and, for MTP, by the last: its gradient is added up in another order."""


@functools.cache
def one_process(pool: WorkerPool, optimizer: tuple[str, ...], steps: int = STEPS) -> Outcome:
    (outcome,) = pool.run(1, layouts.run, list(optimizer), steps)
    assert outcome.smallest_gap > layouts.NEAR_TIE, "this seed has a routing near-tie: choose another"
    assert min(outcome.gradient_norms, default=2.0) > 1.0, "clipping must act"
    return outcome


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.py312] if name in ON_PYTHON_312 else []) for name in LAYOUTS]
)
def test_layout_gives_the_numbers_of_one_process(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, layouts.run, [*overrides, *SGD], STEPS)
    _assert_same_numbers(outcomes, one_process(pool, tuple(SGD)), 1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_with_recomputation(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, layouts.run, [*overrides, RECOMPUTE, *SGD], 0)
    _assert_same_numbers(outcomes, one_process(pool, tuple(SGD), 0), 0.0)


@pytest.mark.parametrize("name", WITH_ADAMW)
def test_layout_gives_the_numbers_of_one_process_with_adamw(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, layouts.run, [*overrides, *ADAMW], STEPS)
    _assert_same_numbers(outcomes, one_process(pool, tuple(ADAMW)), 1e-4)


@pytest.mark.parametrize("name", ["CP2xTP2, EP4 experts", "PP2xVPP2xCP2", "DP4 by nodes", "DP2xTP2, EP2 experts"])
def test_many_small_buckets(pool: WorkerPool, name: str) -> None:
    """Reductions then start while the backward still communicates in other groups."""
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, layouts.run, [*overrides, RECOMPUTE, *SGD], 0, None, 3000)
    _assert_same_numbers(outcomes, one_process(pool, tuple(SGD), 0), 0.0)


OTHER_MODELS = {
    "sinks, three MTP depths of which two train, post-norm chain, shared head": [
        "model.layout=S3F1+heads+gate+sink",
        "model.mtp={depths: 3, chain: post_norm, head: shared}",
        "loss.mtp_train_depths=2",
        "train.seed=11",
    ],
    "a vocabulary that does not divide": ["model.vocab_size=513", "model.mtp.depths=2", "loss.mtp_train_depths=2"],
    "full attention, a frozen router, experts everywhere": [
        "model.layout=FFFF",
        "model.num_dense_layers=0",
        "balance.freeze_router=true",
        "train.seed=12",
    ],
}


@pytest.mark.parametrize("name", ["TP2", "CP4", "PP2xVPP2xCP2", "CP2xTP2, EP4 experts"])
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_models(pool: WorkerPool, model: str, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    settings = [*SGD, *OTHER_MODELS[model]]
    outcomes = pool.run(world_size, layouts.run, [*overrides, *settings], 0)
    _assert_same_numbers(outcomes, one_process(pool, tuple(settings), 0), 0.0)


@pytest.mark.parametrize("name", ["TP2", "CP4", "PP2xVPP2xCP2", "TP2xEP2 allgather"])
def test_bf16_is_as_close_to_fp32_as_on_one_process(pool: WorkerPool, name: str) -> None:
    """Without experts, whose selection a rounding may change; replicas are bit-equal."""
    settings = [
        *SGD,
        "model.num_dense_layers=9",
        "model.clamp={routed: {}, shared: {8: 1.5}}",
        "balance.ep_groups=null",
    ]
    world_size, overrides = LAYOUTS[name]
    overrides = [override for override in overrides if "expert" not in override and "dispatcher" not in override]
    (exact,) = pool.run(1, layouts.run, settings, 0)
    narrow = [*settings, "train.precision=bf16"]
    (alone,) = pool.run(1, layouts.run, narrow, 0)
    expected, one = assemble([exact.gradients]), assemble([alone.gradients])
    own = assemble([outcome.gradients for outcome in pool.run(world_size, layouts.run, [*overrides, *narrow], 0)])
    distances = {
        name: [float((gradients[name].float() - expected[name]).norm()) for gradients in (own, one)] for name in own
    }
    assert {name: pair for name, pair in distances.items() if pair[0] > 2 * pair[1] + 1e-6} == {}


def test_recomputation_is_bit_identical(pool: WorkerPool) -> None:
    (outcome,) = pool.run(1, layouts.run, [RECOMPUTE, *SGD], STEPS)
    _assert_identical([outcome], one_process(pool, tuple(SGD)))


BORDERS = {
    "inside a window and a document": (2, [[48], [48]]),
    "between documents": (3, [[6, 6, 12, 12, 6, 6], [24, 24]]),
    "a token after and before the border": (0, [[7, 4, 13, 11, 8, 5], [23, 2, 23]]),
    "on padding": (0, [[15], [20, 3]]),
    "a rank with nothing but padding": (1, [[5], [3]]),
}
"""Seed of the tokens (no routing near-ties) and lengths of the documents of each row of 48 tokens; what is left is
padding. Shards of CP2 and CP4 begin at multiples of 12 and 6, those of TP2 at 24."""


@pytest.mark.parametrize("name", ["CP2", "CP4", "TP2", "CP2xTP2, EP4 experts"])
@pytest.mark.parametrize("border", BORDERS)
def test_shard_borders_fall_anywhere(pool: WorkerPool, name: str, border: str) -> None:
    batches = layouts.batches_of_documents(*BORDERS[border])
    (reference,) = pool.run(1, layouts.run, SGD, 0, batches)
    assert reference.smallest_gap > layouts.NEAR_TIE
    world_size, overrides = LAYOUTS[name]
    _assert_same_numbers(pool.run(world_size, layouts.run, [*overrides, *SGD], 0, batches), reference, 0.0)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_is_bit_identical(pool: WorkerPool, name: str) -> None:
    """Stages run the same operations in the same order; only the embedding that MTP shares is excepted,
    and with it everything after the first update, so that MTP is off here."""
    alone = ["loss.mtp_train_depths=0", "model.mtp.depths=0", "optimizer.clip_grad_norm=0"]
    world_size, overrides = LAYOUTS[name]
    overrides = [override.replace("m", "") if "layout" in override else override for override in overrides]
    (reference,) = pool.run(1, layouts.run, alone, STEPS)
    _assert_identical(pool.run(world_size, layouts.run, [*alone, *overrides], STEPS), reference)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_with_mtp_is_bit_identical_but_for_the_embedding(pool: WorkerPool, name: str) -> None:
    reference = one_process(pool, tuple(SGD))
    world_size, overrides = LAYOUTS[name]
    outcomes = pool.run(world_size, layouts.run, [*overrides, *SGD], 0)
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


def _assert_same_numbers(outcomes: list[Outcome], reference: Outcome, tolerance: float) -> None:
    """Equal up to the order of additions; ``tolerance`` is for what the updates have gone into."""
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
        assert outcome.confidence == pytest.approx(reference.confidence, rel=1e-6)
        assert outcome.gradient_norms[:1] == pytest.approx(reference.gradient_norms[:1], rel=1e-6)
        assert outcome.gradient_norms == pytest.approx(reference.gradient_norms, rel=tolerance)


def _assert_identical(outcomes: list[Outcome], reference: Outcome) -> None:
    for kind in ("gradients", "parameters"):
        own, expected = assemble([getattr(o, kind) for o in outcomes]), assemble([getattr(reference, kind)])
        assert own.keys() == expected.keys()
        assert [name for name in own if not torch.equal(own[name], expected[name])] == []
    for outcome in outcomes:
        assert [losses.lm for losses in outcome.losses] == [losses.lm for losses in reference.losses]
        # The mean over layers is added up stage by stage, in float64.
        for own_losses, expected_losses in zip(outcome.losses, reference.losses, strict=True):
            assert math.isclose(own_losses.ep, expected_losses.ep, rel_tol=1e-14)


def _assert_close(own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert own.keys() == expected.keys()
    worst = {
        name: float((own[name] - expected[name]).double().norm() / expected[name].double().norm().clamp(min=1e-30))
        for name in own
    }
    beyond = {name: error for name, error in worst.items() if error > tolerance}
    assert not beyond, f"relative errors above {tolerance}: {beyond}"
