"""How the parts of the training loss are combined."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.config.schema import LossConfig, ParallelConfig
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.parallel.mesh import build_mesh
from steptron.train.losses import TokenCounts, count_tokens, loss_coefficients, mtp_weights
from tests.model.helpers import (
    assert_all_close,
    build_model,
    fill,
    gradients,
    random_batch,
    single_process,
    small_config,
)
from tests.worker_pool import WorkerPool


def uneven_batch(seed: int) -> MicroBatch:
    """Ragged documents, padding, and a mask that keeps very different numbers of targets by seed."""
    batch = random_batch(48, 2, 12, seed, documents=[[7, 5 - seed % 3], [2, 1, 4]])
    kept = torch.rand(2, 12, generator=torch.Generator().manual_seed(seed)) < 0.2 + 0.2 * (seed % 4)
    return MicroBatch(
        batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS & kept, batch.positions_BS, batch.documents_BS
    )


def counts_by_loops(batches: list[MicroBatch], depths: int) -> TokenCounts:
    local_valid, targets = [], [0] * (depths + 1)
    for batch in batches:
        local_valid.append(0)
        rows, length = batch.tokens_BS.shape
        for b in range(rows):
            for t in range(length):
                document = int(batch.documents_BS[b, t])
                if document < 0:
                    continue
                local_valid[-1] += 1
                for k in range(depths + 1):
                    last = t + k
                    if last < length and batch.loss_mask_BS[b, last] and batch.documents_BS[b, last] == document:
                        targets[k] += 1
    return TokenCounts(sum(local_valid), tuple(targets), tuple(local_valid))


@pytest.mark.parametrize("depths", [0, 1, 3])
def test_counts(depths: int) -> None:
    batches = [uneven_batch(seed) for seed in range(4)]
    counts = count_tokens(batches, depths, single_process().groups.dp_cp)
    assert counts == counts_by_loops(batches, depths)
    assert counts.targets[0] < counts.valid < 4 * 24


def counts_of_rank(rank: int, world_size: int, expert: int) -> TokenCounts:
    mesh = build_mesh(ParallelConfig(expert=expert))
    return count_tokens([uneven_batch(2 * rank), uneven_batch(2 * rank + 1)], 2, mesh.groups.dp_cp)


@pytest.mark.parametrize("world_size, expert", [(2, 1), (2, 2), (4, 2)])
def test_counts_are_global(pool: WorkerPool, world_size: int, expert: int) -> None:
    expected = counts_by_loops([uneven_batch(seed) for seed in range(2 * world_size)], 2)
    for rank, counts in enumerate(pool.run(world_size, counts_of_rank, expert)):
        assert (counts.valid, counts.targets) == (expected.valid, expected.targets)
        assert counts.local_valid == expected.local_valid[2 * rank : 2 * rank + 2]


def counts_of_stage(rank: int, world_size: int) -> TokenCounts:
    mesh = build_mesh(ParallelConfig(pipeline=world_size))
    return count_tokens([uneven_batch(0)], 1, mesh.groups.dp_cp)


def test_pipeline_stages_count_their_common_batch_once(pool: WorkerPool) -> None:
    assert pool.run(2, counts_of_stage) == [counts_by_loops([uneven_batch(0)], 1)] * 2


# -------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "depths, expected",
    [(0, []), (1, [0.3]), (2, [0.3 / 1.6, 0.18 / 1.6]), (3, [0.3 / 1.96, 0.18 / 1.96, 0.108 / 1.96])],
)
def test_weights_of_mtp_depths(depths: int, expected: list[float]) -> None:
    """0.3 x 0.6^(k-1) / sum: FastMTP's decay, normalised over the depths that train."""
    assert mtp_weights(LossConfig(mtp_weight=0.3, mtp_decay=0.6), depths) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(st.floats(0, 2), st.floats(0.01, 3), st.integers(1, 6))
