"""The batch scripts of tools/slurm under stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from steptron.config.checks import check_stages
from steptron.config.loader import load
from tests.end_to_end.runs import build_data, pretrain_arguments
from tests.tools import stub_slurm

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "tools" / "slurm"
JOBS = ("two-nodes.sbatch", "512-nodes.sbatch")


class Cluster:
    """A folder with SLURM's commands, and what has happened."""

    def __init__(self, folder: Path) -> None:
        self.state, self.binaries, self.logs = folder / "state", folder / "bin", folder / "logs"
        for path in (self.state, self.binaries):
            path.mkdir()
        for name in ("sbatch", "srun", "scancel", "scontrol"):
            self.command(name, f'exec "{sys.executable}" "{stub_slurm.__file__}" {name} "$@"')
        self._processes: list[subprocess.Popen[str]] = []

    def command(self, name: str, script: str) -> None:
        file = self.binaries / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def submit(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            # steptron's own command, if the test has no other, is beside this Python.
            "PATH": f"{self.binaries}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "STUB_SLURM": str(self.state),
            "LOGS": str(self.logs),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        self._processes.append(
            subprocess.Popen(
                ["sbatch", "--nodes=2", "--ntasks-per-node=1", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                executable=self.binaries / "sbatch",
            )
        )
        return self._processes[-1]

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "steps").read_text().splitlines()]

    def requeued(self) -> int:
        file = self.state / "requeued"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def log(self, name: str) -> str:
        return (self.logs / name).read_text() if (self.logs / name).exists() else ""

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                for pid in (self.state / "tasks").read_text().split() if (self.state / "tasks").exists() else ():
                    os.kill(int(pid), signal.SIGKILL)
                process.kill()
            process.communicate()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def _until(condition: Any, process: subprocess.Popen[str], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------- real runs


@pytest.mark.timeout(500)
def test_two_nodes_are_examined_train_and_resume_after_a_stop(cluster: Cluster, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"line {n} of a text that trains nothing. " * 8}) + "\n" for n in range(400))
    )
    data, run = build_data(tmp_path / "data", [text], vocabulary=300), tmp_path / "run"
    _, config, *overrides = pretrain_arguments(data, run, 1000, "parallel.pipeline=2", "train.device=cpu")
    settings = {"CONFIG": config, "DOCTOR_SECONDS": "120"}

    job = cluster.submit(str(SCRIPTS / "two-nodes.sbatch"), *overrides, **settings)
    log = run / "log.jsonl"
    _until(lambda: log.exists() and log.read_text().count('"kind": "train"') >= 1, job)
    os.kill(int((cluster.state / "batch.pid").read_text()), signal.SIGUSR1)
    output, _ = job.communicate(timeout=150)
    assert job.returncode == 75, output
    assert "asked to stop" in output and "goes into the queue again" in output
    assert cluster.requeued() == 1

    report = cluster.log("doctor-0000.log")
    assert "2 on 2 nodes" in report and "127.0.0.1, 127.0.0.2" in report
    assert "All nodes are fit for a run." in report
    assert json.loads((cluster.logs / "doctor.json").read_text())["clocks"][1]["uncertainty"] < 1
    assert cluster.log("doctor-0001.log") == ""
    assert "stopped as asked after step" in cluster.log("pretrain-0000.log")

    # The queue starts the job again, with the same arguments but that the run is to end now.
    done = int(re.findall(r"stopped as asked after step (\d+)", cluster.log("pretrain-0000.log"))[0])
    job = cluster.submit(
        str(SCRIPTS / "two-nodes.sbatch"), *overrides, f"train.steps={done + 1}", **settings, DOCTOR="0"
    )
    output, _ = job.communicate(timeout=150)
    assert job.returncode == 0, output + cluster.log("pretrain-0000.log")
    assert f"resuming from {run}/checkpoints/step_{done:08}" in cluster.log("pretrain-0000.log")
    assert cluster.requeued() == 1


# ------------------------------------------------- what the scripts decide, with a stand-in for steptron

