"""Joining the other processes of a run, and leaving them."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from steptron.errors import UserError
from steptron.platform import malloc, megatron_cpu
from steptron.platform.cores import usable_cores
from steptron.platform.device import backend, select_device
from steptron.platform.launch import LISTEN_FD
from steptron.platform.threads import decide, misfit, set_threads
from steptron.platform.world import World, attempt, expected_hosts, world

__all__ = ["World", "initialize", "on_first_rank", "meet", "shutdown", "start", "world"]

_T = TypeVar("_T")
_NAMED_RANKS = 16  # absent ranks that a message lists


def start(
    device_name: Literal["auto", "cpu", "cuda"], threads: int | None, timeout_seconds: float
) -> tuple[torch.device, dist.Store]:
    """Chooses device and threads and joins the default process group.

    Call it before importing what imports Megatron-Core: on the CPU, its import then takes half as long.
    On the CPU, freed memory is kept (``platform.malloc``), and rank 0 says when threads do not fit the machine.

    Args:
        device_name: as ``train.device``.
        threads: CPU threads of this process; None leaves the decision to ``platform.threads``.
        timeout_seconds: longest wait for the other processes.

    Returns:
        The device, and the store at which the processes have met.

    Raises:
        UserError: there is no such device, processes are missing after the timeout, or
            ``OMP_NUM_THREADS`` cannot be read.
    """
    device = select_device(device_name)
    cores = usable_cores()
    if device.type == "cpu":
        malloc.keep_freed_memory()
    place, store = world(), _join(device, timeout_seconds)
    chosen = decide(threads, cores, _local_masks(store, place, cores.cpus))
    set_threads(chosen.count)
    if device.type == "cpu" and place.rank == 0 and (note := misfit(chosen)) is not None:
        print(f"steptron: {note}", file=sys.stderr, flush=True)
    return device, store


def initialize(device: torch.device, timeout_seconds: float) -> None:
    """Joins the default process group, alone, from torchrun's environment or from SLURM's.

    On the CPU, Megatron-Core's compatibility is installed first. On CUDA, the process takes the GPU
    of its local rank.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL).
        timeout_seconds: longest wait for the other processes, here and in every collective.

    Raises:
        UserError: processes are missing after the timeout; the message names them.
    """
    _join(device, timeout_seconds)


def _join(device: torch.device, timeout_seconds: float) -> dist.Store:
    place = world()
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        _take_gpu(place)
    else:
        megatron_cpu.install()
    store = dist.HashStore() if place.master is None else meet(place, timeout)
    dist.init_process_group(
        backend(device),
        store=dist.PrefixStore("default", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=torch.device("cuda", place.local_rank) if device.type == "cuda" else None,
    )
    return store


def _local_masks(store: dist.Store, place: World, own: frozenset[int]) -> list[frozenset[int]]:
    """Affinity masks of all processes on this machine. Launchers differ in whether processes share
    the cores or are bound to their own, and only the masks tell."""
    if place.local_size == 1:
        return [own]
    host = socket.gethostname()
    keys = [f"cpus/{host}/{local_rank}" for local_rank in range(place.local_size)]
    store.set(keys[place.local_rank], json.dumps(sorted(own)))
    try:
        store.wait(keys)
    except dist.DistError as error:
        missing = ", ".join(key.rpartition("/")[2] for key in keys if not store.check([key]))
        raise UserError(f"on {host}, local rank(s) {missing} of {place.local_size} went away at the start") from error
    return [frozenset(json.loads(store.get(key))) for key in keys]


def shutdown() -> None:
    """Leaves the process group, if this process is in one, and drops Megatron-Core's groups."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def on_first_rank(failure_title: str, action: Callable[[], _T]) -> _T:
    """Runs a file-system action on rank 0; its result, or its failure, is every rank's.

    Raises:
        UserError: ``failure_title`` and what went wrong.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = str(error) or repr(error)
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise UserError(f"{failure_title}: {failure}")
    return cast(_T, result)


def gather_to_all(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """What every rank of a group (of all, when None) gives, by rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _take_gpu(place: World) -> None:
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise UserError(
            f"{place.local_size} processes on {socket.gethostname()}, but it has {count} visible GPUs: "
            "start one process per GPU, or set device to 'cpu'"
        )
    torch.cuda.set_device(place.local_rank)


def meet(place: World, timeout: timedelta) -> dist.Store:
    """Connects to the store at the master's address and waits until every rank has done so.

    Args:
        place: this process among more than one, with the master's address.
        timeout: longest wait.

    Raises:
        UserError: ranks are missing after the timeout; the message names them.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store = _connect(place, timeout)
    store.set(f"arrived/{place.rank}", socket.gethostname())
    # One key for all: waiting for each rank's own would cost size^2 registrations.
    if store.add("arrived", 1) == place.size:
        store.set("complete", "")
    left = max(deadline - time.monotonic(), 1.0)
    try:
        store.wait(["complete"], timedelta(seconds=left))
    except dist.DistError as error:
        raise UserError(_missing_message(store, place, timeout)) from error
    store.set_timeout(timeout)
    return store


def _connect(place: World, timeout: timedelta) -> dist.Store:
    assert place.master is not None
    host, port = place.master
    # torchrun's agent may hold the store itself: then every rank is a client.
    is_server = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listening = os.environ.pop(LISTEN_FD, None) if is_server else None
    try:
        store = dist.TCPStore(
            host,
            port,
            place.size,
            is_master=is_server,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(listening) if listening is not None else None,
        )
        # The agent's store outlives the processes that it starts again: what was left in it is not theirs.
        return dist.PrefixStore(f"attempt_{attempt()}", store)
    except dist.DistError as error:
        if is_server:
            raise UserError(f"rank 0 cannot listen at {host}:{port}: {error}") from error
        raise UserError(
            f"rank {place.rank} of {place.size} on {socket.gethostname()} could not reach rank 0 at {host}:{port} "
            f"within {timeout.total_seconds():g} s: rank 0 did not start, or the address is wrong or blocked"
        ) from error


def _missing_message(store: dist.Store, place: World, timeout: timedelta) -> str:
    assert place.master is not None
    where = f"at {place.master[0]}:{place.master[1]}"
    try:
        missing = [rank for rank in range(place.size) if not store.check([f"arrived/{rank}"])]
    except dist.DistError:
        return f"rank 0 of {place.size} went away {where} while rank {place.rank} waited for the others"
    names = ", ".join(map(str, missing[:_NAMED_RANKS])) + (" …" if len(missing) > _NAMED_RANKS else "")
    which = f"rank {names}" if len(missing) == 1 else f"ranks {names} ({len(missing)} in all)"
    return f"{which} of {place.size} did not arrive {where} within {timeout.total_seconds():g} s{_hosts_of(missing)}"


def _hosts_of(missing: list[int]) -> str:
    """Where the launcher starts the missing ranks, as far as it says so: a node that did not come has no own words."""
    expected = expected_hosts() or []
    hosts = list(dict.fromkeys(expected[rank] for rank in missing if rank < len(expected)))
    return f"; SLURM starts them on {', '.join(hosts[:_NAMED_RANKS])}" if hosts else ""
