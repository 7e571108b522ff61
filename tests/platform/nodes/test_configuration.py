"""A configuration on every node."""

from __future__ import annotations

from pathlib import Path

from steptron.config.loader import load
from steptron.platform.nodes import configuration
from tests.platform.nodes.simulated import peers_on

NANO = Path(__file__).resolve().parents[3] / "configs" / "pretrain" / "nano.yaml"


def test_what_all_refuse_and_what_one_node_refuses() -> None:
    config = load(NANO, ["parallel.pipeline=2"]).config
    assert configuration.own_problems(config, 4) == []
    (problem,) = configuration.own_problems(config, 3)
    assert "the number of processes (3)" in problem
    (check,) = configuration.judge([[]] * 4, peers_on(2, 2))
    assert (check.status, check.name) == ("ok", "for 4 processes")
    everywhere, one_node = configuration.judge(
        [[problem], [problem], [problem, "no device"], [problem]], peers_on(2, 2)
    )
    assert (everywhere.status, everywhere.value, everywhere.advice) == ("failed", "refused on all", problem)
    assert (one_node.value, one_node.advice) == ("refused on rank 2 (node1)", "no device")