def test_weights_sum_to_the_whole_and_decay(weight: float, decay: float, depths: int) -> None:
    weights = mtp_weights(LossConfig(mtp_weight=weight, mtp_decay=decay), depths)
    assert sum(weights) == pytest.approx(weight, rel=1e-9, abs=1e-12)
    for near, far in itertools.pairwise(weights):
        assert far == pytest.approx(decay * near, rel=1e-9, abs=1e-300)


def test_coefficients_divide_by_each_heads_own_count() -> None:
    coefficients = loss_coefficients(LossConfig(mtp_weight=0.3, mtp_decay=0.6), TokenCounts(100, (80, 60, 40), (100,)))
    assert coefficients == pytest.approx([1 / 80, 0.3 / 1.6 / 60, 0.18 / 1.6 / 40], rel=1e-12)


def test_heads_without_any_target_add_nothing() -> None:
    assert loss_coefficients(LossConfig(), TokenCounts(10, (0, 0), (10,))) == [1.0, 0.3]  # of sums that are 0


# ------------------------------------------------------------------------------ the whole batch


CONFIG, LOSSES = small_config(), LossConfig(mtp_train_depths=2)


def objective(model: StepModel, batches: list[MicroBatch]) -> float:
    """Runs every micro-batch forward and backward; returns the training loss."""
    counts = count_tokens(batches, 2, single_process().groups.dp_cp)
    coefficients = torch.tensor(loss_coefficients(LOSSES, counts))
    total = 0.0
    for batch in batches:
        loss = torch.dot(model(batch), coefficients)
        loss.backward()
        total += loss.item()
    return total


def rows(batch: MicroBatch, part: slice) -> MicroBatch:
    return MicroBatch(*(getattr(batch, name)[part] for name in MicroBatch.__dataclass_fields__))


def joined(batches: list[MicroBatch]) -> MicroBatch:
    return MicroBatch(*(torch.cat([getattr(b, name) for b in batches]) for name in MicroBatch.__dataclass_fields__))


def test_cutting_a_batch_differently_changes_rounding_only() -> None:
    """Means per micro-batch, averaged, would weigh tokens of sparse micro-batches more."""
    batches = [uneven_batch(seed) for seed in range(4)]
    cuts = {
        "one": [joined(batches)],
        "four": batches,
        "uneven": [rows(joined(batches), part) for part in (slice(0, 1), slice(1, 6), slice(6, 8))],
    }
    results = {}
    for name, cut in cuts.items():
        model = build_model(CONFIG)
        fill(model, 0)
        results[name] = objective(model, cut), gradients(model)
    for name in ("four", "uneven"):
        assert results[name][0] == pytest.approx(results["one"][0], rel=1e-6)
        assert_all_close(results[name][1], results["one"][1], 2e-6)

    model = build_model(CONFIG)
    fill(model, 0)
    averaged = sum(objective(model, [batch]) for batch in batches) / 4
    assert averaged != pytest.approx(results["one"][0], rel=1e-3)


def test_the_objective_is_the_weighted_mean_over_targets() -> None:
    batches = [uneven_batch(seed) for seed in range(3)]
    model = build_model(CONFIG)
    fill(model, 1)
    total = objective(model, batches)
    sums = [0.0] * 3
    numbers = [0] * 3
    with torch.no_grad():
        for batch in batches:
            main, mtp = model.logits(batch)
            for k, logits in enumerate([main, *mtp]):
                log_probabilities = logits.double().log_softmax(dim=-1)
                for b in range(2):
                    for t in range(12 - k):
                        same = batch.documents_BS[b, t] == batch.documents_BS[b, t + k]
                        if batch.loss_mask_BS[b, t + k] and same:
                            sums[k] -= log_probabilities[b, t, batch.labels_BS[b, t + k]].item()
                            numbers[k] += 1
    means = [s / n for s, n in zip(sums, numbers, strict=True)]
    assert total == pytest.approx(means[0] + 0.3 * (means[1] + 0.6 * means[2]) / 1.6, rel=1e-6)
