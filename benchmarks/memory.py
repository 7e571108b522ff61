"""Peak memory of a training step: the plan's estimate over what is measured, for models, layouts and options.

What is measured is every allocation and release of tensors on the CPU (torch's profiler), from before the model
exists to the end of the second step; the peak is that of the second step. The process itself, threads' own buffers
and gloo's are in neither figure.

    python -m benchmarks.memory
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import print_result, print_table
from steptron.config.loader import load
from steptron.planning.memory import assume, rank_memory
from steptron.planning.placement import placement

if TYPE_CHECKING:
    from steptron.config.schema import PretrainConfig
    from steptron.data.batch import MicroBatch
    from steptron.parallel.mesh import Mesh

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "pretrain"
TIMEOUT_SECONDS = 300
COMMON = ["train.products=fp32", "balance.ep_groups=4", "balance.ep_loss_coefficient=1e-3"]
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
    "tiny, PP2 x VPP2": Case(
        "tiny-quickstart", 2, (*TINY, ONE, "parallel.pipeline=2", "parallel.virtual_pipeline=2")
    ),
    "tiny, TP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.tensor=2")),
    "tiny, CP2": Case("tiny-quickstart", 2, (*TINY, ONE, "parallel.context=2")),
    "tiny, CP2 x EP2, plain": Case("tiny-quickstart", 2, (*TINY, "parallel.context=2", "train.kernels=plain")),
    "nano, native": Case("nano", 1, NANO),
    "nano, plain": Case("nano", 1, (*NANO, "train.kernels=plain")),
    "nano, bf16": Case("nano", 1, (*NANO, "train.precision=bf16")),
    "nano, PP2": Case("nano", 2, (*NANO, "parallel.pipeline=2")),
}
"""Where TP2 or CP2 keeps everything on both ranks alike, experts included, EP is 1."""


class Peak(NamedTuple):
    """Bytes on one rank.

    Attributes:
        measured: peak of the second step.
        largest: blocks alive then, (operator, size, how many), most bytes first.
    """

    measured: int
    largest: list[tuple[str, int, int]]


def measure(rank: int, world_size: int, preset: str, overrides: list[str]) -> Peak:
    """Trains two steps inside the initialised default process group."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from steptron.parallel.mesh import build_mesh
    from steptron.profiling.memory import read_changes, timeline
    from steptron.train.step import TrainStep

    config = _config(preset, overrides)
    mesh = build_mesh(config.parallel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = TrainStep(config, mesh, torch.device("cpu"))
        batches = make_batches(config, mesh)
        step.run(batches, 1e-4, 1e-3)
        start = time.time_ns()
        step.run(batches, 1e-4, 1e-3)
    changes = read_changes(prof, "cpu", (0, 1 << 63))
    before = [change for change in changes if change.time_ns < start]
    # What was alive at the start of the step stays in the list of blocks by beginning the timeline before it.
    history = timeline(changes, 0, changes[0].time_ns)
    peak = max(total for at, total in zip(history.times_ns, history.totals, strict=True) if at >= start)
    until = history.totals.index(peak, len(before))
    alive = timeline([*changes[:until]], 0, changes[0].time_ns)
    counted = Counter((block.operator, block.bytes) for block in alive.alive)
    largest = sorted(((name, size, n) for (name, size), n in counted.items()), key=lambda item: -item[1] * item[2])
    return Peak(peak, largest[:40])


def make_batches(config: PretrainConfig, mesh: Mesh) -> list[MicroBatch]:
    """Random micro-batches of one document per row, as many as a step of this data-parallel rank takes."""
    import torch

    from steptron.data.batch import MicroBatch

    size, length = config.train.micro_batch_size, config.data.sequence_length
    generator = torch.Generator().manual_seed(mesh.data_rank)
    batches = []
    for _ in range(config.train.global_batch_size // (size * mesh.data_size)):
        stream = torch.randint(0, config.model.vocab_size, (size, length + 1), generator=generator)
        batches.append(
            MicroBatch(
                tokens_BS=stream[:, :-1].contiguous(),
                labels_BS=stream[:, 1:].contiguous(),
                loss_mask_BS=torch.ones(size, length, dtype=torch.bool),
                positions_BS=torch.arange(length).repeat(size, 1),
                documents_BS=torch.zeros(size, length, dtype=torch.int64),
            )
        )
    return batches


def estimate(preset: str, world_size: int, overrides: list[str], rank: int) -> float:
    """The plan's peak of a rank, in bytes."""
    config = _config(preset, overrides)
    assumed = replace(assume(config, "cpu"), several_documents=False)
    return rank_memory(config, placement(config, world_size), rank, assumed).peak


def _config(preset: str, overrides: list[str]) -> PretrainConfig:
    return load(CONFIGS / f"{preset}.yaml", [*COMMON, *overrides]).config


def _work(rank: int, world_size: int, store: str, case: Case, results: multiprocessing.Queue[tuple[int, Peak]]) -> None:
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
    rows, ratios = [], {}
    for name in chosen:
        case = CASES[name]
        for rank, peak in enumerate(run(case)):
            planned = estimate(case.preset, case.world_size, list(case.overrides), rank)
            key = name if case.world_size == 1 else f"{name}, rank {rank}"
            ratios[key] = planned / peak.measured
            rows.append([key, f"{planned / 2**20:.1f}", f"{peak.measured / 2**20:.1f}", f"{ratios[key]:.3f}"])
    print_table("Peak memory of a step, MiB", ["run", "planned", "measured", "ratio"], rows)
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    print_result("memory", ratios | {"largest error": worst}, {"largest error": 0.15})


if __name__ == "__main__":
    main()
