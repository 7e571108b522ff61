"""Four local processes (PP2 x EP2) against one on the same cores: what the layout costs where it cannot gain.

Both train `tiny` (quickstart configuration) on the same global batches, one process with a thread per
core, four with the cores shared; runs alternate. Four processes have no more cores, so the ratio of
step times is below 1, and is the product of two factors, both measured:

- work: CPU seconds of a step, all processes added up, one process's over four's (smaller products,
  weights packed by every process that uses them, dispatch, messages, waiting by spinning);
- busy: the share of the cores' time in which any process runs, four's over one's (waiting by sleeping:
  pipeline bubbles, collectives, whoever is late).

    python -m benchmarks.local_processes DATASET
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import print_result, print_table
from steptron.platform.cores import usable_cores
from steptron.train.records import StepRecord, read_records

CONFIG = "configs/pretrain/tiny-quickstart.yaml"
SHORT, LONG = 6, 18  # steps: what lies between is free of start-up
COMMON = [
    "train.global_batch_size=16",
    "train.kernels=auto",
    "train.products=fp32",
    "optimizer.schedule.warmup_steps=1",
    "train.validation.every_steps=null",
    "train.checkpoint.every_steps=null",
]
LAYOUTS = {
    "one process": (1, ["parallel.expert=1", "train.micro_batch_size=4"]),
    "four, PP2 x EP2": (4, ["parallel.pipeline=2", "parallel.expert=2", "train.micro_batch_size=2"]),
}


class Cost(NamedTuple):
    """Per step.

    Attributes:
        wall: seconds.
        cpu: seconds of all processes.
    """

    wall: float
    cpu: float


def run(dataset: Path, folder: Path, nproc: int, overrides: list[str], steps: int) -> tuple[list[float], float]:
    """Seconds of every step, and CPU seconds of the whole command."""
    arguments = [f"data.train=[{{path: {dataset}}}]", f"train.steps={steps}", f"train.output={folder}"]
    command = [sys.executable, "-m", "steptron", "pretrain", CONFIG, "--fresh", "--nproc", str(nproc)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *COMMON, *overrides, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    records = [record for record in read_records(folder / "log.jsonl") if isinstance(record, StepRecord)]
    return [record.step_seconds for record in records], cpu


def measure(dataset: Path, nproc: int, overrides: list[str]) -> Cost:
    """What a step costs once the run is going."""
    with tempfile.TemporaryDirectory() as folder:
        _, short_cpu = run(dataset, Path(folder), nproc, overrides, SHORT)
        seconds, long_cpu = run(dataset, Path(folder), nproc, overrides, LONG)
    return Cost(statistics.median(seconds[SHORT:]), (long_cpu - short_cpu) / (LONG - SHORT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", type=Path, help="dataset folder, such as runs/quickstart/data")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    costs: dict[str, list[Cost]] = {name: [] for name in LAYOUTS}
    for number in range(arguments.rounds):
        for name, (nproc, overrides) in LAYOUTS.items():
            costs[name].append(measure(arguments.dataset, nproc, overrides))
            print(f"round {number + 1}, {name}: {costs[name][-1].wall:.3f} s a step", flush=True)
    one, four = (
        Cost(statistics.median(cost.wall for cost in costs[name]), statistics.median(cost.cpu for cost in costs[name]))
        for name in LAYOUTS
    )
    cores = usable_cores().count
    rows = [
        [name, f"{cost.wall:.3f}", f"{cost.cpu:.3f}", f"{100 * cost.cpu / cost.wall / cores:.0f}"]
        for name, cost in zip(LAYOUTS, (one, four), strict=True)
    ]
    title = f"A step of 16 sequences of 256 tokens, {cores} cores, load average {os.getloadavg()[0]:.1f}"
    print_table(title, ["layout", "s/step", "CPU s/step", "cores busy, %"], rows)
    ratios = {
        "four_over_one": one.wall / four.wall,
        "work": one.cpu / four.cpu,
        "busy": (four.cpu / four.wall) / (one.cpu / one.wall),
    }
    print_result("local_processes", ratios, {})


if __name__ == "__main__":
    main()
