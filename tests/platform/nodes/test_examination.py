"""The whole examination: in workers that play two nodes, and as the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from steptron import __version__
from steptron.cli.doctor import doctor as command
from steptron.errors import UserError
from steptron.platform.nodes import examination, facts, links
from steptron.platform.nodes.examination import Examination, Findings, _BrokenOffError
from tests.platform.nodes.simulated import roll_of
from tests.worker_pool import REPOSITORY, WorkerPool


def _examine(rank: int, world_size: int) -> dict[str, Any]:
    findings = Findings()
    # Small messages: what is tested is that all sections come, not the machine.
    with mock.patch.object(links, "_BYTES", {"cpu": 1 << 16}):
        Examination(roll_of(rank, world_size, per_node=2), torch.device("cpu"), "127.0.0.1", None, findings).run()
    return findings.as_json()


def test_all_sections_on_two_nodes(pool: WorkerPool) -> None:
    first, *others = pool.run(4, _examine)
    assert not first["failed"]
    assert list(dict.fromkeys(check["section"] for check in first["checks"])) == [
        "processes",
        "the same everywhere",
        "clocks",
        "memory",
        "shared folders",
        "collectives",
        "links between nodes",
        "links inside nodes",
    ]
    assert first["checks"][0]["value"] == "4 on 2 nodes" and first["checks"][0]["advice"] == "node0, node1"
    kinds = (links.BETWEEN_NODES, links.INSIDE_NODES)
    pairs = [[tuple(link[:2]) for own in first[kind] for link in own] for kind in kinds]
    assert pairs == [[(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    assert [own["steptron"] for own in first["facts"]] == [__version__] * 4
    assert others == [{"failed": False, "checks": []}] * 3


def test_an_error_in_a_section_without_communication_does_not_end_it(pool: WorkerPool) -> None:
    first = pool.run(4, _broken_facts)[0]
    (check,) = [check for check in first if check["status"] == "failed"]
    assert check["value"] == "errors on ranks 2-3 (node1)"
    assert check["advice"] == "rank 2 (node1): timed out\nrank 3 (node1): the cable is out"
    assert first[-1]["section"] == "links inside nodes"


def _broken_facts(rank: int, world_size: int) -> list[dict[str, Any]]:
    with mock.patch.object(links, "_BYTES", {"cpu": 1 << 12}):
        return _run_with(rank, world_size, facts, "own_facts")


def _broken_links(rank: int, world_size: int) -> list[dict[str, Any]]:
    return _run_with(rank, world_size, links, "measure")


def _broken_groups(rank: int, world_size: int) -> list[dict[str, Any]]:
    return _run_with(rank, world_size, examination, "groups_of", timeout=3.0)


def _run_with(rank: int, world_size: int, part: Any, function: str, timeout: float = 30.0) -> list[dict[str, Any]]:
    """The examination where one of its parts raises on the second node."""

    def fail(*_: object) -> Any:
        raise RuntimeError("the cable is out" if rank == 3 else "timed out")

    findings = Findings()
    roll = roll_of(rank, world_size, per_node=2, timeout=timeout)
    with mock.patch.object(part, function, fail if rank >= 2 or function == "measure" else getattr(part, function)):
        try:
            Examination(roll, torch.device("cpu"), "127.0.0.1", None, findings).run()
        except _BrokenOffError:
            return [*findings.as_json()["checks"], {"status": "broken off"}]
    return findings.as_json()["checks"]


def test_an_error_in_communication_ends_it_for_all(pool: WorkerPool) -> None:
    first, *others = pool.run(4, _broken_links)
    *_, failed, last = first
    assert (failed["section"], failed["status"]) == ("links between nodes", "failed")
    assert "rank 3 (node1): the cable is out" in failed["advice"]
    assert last == {"status": "broken off"} and others == [[last]] * 3


def test_groups_that_do_not_come_about_end_it_within_its_own_timeout(pool: WorkerPool) -> None:
    """Not within a run's, which is ten minutes."""
    first, *others = pool.run(4, _broken_groups, timeout=60)
    *_, failed, last = first
    assert (failed["section"], failed["status"]) == ("collectives", "failed")
    assert failed["value"] == "errors on ranks 0-1 (node0); ranks 2-3 (node1)"
    assert "rank 3 (node1): the cable is out" in failed["advice"]
    assert last == {"status": "broken off"} and others == [[last]] * 3


# ------------------------------------------------------------------------------------- the command


def _command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "steptron", "doctor", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_command_in_two_local_processes(tmp_path: Path) -> None:
    file, output = tmp_path / "nodes.json", tmp_path / "run"
    done = _command(
        *("--nodes", "--nproc", "2", "--timeout", "40", "--json", str(file), "--config", "configs/pretrain/nano.yaml"),
        *("train.global_batch_size=6", f"train.output={output}", f"data.train.0.path={tmp_path / 'nowhere'}"),
    )
    # The data are not there and the batch does not fit: that is to mend, and nothing else is.
    assert done.returncode == 1, done.stdout + done.stderr
    data, batch = [line for line in done.stdout.splitlines() if line.startswith("To mend")]
    assert f"To mend: shared folders, {tmp_path / 'nowhere'}: cannot be used by 2 processes. ranks 0-1 (" in data
    assert "To mend: configuration, for 2 processes: refused on all. train.global_batch_size (6) must be" in batch
    assert "All nodes are fit" not in done.stdout
    found = json.loads(file.read_text())
    assert found["failed"] and len(found["processes"]) == 2
    groups = [check["name"] for check in found["checks"] if check["section"] == "collectives"]
    assert groups == ["world, 2 processes", "pipeline, 2 processes"]
    assert not output.exists()


def test_a_process_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    srun = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "gpu[7-8]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = _command("--nodes", "--timeout", "1", **srun)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "To mend: processes, start: the processes did not meet." in done.stdout
    assert "ranks 1, 2, 3 (3 in all) of 4 did not arrive" in done.stdout
    assert "SLURM starts them on gpu7, gpu8" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/pretrain/nano.yaml"], "belong to --nodes"),
        (["--json", "x"], "belong to --nodes"),
        (["--nodes", "--nproc", "3"], "--nproc 3, but a launcher has started 2 processes"),
        (["--nodes", "train.steps=1"], "give it"),
        ([], "add --nodes"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    if "--config" not in arguments and "--json" not in arguments:
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (torchrun | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
            monkeypatch.setenv(name, value)
    application = typer.Typer()
    application.command()(command)
    result = CliRunner().invoke(application, arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
