"""bfloat16 products against float32 ones and another seed: the short version of benchmarks.bf16_products."""

from __future__ import annotations

import pytest

from steptron_kernels import extension
from tests.parallel.layouts import LEARNING_RATE, make_batches
from tests.train.test_step import build
from tests.worker_pool import WorkerPool

STEPS = 25


def losses(rank: int, world_size: int, overrides: list[str]) -> list[float]:
    train, _ = build(overrides)
    batches = make_batches(count=2)
    return [train.run(batches, LEARNING_RATE / 4, 1e-3).observed.losses.lm for _ in range(STEPS)]


@pytest.mark.skipif(not extension.has_fast_bf16(), reason="this processor has no bfloat16 products")
def test_bf16_products_change_less_than_another_seed(pool: WorkerPool) -> None:
    curves = {
        name: pool.run(1, losses, [f"train.seed={seed}", f"train.products={products}"])[0]
        for name, products, seed in (("fp32", "fp32", 10), ("bf16", "bf16", 10), ("other", "fp32", 11))
    }
    assert curves["bf16"] != curves["fp32"]
    assert curves["fp32"][-1] < curves["fp32"][0] - 1, "the model has to learn for this to say anything"
    distance, spread = (
        sum(abs(a - b) for a, b in zip(curves["fp32"], curves[name], strict=True)) / STEPS for name in ("bf16", "other")
    )
    assert distance < spread
