"""Facts that have to be the same everywhere."""

from __future__ import annotations

from importlib import metadata
from typing import Any
from unittest import mock

import torch

import steptron
from steptron.platform.doctor import Check
from steptron.platform.nodes import facts
from tests.platform.nodes.simulated import peers_on, roll_of
from tests.worker_pool import WorkerPool


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def _tell(rank: int, world_size: int) -> list[dict[str, str]] | None:
    roll = roll_of(rank, world_size, per_node=2)
    version = "2.12.1" if rank == 3 else torch.__version__
    with mock.patch.object(torch, "__version__", version):
        return roll.collect("facts", facts.own_facts(torch.device("cpu")))


def test_a_process_with_another_version_is_named(pool: WorkerPool) -> None:
    found = pool.run(4, _tell)[0]
    checks = _by_name(facts.compare(found, peers_on(2, 2)))
    wrong = checks.pop("torch")
    assert (wrong.status, wrong.value) == ("failed", f"{torch.__version__} on 3 of 4 processes")
    assert wrong.advice == "but 2.12.1 on rank 3 (node1): make them equal"
    assert {check.status for check in checks.values()} <= {"ok", "off"}
    assert checks["steptron"].value == steptron.__version__
    assert checks["megatron-core"].value == metadata.version("megatron-core")


def test_every_fact_is_compared() -> None:
    own = facts.own_facts(torch.device("cpu"))
    assert [check.name for check in facts.compare([own], peers_on(1, 1))] == list(own)
    for name in own:
        checks = _by_name(facts.compare([own, {**own, name: "another"}], peers_on(2, 1)))
        assert {check.name for check in checks.values() if check.status in ("failed", "warning")} == {name}
        assert "rank 1 (node1)" in checks[name].advice


def test_what_most_have_is_right_and_the_first_decides_a_tie() -> None:
    own = facts.own_facts(torch.device("cpu"))
    versions = ["1", "2", "2", "3"]
    checks = _by_name(facts.compare([{**own, "NCCL": version} for version in versions], peers_on(4, 1)))
    assert checks["NCCL"].value == "2 on 2 of 4 processes"
    assert checks["NCCL"].advice == "but 1 on rank 0 (node0); 3 on rank 3 (node3): make them equal"
    checks = _by_name(facts.compare([{**own, "NCCL": version} for version in "ab"], peers_on(2, 1)))
    assert checks["NCCL"].value == "a on 1 of 2 processes"


def test_hardware_and_settings_that_differ_are_warnings() -> None:
    own = facts.own_facts(torch.device("cpu"))
    with mock.patch.dict("os.environ", {"NCCL_IB_HCA": "mlx5_0", "OMP_NUM_THREADS": "3", "NCCL_KEY": "x"}):
        other = facts.own_facts(torch.device("cpu"))
    checks = _by_name(facts.compare([own, other], peers_on(2, 1)))
    assert checks["settings"].status == "warning"
    assert "NCCL_IB_HCA=mlx5_0 NCCL_KEY=x on rank 1" in checks["settings"].advice
    assert "OMP" not in checks["settings"].advice


def test_another_working_copy_of_the_same_version_is_noticed(tmp_path: Any) -> None:
    (tmp_path / "__init__.py").write_text("")
    here = facts.own_facts(torch.device("cpu"))["steptron source"]
    facts._source_digest.cache_clear()
    try:
        with mock.patch.object(steptron, "__file__", str(tmp_path / "__init__.py")):
            assert facts.own_facts(torch.device("cpu"))["steptron source"] != here
    finally:
        facts._source_digest.cache_clear()


def test_driver_version_is_read_from_the_kernel(tmp_path: Any) -> None:
    file = tmp_path / "version"
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("nothing of the kind\n", "unknown"),
    ):
        file.write_text(line)
        with mock.patch.object(facts, "_DRIVER", file):
            assert facts._driver() == version
