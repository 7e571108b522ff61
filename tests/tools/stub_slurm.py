"""Stand-ins for sbatch, srun, scancel and scontrol: nodes are loopback addresses, processes are local.

``python stub_slurm.py COMMAND ARGUMENTS``, with a folder for its state in STUB_SLURM. Options that it does not
know are refused, so that a misspelt one in a script is found. What a real srun does to processes and sets in their
environment is imitated as far as the scripts depend on it; several nodes' SLURM_* variables are as a real job has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = "4711"
_SBATCH = {
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "exclusive", "mem", "time"),
    *("signal", "requeue", "open-mode", "output"),
}
_SRUN = {
    *("kill-on-bad-exit", "wait", "distribution", "gpu-bind", "output", "open-mode", "container-image"),
    *("container-mounts", "container-workdir", "cpus-per-task"),
}


def main(command: str, arguments: list[str], state: Path) -> int:
    return {"sbatch": sbatch, "srun": srun, "scancel": scancel, "scontrol": scontrol}[command](arguments, state)


def sbatch(arguments: list[str], state: Path) -> int:
    """Runs the script to its end, in this process's place, as the batch step of a job."""
    given, (script, *rest) = _options(arguments, _SBATCH)
    directives = re.findall(r"^#SBATCH (.*)$", Path(script).read_text(), re.M)
    options = {**_options(directives, _SBATCH)[0], **given}
    nodes = int(options["nodes"])
    per_node = int(options.get("ntasks-per-node", 1))
    spool = state / "spool" / "slurm_script"  # a copy, as sbatch makes one: no neighbours
    spool.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(script, spool)
    spool.chmod(0o700)
    (state / "options.json").write_text(json.dumps(options))
    (state / "batch.pid").write_text(str(os.getpid()))
    environment = {
        **os.environ,
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else f"{per_node}",
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", "1"),
        "SLURM_SUBMIT_DIR": os.getcwd(),
        # The batch script is a task, too, and must not be taken for one of the run's.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    if (restarts := len(_lines(state / "requeued"))) > 0:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    os.execve(spool, [str(spool), *rest], environment)


def srun(arguments: list[str], state: Path) -> int:
    """Starts a process per task, and ends with the largest exit code."""
    options, command = _options(arguments, _SRUN)
    size, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
    per_node = size // nodes
    step = len(_lines(state / "steps"))
    _append(state / "steps", json.dumps({"options": options, "command": command}))
    processes = []
    for rank in range(size):
        node = rank // per_node
        environment = {
            **os.environ,
            "SLURM_STEP_ID": str(step),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
            "SLURM_DISTRIBUTION": options.get("distribution", "block"),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"127.0.0.{node + 1}",
        }
        output = None
        if "output" in options:
            name = _file_name(options["output"], rank)
            output = open(name, "a" if options.get("open-mode") == "append" else "w")  # noqa: SIM115
        processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    (state / "tasks").write_text("\n".join(str(process.pid) for process in processes))
    signal.signal(signal.SIGTERM, lambda *_: [process.kill() for process in processes])  # as srun does, at once
    deadline = None
    while any(process.poll() is None for process in processes):
        ended = [process.returncode for process in processes if process.returncode is not None]
        if ended and deadline is None and int(options.get("wait", 0)) > 0:
            deadline = time.monotonic() + int(options["wait"])
        impatient = options.get("kill-on-bad-exit", "1") == "1" and any(ended)
        if impatient or (deadline is not None and time.monotonic() > deadline):
            for process in processes:
                process.kill()
        time.sleep(0.02)
    (state / "tasks").unlink()
    return max(128 - code if code < 0 else code for code in (process.wait() for process in processes))


def scancel(arguments: list[str], state: Path) -> int:
    """Signals the tasks of the running step, not the batch script."""
    options, (job,) = _options(arguments, {"signal"})
    assert job == JOB and options["signal"] == "TERM", arguments
    for pid in _lines(state / "tasks"):
        os.kill(int(pid), signal.SIGTERM)
    return 0


def scontrol(arguments: list[str], state: Path) -> int:
    assert arguments == ["requeue", JOB], arguments
    _append(state / "requeued", JOB)
    return 0


def _file_name(pattern: str, task: int) -> str:
    return re.sub(r"%(\d*)t", lambda match: str(task).zfill(int(match[1] or 0)), pattern)


def _options(arguments: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """``--name=value`` and ``--name`` up to the first argument that is none, and the rest."""
    options = {}
    for position, argument in enumerate(arguments):
        if not argument.startswith("--"):
            return options, arguments[position:]
        name, _, value = argument[2:].partition("=")
        if name not in known:
            sys.exit(f"stub: unrecognized option {argument}")
        options[name] = value
    return options, []


def _lines(file: Path) -> list[str]:
    return file.read_text().split("\n") if file.exists() else []


def _append(file: Path, line: str) -> None:
    file.write_text("\n".join([*_lines(file), line]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:], Path(os.environ["STUB_SLURM"])))
