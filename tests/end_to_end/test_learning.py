"""A short training really learns, and every part of the model takes part in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import pretrain_arguments, steptron
from tests.worker_pool import WorkerPool
from tools.verify_learning import Check, verify


def verified(rank: int, world_size: int, run: Path) -> list[Check]:
    return verify(run)


@pytest.mark.timeout(280)
def test_a_short_run_learns_and_needs_its_experts_and_its_mtp_input(
    data: Path, tmp_path: Path, pool: WorkerPool
) -> None:
    """The checks that `tools/verify_learning.py` makes of the quickstart's run, on a nano run of a minute."""
    output = tmp_path / "run"
    steptron(
        *pretrain_arguments(data, output, 400, "parallel.expert=2"),
        "optimizer.lr=6e-3",
        "optimizer.schedule={kind: cosine, warmup_steps: 20, min_lr: 6e-4}",
        *("--nproc", "2"),
    )
    (checks,) = pool.run(1, verified, output)
    assert [check for check in checks if not check.holds] == []
