"""Start-up: from the command `steptron pretrain` to the end of the first optimizer step, by phase.

One process, and four (two pipeline stages x two expert-parallel ranks). Caches are warm: the dataset
exists, and an untimed run of each has brought the files into memory. The ratio is the limit over the
median of the real command, which ends with the first line of the run's log. Phases are of separate
runs, in which the processes note when each phase ends; the last process counts.

    python -m benchmarks.startup
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import median, print_result, print_table

LIMITS = {"one_process": 20.0, "four_processes": 30.0}  # seconds
TARGETS = dict.fromkeys(LIMITS, 1.0)
ARGUMENTS = {
    "one_process": ["parallel.pipeline=1", "parallel.expert=1"],
    "four_processes": ["--nproc", "4", "parallel.pipeline=2", "parallel.expert=2", "train.micro_batch_size=2"],
}
PRESETS = {"nano": ("nano.yaml", 512), "tiny": ("tiny-quickstart.yaml", 4096)}
"""Configuration and size of the vocabulary."""
PHASES = ("torch's import", "process group", "engine's import", "mesh, data", "model, optimizer", "first step")
TIMEOUT_SECONDS = 300.0

_REPOSITORY = Path(__file__).parents[1]
_STAMPS = "STEPTRON_STARTUP_STAMPS"  # folder of the files in which the processes note times


def prepare(preset: str, folder: Path) -> list[str]:
    """Builds a small dataset in ``folder``; returns the arguments of a run of one step on it."""
    file, vocabulary = PRESETS[preset]
    texts = [str(Path(os.__file__).with_name(name)) for name in ("argparse.py", "inspect.py", "typing.py")]
    build = ["data", "build", *texts, "--output", str(folder / "data"), "--train-tokenizer", str(vocabulary)]
    subprocess.run(
        [sys.executable, "-m", "steptron", *build, "--workers", "1", "--validation-fraction", "0"],
        cwd=_REPOSITORY,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
    )
    return [
        str(_REPOSITORY / "configs" / "pretrain" / file),
        f"data.train=[{{path: {folder / 'data'}}}]",
        *("train.steps=1", "optimizer.schedule.warmup_steps=0", "train.logging.every_steps=1"),
    ]


def seconds_to_first_step(arguments: list[str], folder: Path) -> float:
    """Seconds from the start of the command to the first record in the run's log."""
    log = folder / "log.jsonl"
    with _run("steptron", [*arguments, f"train.output={folder}"]) as process:
        start = time.perf_counter()
        while not (log.exists() and log.stat().st_size):
            if process.poll() is not None or time.perf_counter() - start > TIMEOUT_SECONDS:
                process.kill()
                raise RuntimeError(f"no first step: exit code {process.wait()}\n{process.communicate()[0]}")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        output = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}\n{output}")
    return seconds


def seconds_by_phase(arguments: list[str], folder: Path) -> list[float]:
    """Seconds of each of ``PHASES`` in one run."""
    stamps = folder / "stamps"
    stamps.mkdir(parents=True)
    start = time.time()
    with _run("benchmarks.startup", [*arguments, f"train.output={folder / 'run'}"], {_STAMPS: str(stamps)}) as process:
        output = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    if process.returncode:
        raise RuntimeError(f"the run ended with exit code {process.returncode}\n{output}")
    ranks = [json.loads(file.read_text()) for file in stamps.iterdir()]
    ends = [start, *(max(rank[phase] for rank in ranks) for phase in PHASES)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _run(module: str, arguments: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, "pretrain", *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stamped_command() -> None:
    """The `steptron` command, whose processes note when each phase ends."""
    from steptron.cli.main import main as command
    from steptron.platform import launch, threads

    os.environ.update(threads.default_environment())  # before torch, as the command does
    # Workers are this module again.
    launch.run_local = partial(launch.run_local, module="benchmarks.startup")
    if launch.under_launcher() or "--nproc" not in sys.argv:
        _stamp_phases()
    command()


def _stamp_phases() -> None:
    from steptron.platform import distributed

    rank = distributed.world().rank
    ends: dict[str, float] = {}

    def end(phase: str) -> None:
        ends.setdefault(phase, time.time())

    join = distributed.start

    def start(*args: Any, **kwargs: Any) -> Any:
        end("torch's import")
        device = join(*args, **kwargs)
        end("process group")
        from steptron.train import loop

        end("engine's import")

        class StampedStep(loop.TrainStep):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                end("mesh, data")
                super().__init__(*args, **kwargs)
                end("model, optimizer")

            def run(self, *args: Any, **kwargs: Any) -> Any:
                result = super().run(*args, **kwargs)
                end("first step")
                Path(os.environ[_STAMPS], f"rank{rank}.json").write_text(json.dumps(ends))
                return result

        loop.TrainStep = StampedStep  # type: ignore[misc]
        return device

    distributed.start = start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each command")
    options = parser.parse_args()
    rows, medians = [], {}
    with tempfile.TemporaryDirectory(prefix="steptron-startup-") as name:
        folder = Path(name)
        common = prepare(options.preset, folder)
        for layout, own in ARGUMENTS.items():
            arguments = [*common, *own]
            load = os.getloadavg()[0]
            seconds_to_first_step(arguments, folder / layout / "warm")
            totals, phases = [], []
            for turn in range(options.rounds):
                totals.append(seconds_to_first_step(arguments, folder / layout / f"total{turn}"))
                phases.append(seconds_by_phase(arguments, folder / layout / f"phases{turn}"))
            medians[layout] = median(totals)
            figures = [medians[layout], min(totals), max(totals), *map(median, map(list, zip(*phases, strict=True)))]
            rows.append([layout, *(f"{figure:.2f}" for figure in figures), f"{load:.1f}"])
    labels = ["median", "fastest", "slowest", *PHASES, "load average"]
    table = [
        [label, *values] for label, values in zip(labels, zip(*(row[1:] for row in rows), strict=True), strict=True)
    ]
    print_table(f"Start-up of {options.preset}, seconds, {options.rounds} runs", ["", *ARGUMENTS], table)
    print_result("startup", {layout: LIMITS[layout] / medians[layout] for layout in LIMITS}, TARGETS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pretrain"]:
        stamped_command()
    else:
        main()