# doctor: exit code DOCTOR_CODE. pretrain: waits to be asked, ends with PRETRAIN_CODE, rank 1 a moment later.
STEPTRON = """
echo "$1 of rank $SLURM_PROCID in step $SLURM_STEP_ID: $*; $(ulimit -n) files; NCCL $NCCL_IB_HCA"
if [ "$1" = doctor ]; then
    [ "${DOCTOR_CODE:-0}" = 0 ] || echo "To mend: clocks, offset: far off. node7"
    exit "${DOCTOR_CODE:-0}"
fi
touch "$STUB_SLURM/training-$SLURM_PROCID"
if [ -n "${WAITS:-}" ]; then
    trap 'asked=1' TERM
    for _ in $(seq 300); do sleep 0.05; [ -z "${asked:-}" ] || break; done
    sleep "0.$((3 * SLURM_PROCID))"
fi
touch "$STUB_SLURM/ended-$SLURM_PROCID"
exit "${PRETRAIN_CODE:-0}"
"""


@pytest.mark.parametrize("script", JOBS)
def test_a_job_examines_then_trains(cluster: Cluster, script: str) -> None:
    cluster.command("steptron", STEPTRON)
    job = cluster.submit(str(SCRIPTS / script), "train.steps=7", CONFIG="mine.yaml", IB_CARDS="mlx5_0,mlx5_1")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    doctor, pretrain = cluster.steps()
    assert doctor["command"][:3] == ["steptron", "doctor", "--nodes"]
    assert doctor["command"][-3:] == ["--config", "mine.yaml", "train.steps=7"]
    assert pretrain["command"] == ["steptron", "pretrain", "mine.yaml", "train.steps=7"]
    assert pretrain["options"]["kill-on-bad-exit"] == "0" and int(pretrain["options"]["wait"]) > 0
    assert "container-image" not in pretrain["options"]
    for rank in (0, 1):
        assert f"pretrain of rank {rank} in step 1" in cluster.log(f"pretrain-000{rank}.log")
    assert "NCCL =mlx5_0,mlx5_1" in cluster.log("pretrain-0000.log")
    assert cluster.requeued() == 0


def test_a_container_is_used_for_every_step(cluster: Cluster) -> None:
    cluster.command("steptron", STEPTRON)
    script = str(SCRIPTS / "two-nodes.sbatch")
    job = cluster.submit(script, IMAGE="/shared/steptron.sqsh", MOUNTS="/shared:/shared")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    for step in cluster.steps():
        assert step["options"]["container-image"] == "/shared/steptron.sqsh"
        assert step["options"]["container-mounts"] == "/shared:/shared"
        assert step["options"]["container-workdir"] == str(REPOSITORY)


def test_unfit_nodes_train_nothing(cluster: Cluster) -> None:
    cluster.command("steptron", STEPTRON)
    job = cluster.submit(str(SCRIPTS / "two-nodes.sbatch"), DOCTOR_CODE="1")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "To mend: clocks, offset: far off. node7" in output and "nothing was trained" in output
    assert len(cluster.steps()) == 1 and cluster.requeued() == 0


def test_a_failed_training_is_not_repeated(cluster: Cluster) -> None:
    cluster.command("steptron", STEPTRON)
    job = cluster.submit(str(SCRIPTS / "two-nodes.sbatch"), PRETRAIN_CODE="2")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2 and "training ended with exit code 2" in output
    assert cluster.requeued() == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_stops_all_processes_and_requeues(cluster: Cluster, number: int) -> None:
    cluster.command("steptron", STEPTRON)
    job = cluster.submit(str(SCRIPTS / "two-nodes.sbatch"), WAITS="1", PRETRAIN_CODE="75")
    _until(lambda: (cluster.state / "training-1").exists(), job, 60)
    time.sleep(0.2)
    os.kill(int((cluster.state / "batch.pid").read_text()), number)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    # Rank 1 was still busy when rank 0 had ended with 75: nothing may have killed it.
    assert (cluster.state / "ended-0").exists() and (cluster.state / "ended-1").exists()
    assert cluster.requeued() == 1


