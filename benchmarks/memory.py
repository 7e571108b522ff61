"""Peak memory of a training step: the plan's estimate over what is measured, for models, layouts and options.

What is measured is every allocation and release of tensors on the CPU (torch's profiler), from before the model
exists to the end of the second step; the peak is that of the second step. The process itself, threads' own buffers
and gloo's (whose collectives work on copies) are in neither figure. Ratios are those of the peaks, and of what the
peaks are above the memory between steps: activations and what is alive while operations run.

    python -m benchmarks.memory
"""

from __future__ import annotations

import bisect
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import print_result, print_table
from steptron.config.loader import load
from steptron.planning.memory import RankMemory, assume, rank_memory
from steptron.planning.placement import placement

if TYPE_CHECKING:
    from steptron.config.schema import PretrainConfig
    from steptron.profiling.memory import Change

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "pretrain"
TIMEOUT_SECONDS = 300
COMMON = ["optimizer.name=adamw", "train.products=fp32", "balance.ep_groups=4", "balance.ep_loss_coefficient=1e-3"]
ALL_PARTS = "train.recompute=[{parts: [attention, ffn]}]"
SMALL_PARTS = "train.recompute=[{parts: [norm, activation, moe_permutation]}]"


class Case(NamedTuple):
    """A run: preset, processes, overrides."""

    preset: str
    world_size: int
    overrides: tuple[str, ...] = ()


TINY = ("data.sequence_length=512", "train.micro_batch_size=2", "train.global_batch_size=16")
NANO = ("data.sequence_length=256", "train.micro_batch_size=2", "train.global_batch_size=16")
ONE = "parallel.expert=1"
MUON = "optimizer.name=muon"
LARGE_UPDATES = ("data.sequence_length=32", "train.micro_batch_size=1", "train.global_batch_size=2", ONE, MUON)
"""Passes of so few tokens that the update takes most."""
CASES = {
    "tiny, native": Case("tiny-quickstart", 1, (*TINY, ONE)),
    "tiny, plain": Case("tiny-quickstart", 1, (*TINY, ONE, "train.kernels=plain")),
    "tiny, bf16": Case("tiny-quickstart", 1, (*TINY, ONE, "train.precision=bf16")),
    "tiny, recomputed": Case("tiny-quickstart", 1, (*TINY, ONE, ALL_PARTS)),
    "tiny, plain, recomputed": Case("tiny-quickstart", 1, (*TINY, ONE, "train.kernels=plain", ALL_PARTS)),
    "tiny, parts recomputed": Case("tiny-quickstart", 1, (*TINY, ONE, SMALL_PARTS)),
    "tiny, plain, parts recomputed": Case("tiny-quickstart", 1, (*TINY, ONE, "train.kernels=plain", SMALL_PARTS)),
    "tiny, SGD": Case("tiny-quickstart", 1, (*TINY, ONE, "optimizer.name=sgd")),
    "tiny, EP2": Case("tiny-quickstart", 2, TINY),
    "tiny, EP2, plain": Case("tiny-quickstart", 2, (*TINY, "train.kernels=plain")),
    "tiny, EP2, allgather": Case("tiny-quickstart", 2, (*TINY, "parallel.dispatcher=allgather")),
    "tiny, EP2, parts recomputed": Case("tiny-quickstart", 2, (*TINY, SMALL_PARTS)),
    "tiny, PP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.pipeline=2")),
    "tiny, PP2, recomputed": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.pipeline=2", ALL_PARTS)),
    "tiny, PP2 x VPP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "tiny, TP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.tensor=2")),
    "tiny, CP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.context=2")),
    "tiny, CP2 x EP2, plain": Case("tiny-quickstart", 2, (*TINY, "parallel.context=2", "train.kernels=plain")),
    "tiny, Muon": Case("tiny-quickstart", 1, (*TINY, ONE, MUON)),
    "tiny, Muon, bf16": Case("tiny-quickstart", 1, (*TINY, ONE, MUON, "train.precision=bf16")),
    "tiny, Muon, few tokens": Case("tiny-quickstart", 1, LARGE_UPDATES),
    "tiny, Muon, few tokens, plain": Case("tiny-quickstart", 1, (*LARGE_UPDATES, "train.kernels=plain")),
    "tiny, Muon, few tokens, plain fp32": Case(
        "tiny-quickstart", 1, (*LARGE_UPDATES, "train.kernels=plain", "optimizer.muon.precision=fp32")
    ),
    "tiny, DP2": Case("tiny-quickstart", 2, (*TINY, ONE)),
    "tiny, Muon, DP2": Case("tiny-quickstart", 2, (*TINY, ONE, MUON)),
    "tiny, Muon, DP2, few tokens": Case("tiny-quickstart", 2, LARGE_UPDATES),
    "tiny, Muon, TP2, few tokens": Case("tiny-quickstart", 2, (*LARGE_UPDATES, "parallel.tensor=2")),
    "tiny, Muon, EP2": Case("tiny-quickstart", 2, (*TINY, MUON)),
    "nano, native": Case("nano", 1, NANO),
    "nano, plain": Case("nano", 1, (*NANO, "train.kernels=plain")),
    "nano, bf16": Case("nano", 1, (*NANO, "train.precision=bf16")),
    "nano, PP2": Case("nano", 2, (*NANO, "parallel.pipeline=2")),
}
"""Where TP2 or CP2 keeps everything on both ranks alike, experts included, EP is 1."""


