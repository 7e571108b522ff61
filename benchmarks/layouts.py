"""Communication of a training step: bytes counted in the collectives over the plan's formula, for every layout.

`nano` trains with Muon on random tokens in up to four local processes. Counted is the second step, by process group:
the payload of each operation (`steptron.parallel.traffic` says which buffer that is), mean over ranks, and the bytes
that rings would send of it. The wire column is the formula's: of tokens sent to experts, that of uniform routing.

    python -m benchmarks.layouts [LAYOUT ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import print_result, print_table
from steptron.config.checks import check
from steptron.config.loader import load
from steptron.parallel.traffic import CommunicationVolume
from steptron.planning.communication import step_communication
from steptron.planning.placement import placement

if TYPE_CHECKING:
    from steptron.config.schema import PretrainConfig

NANO = Path(__file__).resolve().parents[1] / "configs" / "pretrain" / "nano.yaml"
COMMON = ["data.sequence_length=64", "train.global_batch_size=8", "train.micro_batch_size=1", "optimizer.name=muon"]
TIMEOUT_SECONDS = 300


class Layout(NamedTuple):
    """Processes, and overrides of the configuration."""

    world_size: int
    overrides: tuple[str, ...]


def _layout(world_size: int, *parallel: str) -> Layout:
    return Layout(world_size, tuple(f"parallel.{override}" for override in parallel))


Result = tuple[str, int, CommunicationVolume | str]
"""Layout, rank, and what it communicated or why it failed."""
RECOMPUTE = "train.recompute=[{parts: [attention, ffn]}]"
LAYOUTS = {
    "DP2": _layout(2),
    "DP4": _layout(4),
    "DP4, AdamW": Layout(4, ("optimizer.name=adamw",)),
    "DP4, all-reduced": Layout(4, ("optimizer.sharding.reduction=all_reduce",)),
    "PP2xDP2": _layout(4, "pipeline=2"),
    "TP2xDP2": _layout(4, "tensor=2"),
    "PP2": _layout(2, "pipeline=2"),
    "PP4": _layout(4, "pipeline=4"),
    "PP2xVPP2": _layout(2, "pipeline=2", "virtual_pipeline=2"),
    "PP4xVPP2": _layout(4, "pipeline=4", "virtual_pipeline=2"),
    "EP4": _layout(4, "expert=4"),
    "EP4 allgather": _layout(4, "expert=4", "dispatcher=allgather"),
    "TP2": _layout(2, "tensor=2"),
    "CP2": _layout(2, "context=2"),
    "CP4": _layout(4, "context=4"),
    "TP2xEP2": _layout(2, "tensor=2", "expert=2"),
    "TP2xEP4": _layout(4, "tensor=2", "expert=4"),
    "CP2xEP2": _layout(2, "context=2", "expert=2"),
    "PP2xEP2": _layout(4, "pipeline=2", "expert=2"),
    "PP2xTP2": _layout(4, "pipeline=2", "tensor=2"),
    "DP2xEP2": _layout(4, "expert=2"),
    "DP4 on 2 nodes": _layout(4, "node_size=2"),
    "TP2xCP2xEP2, recomputed": Layout(4, ("parallel.tensor=2", "parallel.context=2", "parallel.expert=2", RECOMPUTE)),
}


def configuration(world_size: int, overrides: Sequence[str]) -> PretrainConfig:
    """nano under a layout."""
    config = load(NANO, [*COMMON, *overrides]).config
    check(config, world_size)
    return config


def count(rank: int, world_size: int, overrides: Sequence[str]) -> CommunicationVolume:
    """Trains two steps inside the initialised default group; what this rank communicated in the second."""
    import torch

    from benchmarks.batches import random_batches
    from steptron.parallel.mesh import build_mesh
    from steptron.profiling.communication import CommunicationCounter, group_names
    from steptron.train.step import TrainStep

    config = configuration(world_size, overrides)
    mesh = build_mesh(config.parallel)
    names = group_names(mesh.groups)
    for name, group in mesh.by_node.items():
        names |= group.group_names(name)
    step = TrainStep(config, mesh, torch.device("cpu"))
    batches = random_batches(config, mesh)
    step.run(batches, 1e-4, 1e-3)
    with CommunicationCounter(names) as counter:
        step.run(batches, 1e-4, 1e-3)
    return counter.volume


def formula(world_size: int, overrides: Sequence[str]) -> list[CommunicationVolume]:
    """What the plan says, by rank."""
    config = configuration(world_size, overrides)
    placed = placement(config, world_size)
    return [step_communication(config, placed, rank) for rank in range(world_size)]


def _serve(rank: int, folder: str, layouts: Mapping[str, Layout], results: multiprocessing.Queue[Result]) -> None:
    """One process: the layouts one after the other, each in process groups of its own."""
    import torch
    import torch.distributed as dist

    from steptron.platform import megatron_cpu
    from steptron.platform.distributed import shutdown

    torch.set_num_threads(1)
    megatron_cpu.install()
    for number, (name, (world_size, overrides)) in enumerate(layouts.items()):
        if rank >= world_size:
            continue
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{number}", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        try:
            results.put((name, rank, count(rank, world_size, overrides)))
        except Exception:
            results.put((name, rank, traceback.format_exc()))
            raise
        dist.barrier()
        shutdown()


def measure(layouts: Mapping[str, Layout]) -> dict[str, list[CommunicationVolume]]:
    """Counted volumes by layout and rank.

    Raises:
        RuntimeError: a process failed.
        queue.Empty: there was no result in time.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Result] = context.Queue()
    size = max(layout.world_size for layout in layouts.values())
    counted: dict[str, dict[int, CommunicationVolume]] = {name: {} for name in layouts}
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_serve, args=(rank, folder, layouts, results)) for rank in range(size)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(sum(layout.world_size for layout in layouts.values())):
                name, rank, volume = results.get(timeout=TIMEOUT_SECONDS)
                if isinstance(volume, str):
                    raise RuntimeError(f"{name}, rank {rank}: {volume}")
                counted[name][rank] = volume
            for worker in workers:
                worker.join(10)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
    return {name: [volumes[rank] for rank in sorted(volumes)] for name, volumes in counted.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}; all by default")
    names = parser.parse_args().layouts or list(LAYOUTS)
    if unknown := [name for name in names if name not in LAYOUTS]:
        parser.error(f"unknown layout {unknown[0]!r}; there are {', '.join(LAYOUTS)}")
    measured = measure({name: LAYOUTS[name] for name in names})
    rows, ratios = [], {}
    for name in names:
        world_size, overrides = LAYOUTS[name]
        counted = CommunicationVolume.sum(measured[name])
        expected = CommunicationVolume.sum(formula(world_size, overrides))
        ratios[name] = counted.total().payload / expected.total().payload
        for group in (None, *sorted({*counted.groups, *expected.groups})):
            own, planned = counted.total(group), expected.total(group)
            rows.append(
                [
                    name if group is None else f"  {group}",
                    f"{own.payload / world_size:,.0f}",
                    f"{planned.payload / world_size:,.0f}",
                    f"{own.payload / planned.payload:.6f}" if planned.payload else "-",
                    f"{planned.wire / world_size:,.0f}",
                    f"{own.calls / world_size:,.0f}",
                ]
            )
    columns = ["layout, group", "counted", "formula", "ratio", "on the wire", "calls"]
    print_table("Bytes per step and rank", columns, rows)
    print_result("layouts", ratios, dict.fromkeys(ratios, 1.0))


if __name__ == "__main__":
    main()