def test_stops_are_counted(cluster: Cluster) -> None:
    cluster.command("steptron", STEPTRON)
    (cluster.state / "requeued").write_text(stub_slurm.JOB)
    job = cluster.submit(str(SCRIPTS / "two-nodes.sbatch"), PRETRAIN_CODE="75", MAX_REQUEUES="1")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75 and "not put into the queue again" in output
    assert cluster.requeued() == 1


def test_data_are_built_by_one_task(cluster: Cluster) -> None:
    cluster.command("steptron", 'echo "$*" > "$STUB_SLURM/arguments"')
    script = str(SCRIPTS / "build-data.sbatch")
    job = cluster.submit("--nodes=1", script, "--output", "/shared/data", "texts")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    (step,) = cluster.steps()
    assert step["command"][:3] == ["steptron", "data", "build"]
    assert (cluster.state / "arguments").read_text() == "data build --workers 32 --output /shared/data texts\n"


def test_the_index_is_built_by_one_task_from_the_configuration(cluster: Cluster) -> None:
    cluster.command("steptron", 'echo "$*" > "$STUB_SLURM/arguments"')
    script = str(SCRIPTS / "build-index.sbatch")
    job = cluster.submit("--nodes=1", script, "data.index_cache=/shared/index", CONFIG="mine.yaml")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert len(cluster.steps()) == 1
    assert (cluster.state / "arguments").read_text() == "data build-index mine.yaml data.index_cache=/shared/index\n"


# ------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("script", [*JOBS, "build-data.sbatch", "build-index.sbatch"])
def test_directives_are_options_of_sbatch(script: str) -> None:
    directives = re.findall(r"^#SBATCH (.*)$", (SCRIPTS / script).read_text(), re.M)
    options, rest = stub_slurm._options(directives, stub_slurm._SBATCH)
    assert rest == [] and len(options) == len(directives)


def test_sizes_and_layouts_fit_their_configurations() -> None:
    sizes = {}
    for script in JOBS:
        text = (SCRIPTS / script).read_text()
        number = {name: int(value) for name, value in re.findall(r"^#SBATCH --([a-z-]+)=(\d+)$", text, re.M)}
        assert number["gpus-per-node"] == number["ntasks-per-node"] == 8
        file = re.findall(r"CONFIG:-([^}]+)}", text)[0]
        sizes[script] = number["nodes"] * number["ntasks-per-node"]
        through = re.findall(r"--through (\S+)", text)
        check_stages(load(REPOSITORY / file).through(*through or [None]), world_size=sizes[script], device="cuda")
    assert sizes == {"two-nodes.sbatch": 16, "512-nodes.sbatch": 4096}
    layout = yaml.safe_load((REPOSITORY / "configs" / "parallel" / "report.yaml").read_text())["parallel"]
    assert (layout["pipeline"], layout["expert"]) == (8, 8)


@pytest.mark.parametrize(
    "script", sorted(SCRIPTS.glob("*.sh")) + sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name
)
def test_scripts_are_strict_and_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    text = script.read_text()
    assert script.name == "nccl.sh" or "\nset -euo pipefail\n" in text  # nccl.sh is read by a script that is
    assert os.access(script, os.X_OK) == (text.startswith("#!") and script.suffix == ".sh")


def test_settings_of_the_site_win(tmp_path: Path) -> None:
    def values(**variables: str) -> dict[str, str]:
        done = subprocess.run(
            ["bash", "-c", f"logs=/logs; source {SCRIPTS / 'nccl.sh'}; env"],
            env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if re.match("(TORCH_|NCCL|GLOO)", line))

    usual = values()
    assert "NCCL_SOCKET_IFNAME" not in usual and "NCCL_IB_HCA" not in usual
    assert usual["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert usual["TORCH_FR_DUMP_TEMP_FILE"] == "/logs/nccl-trace-"
    chosen = values(SOCKET_INTERFACE="eth0", IB_CARDS="mlx5_0", NCCL_DEBUG="INFO", GLOO_SOCKET_IFNAME="lo")
    assert chosen["NCCL_SOCKET_IFNAME"] == "eth0" and chosen["GLOO_SOCKET_IFNAME"] == "lo"
    assert chosen["NCCL_IB_HCA"] == "=mlx5_0" and chosen["NCCL_DEBUG"] == "INFO"
