"""Which process this is among how many, read from the launcher's environment variables.

Light on purpose (no torch): the command line asks before anything heavy is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from steptron.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among all processes.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        local_rank: number of this process on its machine.
        local_size: number of processes on this machine.
        master: host and port where the processes meet; None for a single process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: tuple[str, int] | None = None


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (torchrun, ``run_local`` or SLURM's srun) started this process."""
    return _is_torchrun(environment) or _is_srun(environment)


def attempt(environment: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has started this process before."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def world(environment: Mapping[str, str] = os.environ) -> World:
    """Reads the environment of torchrun or SLURM; a process started by neither is alone.

    Raises:
        UserError: a variable is missing, is no number, or contradicts another.
    """
    if _is_torchrun(environment):
        found = _from_torchrun(environment)
    elif _is_srun(environment):
        found = _from_slurm(environment)
    else:
        return World(rank=0, size=1, local_rank=0, local_size=1)
    if not (0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size <= found.size):
        raise UserError(
            f"the launcher's environment contradicts itself: rank {found.rank} of {found.size}, "
            f"local rank {found.local_rank} of {found.local_size}"
        )
    return found


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a SLURM node list: ``node[001-003,7],gpu5`` gives node001 … node003, node7, gpu5.

    Raises:
        UserError: the list cannot be read.
    """
    # Commas inside brackets separate numbers, the others separate hosts.
    hosts = [host for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist) for host in _expand_host(item)]
    if not hosts or nodelist.count("[") != nodelist.count("]"):
        raise UserError(f"cannot read the SLURM node list {nodelist!r}")
    return hosts


def expected_hosts(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Host that srun starts each rank on, by rank; None where that is not known (another launcher, or ranks that
    are not laid out node by node)."""
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    in_order = environment.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if _is_torchrun(environment) or not _is_srun(environment) or nodelist is None or tasks is None or not in_order:
        return None
    counts = _tasks_per_node(tasks)
    hosts = expand_nodelist(nodelist)
    return [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]


def _expand_host(item: str) -> list[str]:
    match = re.search(r"\[([^\[\]]*)\]", item)
    if match is None:
        return [item]
    numbers: list[str] = []
    for part in match[1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None:
            raise UserError(f"cannot read {part!r} in the SLURM node list {item!r}")
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    before, after = item[: match.start()], item[match.end() :]
    return [before + number + rest for number in numbers for rest in _expand_host(after)]


def _is_torchrun(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def _is_srun(environment: Mapping[str, str]) -> bool:
    # A batch script, too, has SLURM_PROCID and SLURM_NTASKS; only the tasks of a step have a step number.
    return all(name in environment for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"))


def _from_torchrun(environment: Mapping[str, str]) -> World:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if size == 1:
        return World(rank=rank, size=1, local_rank=0, local_size=1)
    if "MASTER_ADDR" not in environment:
        raise UserError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not: start with torchrun, or set it")
    return World(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK"),
        local_size=_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size,
        master=(environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")),
    )


def _from_slurm(environment: Mapping[str, str]) -> World:
    size = _number(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS")
    if size == 1:
        return World(rank=0, size=1, local_rank=0, local_size=1)
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    host = environment.get("MASTER_ADDR")
    if host is None:
        if nodelist is None:
            raise UserError("SLURM_PROCID is set, but neither SLURM_JOB_NODELIST nor MASTER_ADDR is")
        host = expand_nodelist(nodelist)[0]
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    else:
        # The same on every host, and different for jobs that share one.
        port = 20000 + _number(environment, "SLURM_JOB_ID") % 10000
    return World(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=_slurm_local_size(environment, size),
        master=(host, port),
    )


def _slurm_local_size(environment: Mapping[str, str], size: int) -> int:
    """Tasks on this node, from the compressed list that looks like ``4(x2),3``."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if tasks is None:
        return size
    per_node = _tasks_per_node(tasks)
    node = _number(environment, "SLURM_NODEID") if len(per_node) > 1 else 0
    if node >= len(per_node):
        raise UserError(f"SLURM_NODEID is {node}, but SLURM_TASKS_PER_NODE={tasks} has {len(per_node)} nodes")
    return per_node[node]


def _tasks_per_node(tasks: str) -> list[int]:
    per_node: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"cannot read {part!r} in SLURM_TASKS_PER_NODE={tasks}")
        per_node += [int(match[1])] * int(match[2] or 1)
    return per_node


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name)
    if value is None:
        raise UserError(f"the environment variable {name} is not set, although a launcher's others are")
    if not value.isdecimal():
        raise UserError(f"the environment variable {name} is {value!r}; it must be a number")
    return int(value)
