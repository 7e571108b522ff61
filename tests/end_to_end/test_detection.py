"""Planted instabilities of trained runs, through telemetry, server and alerts (tools/reproduce/planted.py has more)."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.config.loader import load
from steptron.parallel.mesh import build_mesh
from steptron_metrics.server.local import running
from steptron_metrics.settings import Settings
from tests.worker_pool import WorkerPool
from tools.reproduce.planted import NANO, OVERRIDES, START, WITHIN, Outcome, train

KINDS = ["healthy", "blow_up", "growth", "collapse"]


def runs(rank: int, world_size: int, folder: Path) -> list[Outcome]:
    mesh = build_mesh(load(NANO, OVERRIDES).config.parallel)
    with running(Settings(folder / "server", port=0, http_port=0)) as server:
        return [train(kind, 1, START + max(WITHIN.values()), server, folder, mesh) for kind in KINDS]


@pytest.mark.timeout(280)
def test_alerts_name_layer_and_expert_and_a_healthy_run_has_none(pool: WorkerPool, tmp_path: Path) -> None:
    (outcomes,) = pool.run(1, runs, tmp_path, timeout=270)
    assert {outcome.kind: outcome.problem for outcome in outcomes} == dict.fromkeys(KINDS)
    healthy, blow_up, growth, _ = outcomes
    assert blow_up.losses == healthy.losses  # the blow-up is where no loss can show it
    assert growth.losses != healthy.losses
    for outcome in outcomes:
        for alert in outcome.alerts:
            assert all(alert[text] for text in ("saw", "cause", "remedy"))
