"""Who this process is, and how it joins the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steptron.errors import UserError
from steptron.platform import distributed
from steptron.platform.cores import usable_cores
from steptron.platform.world import World, expand_nodelist, expected_hosts, under_launcher, world
from tests.worker_pool import REPOSITORY, WorkerPool

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[07-08],big3",
    "SLURM_TASKS_PER_NODE": "4,2,1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node[001-003,7],gpu5", ["node001", "node002", "node003", "node7", "gpu5"]),
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("rack[1-2]n[09-10]", ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]),
        ("x[8-11]y", ["x8y", "x9y", "x10y", "x11y"]),
    ],
)
def test_nodelist_is_expanded(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "node[1-", "node[a-b]"])
def test_unreadable_nodelist_is_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="SLURM node list"):
        expand_nodelist(nodelist)


def test_world_of_torchrun() -> None:
    assert under_launcher(TORCHRUN)
    assert world(TORCHRUN) == World(rank=3, size=4, local_rank=1, local_size=2, master=("host0", 29400))


def test_world_of_slurm() -> None:
    assert under_launcher(SRUN)
    assert world(SRUN) == World(rank=5, size=7, local_rank=1, local_size=2, master=("gpu07", 24567))
    repeated = {**SRUN, "SLURM_TASKS_PER_NODE": "2(x3),1"}
    assert world(repeated).local_size == 2
    assert world({**repeated, "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}).local_size == 1
    assert world({**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "5"}).master == ("other", 5)


def test_hosts_of_ranks_are_known_where_srun_fills_node_after_node() -> None:
    assert expected_hosts(SRUN) == ["gpu07"] * 4 + ["gpu08"] * 2 + ["big3"]
    assert expected_hosts({**SRUN, "SLURM_DISTRIBUTION": "block:cyclic"}) == expected_hosts(SRUN)
    for other in ({"SLURM_DISTRIBUTION": "cyclic"}, {"SLURM_TASKS_PER_NODE": None}, {"SLURM_STEP_ID": None}, TORCHRUN):
        assert expected_hosts({name: value for name, value in {**SRUN, **other}.items() if value is not None}) is None


def test_torchrun_inside_slurm_comes_first() -> None:
    assert world({**SRUN, **TORCHRUN}).rank == 3


def test_a_batch_script_is_no_launched_process() -> None:
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert not under_launcher({**batch, "SLURM_PROCID": "0"})
    assert world({**batch, "SLURM_PROCID": "0"}) == World(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
    ],
)
def test_broken_environment_is_refused(change: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        world(environment)


def _meet(rank: int, size: int, port: int, timeout: float) -> dist.Store | str:
    """The store, or the message of the error."""
    place = World(rank, size, rank, size, ("127.0.0.1", port))
    try:
        return distributed.meet(place, timedelta(seconds=timeout))
    except UserError as error:
        return str(error)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _meet_at_once(ranks: list[int], size: int, timeout: float) -> tuple[list[dist.Store | str], str]:
    port = _free_port()
    with ThreadPoolExecutor(len(ranks)) as threads:
        outcomes = list(threads.map(lambda rank: _meet(rank, size, port, timeout), ranks))
    return outcomes, f"127.0.0.1:{port}"


def test_ranks_meet() -> None:
    stores, _ = _meet_at_once([2, 1, 0], 3, 30)
    first, second, third = stores
    assert isinstance(first, dist.Store) and isinstance(second, dist.Store) and isinstance(third, dist.Store)
    first.set("key", "value")
    assert third.get("key") == second.get("key") == b"value"


def test_missing_ranks_are_named() -> None:
    outcomes, where = _meet_at_once([0, 2], 4, 2)
    assert f"ranks 1, 3 (2 in all) of 4 did not arrive at {where} within 2 s" in outcomes
    outcomes, where = _meet_at_once([0, 1], 3, 2)
    assert f"rank 2 of 3 did not arrive at {where} within 2 s" in outcomes


def test_missing_rank_0_is_named() -> None:
    (outcome,), where = _meet_at_once([1], 2, 2)
    assert isinstance(outcome, str)
    assert outcome.startswith(f"rank 1 of 2 on {socket.gethostname()} could not reach rank 0 at {where} within 2 s")


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = _meet(0, 2, port, 5)
    assert isinstance(outcome, str) and outcome.startswith(f"rank 0 cannot listen at 127.0.0.1:{port}")


def _alone(rank: int, world_size: int) -> None:
    dist.destroy_process_group()  # the pool's
    for timeout in (7, 5):
        distributed.initialize(torch.device("cpu"), timeout)
        parallel_state.initialize_model_parallel()
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1] and dist.get_world_size() == 1
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=timeout)
        distributed.shutdown()
        assert not dist.is_initialized() and not parallel_state.is_initialized()
    distributed.shutdown()


def test_a_single_process_needs_no_port_and_can_join_again(pool: WorkerPool) -> None:
    pool.run(1, _alone)


# ---------------------------------------------------------------------------- cores of this machine


def test_local_processes_tell_each_other_their_cpus() -> None:
    store, masks = dist.HashStore(), (frozenset({0, 1}), frozenset({2, 70}))
    places = [World(rank=4 + i, size=6, local_rank=i, local_size=2, master=("h", 1)) for i in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda i: distributed._local_masks(store, places[i], masks[i]), (0, 1)))
    assert told == [list(masks), list(masks)]
    assert distributed._local_masks(store, World(0, 8, 0, 1, ("h", 1)), masks[1]) == [masks[1]]


def test_a_local_process_that_is_gone_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(UserError, match=r"local rank\(s\) 0, 2 of 3 went away"):
        distributed._local_masks(store, World(1, 3, 1, 3, ("h", 1)), frozenset({0}))


_START = """
from steptron.platform import distributed
from steptron.platform.cores import usable_cores
distributed.start("cpu", {threads}, 60)
import torch
print("threads", torch.get_num_threads())
"""


def test_start_sets_threads_and_says_once_when_they_do_not_fit() -> None:
    def start(threads: int | None, **variables: str) -> tuple[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", _START.format(threads=threads)],
            cwd=REPOSITORY,
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    cores = usable_cores()
    assert start(None) == (f"threads {cores.count}", "")
    assert start(None, OMP_NUM_THREADS="1") == ("threads 1", "")
    many = len(cores.cpus) + 1
    output, errors = start(many)
    assert output == f"threads {many}"
    assert errors.startswith(f"steptron: 1 process of {many} threads on ") and errors.count("\n") == 1
