"""A short training really learns, and every part of the model takes part in it."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.runs import pretrain_arguments, steptron
from tests.worker_pool import WorkerPool
from tools.verify_learning import Check, verify

MARGINS = (0.5, 0.2, 0.02, 0.1)
"""Of a nano run of half a minute, which ends at 0.94, 0.75, 0.03 and 0.30; the tool's own are the quickstart's."""


def verified(rank: int, world_size: int, run: Path) -> list[Check]:
    return verify(run)


def test_a_short_run_learns_and_needs_its_experts_and_its_mtp_input(
    data: Path, tmp_path: Path, pool: WorkerPool
) -> None:
    """The checks that `tools/verify_learning.py` makes of the quickstart's run."""
    output = tmp_path / "run"
    steptron(
        *pretrain_arguments(data, output, 160),
        *("train.global_batch_size=16", "train.micro_batch_size=16", "balance.bias.rate=1e-2", "optimizer.lr=3e-3"),
        *("optimizer.schedule={kind: cosine, warmup_steps: 20, min_lr: 3e-4}", "train.threads=1"),
    )
    (checks,) = pool.run(1, verified, output)
    missed = [check for check, margin in zip(checks, MARGINS, strict=True) if check.value < margin]
    assert missed == []