class Peak(NamedTuple):
    """Bytes on one rank.

    Attributes:
        fixed: alive between the two steps.
        measured: peak of the second step.
        largest: blocks alive then, (operator, size, how many), most bytes first.
    """

    fixed: int
    measured: int
    largest: list[tuple[str, int, int]]


def measure(rank: int, world_size: int, preset: str, overrides: list[str]) -> Peak:
    """Trains two steps inside the initialised default process group."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.batches import random_batches
    from steptron.parallel.mesh import build_mesh
    from steptron.profiling.memory import read_changes
    from steptron.train.step import TrainStep

    config = _config(preset, overrides)
    mesh = build_mesh(config.parallel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = TrainStep(config, mesh, torch.device("cpu"))
        batches = random_batches(config, mesh)
        step.run(batches, 1e-4, 1e-3)
        start = time.time_ns()
        step.run(batches, 1e-4, 1e-3)
        step.sharded.gather.wait()  # a thread that records while the profiler stops may end the process
    return _peak(read_changes(prof, "cpu", (0, 1 << 63)), start)


def _peak(changes: list[Change], start_ns: int) -> Peak:
    """The most alive from a moment on.

    The profiler does not see what gloo's threads release: what collectives take for themselves is left out. A block
    whose memory is given out again is gone.
    """
    blocks: dict[int, Change] = {}
    addresses: list[int] = []
    fixed = total = most = 0
    at_peak: list[Change] = []

    def drop(address: int) -> None:
        nonlocal total
        total -= blocks.pop(address).num_bytes
        del addresses[bisect.bisect_left(addresses, address)]

    for change in changes:
        if any(name.startswith(("c10d::", "gloo:")) for name in change.inside):
            continue
        if change.time_ns < start_ns:
            fixed = total
        if change.num_bytes < 0:
            if change.address in blocks:
                drop(change.address)
            continue
        first = max(0, bisect.bisect_right(addresses, change.address) - 1)
        last = bisect.bisect_left(addresses, change.address + change.num_bytes)
        for address in addresses[first:last]:
            if address + blocks[address].num_bytes > change.address:
                drop(address)
        blocks[change.address] = change
        bisect.insort(addresses, change.address)
        total += change.num_bytes
        if change.time_ns >= start_ns and total > most:
            most, at_peak = total, list(blocks.values())
    counted = Counter((_operator(block), block.num_bytes) for block in at_peak)
    blocks_by_bytes = sorted(counted.items(), key=lambda item: -item[0][1] * item[1])
    return Peak(fixed, most, [(name, size, count) for (name, size), count in blocks_by_bytes])


def _operator(block: Change) -> str:
    return next((name for name in block.inside if name.startswith("steptron")), block.inside[0] if block.inside else "")


def estimate(preset: str, world_size: int, overrides: list[str], rank: int) -> RankMemory:
    """The plan of a rank."""
    config = _config(preset, overrides)
    assumed = replace(assume(config, "cpu"), several_documents=False)
    return rank_memory(config, placement(config, world_size), rank, assumed)


def _config(preset: str, overrides: list[str]) -> PretrainConfig:
    return load(CONFIGS / f"{preset}.yaml", [*COMMON, *overrides]).config


def _work(rank: int, world_size: int, store: str, case: Case, results: multiprocessing.Queue[tuple[int, Peak]]) -> None:
    # Kineto's own messages would come between the lines of the table.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    import torch
    import torch.distributed as dist

    from steptron.platform import megatron_cpu

    torch.set_num_threads(1)
    megatron_cpu.install()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    results.put((rank, measure(rank, world_size, case.preset, list(case.overrides))))
    dist.barrier()
    dist.destroy_process_group()


def run(case: Case) -> list[Peak]:
    """Measures a case in processes of its own; peaks by rank.

    Raises:
        RuntimeError: a process ended without a result.
        queue.Empty: there was none in time.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, Peak]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_work, args=(rank, case.world_size, f"{folder}/store", case, results))
            for rank in range(case.world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            peaks = dict(results.get(timeout=TIMEOUT_SECONDS) for _ in workers)
        finally:
            for worker in workers:
                worker.join(10)
                if worker.is_alive():
                    worker.kill()
    return [peaks[rank] for rank in range(case.world_size)]


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    rows, ratios, moving = [], {}, {}
    for name in chosen:
        case = CASES[name]
        for rank, peak in enumerate(run(case)):
            planned = estimate(case.preset, case.world_size, list(case.overrides), rank)
            key = name if case.world_size == 1 else f"{name}, rank {rank}"
            ratios[key] = planned.peak / peak.measured
            moving[key] = (planned.peak - planned.fixed) / (peak.measured - planned.fixed)
            sizes = (planned.peak, peak.measured, planned.fixed)
            rows.append([key, *(f"{size / 2**20:.1f}" for size in sizes), f"{ratios[key]:.3f}", f"{moving[key]:.3f}"])
    columns = ["run", "planned", "measured", "of it fixed", "ratio", "without fixed"]
    print_table("Peak memory of a step, MiB", columns, rows)
    worst = {
        "largest error": max(abs(ratio - 1) for ratio in ratios.values()),
        "largest error without what is fixed": max(abs(ratio - 1) for ratio in moving.values()),
    }
    print_result("memory", ratios | worst, {"largest error": 0.15})


if __name__ == "__main__":
    main()
