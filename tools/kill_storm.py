"""Kills processes of a supervised run at random moments and compares what it ends with to a run left alone.

Four processes of `nano` (PP2 x EP2, or `--layout`) train with checkpoints every few steps. Again and again a process,
drawn at random, is killed by SIGKILL after a random time; the launcher starts all of them again. In the end every
checkpoint must be whole, and the log and all tensors of the last checkpoint those of the other run, bit for bit.

    python tools/kill_storm.py DATA [--kills 30] [--folder runs/soak/kills] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from steptron.checkpoint.folder import list_checkpoints, partial_folders
from steptron.checkpoint.verification import problems
from steptron.train.records import EventRecord, Record, StepRecord, ValidationRecord, read_records

REPOSITORY = Path(__file__).resolve().parents[1]
PROCESSES = 4
RATES = ("tokens_per_second", "step_seconds", "data_seconds", "model_tflops", "mfu", "memory_bytes")


def command(data: Path, output: Path, steps: int, layout: Sequence[str], restarts: int) -> list[str]:
    """A run, with ``restarts``."""
    return [
        *(sys.executable, "-m", "steptron", "pretrain", "configs/pretrain/nano.yaml"),
        *(f"data.train.0.path={data}", f"train.output={output}", f"train.steps={steps}"),
        *(
            "data.sequence_length=64",
            "train.global_batch_size=8",
            "optimizer.schedule={kind: constant, warmup_steps: 0}",
        ),
        *("train.validation.every_steps=25", "train.validation.batches=1", "train.checkpoint.every_steps=5"),
        *("train.logging.tensorboard=false", *layout),
        *("--nproc", str(PROCESSES), "--max-restarts", str(restarts), "--fresh"),
    ]


def storm(run: list[str], log: Path, kills: int, chance: random.Random) -> list[str]:
    """Runs a command and kills its processes; what was killed when, for the report.

    Raises:
        RuntimeError: the run failed, or ended before all kills.
    """
    done: list[str] = []
    with log.open("w") as output:
        launcher = subprocess.Popen(run, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    try:
        for number in range(kills):
            workers = wait_for_workers(launcher)
            # From the start-up over loading to steps and saves.
            time.sleep(chance.uniform(0.5, 20.0))
            victim = chance.choice(workers)
            seen = tail(log)
            try:
                victim.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess as error:
                raise RuntimeError(f"the run ended before kill {number + 1}: give it more steps") from error
            done.append(f"{number + 1}: rank {workers.index(victim)} after: {seen}")
            print(done[-1], flush=True)
            wait_until_gone(workers)
        code = launcher.wait(timeout=1800)
    finally:
        launcher.terminate()
        launcher.wait(timeout=60)
    if code != 0:
        raise RuntimeError(f"exit code {code}: {tail(log)}")
    return done


def wait_for_workers(launcher: subprocess.Popen[bytes], seconds: float = 120.0) -> list[psutil.Process]:
    """The processes that the launcher has started, once all are there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and launcher.poll() is None:
        workers = psutil.Process(launcher.pid).children()
        if len(workers) == PROCESSES:
            return sorted(workers, key=lambda worker: worker.pid)
        time.sleep(0.1)
    raise RuntimeError(f"no {PROCESSES} processes within {seconds:g} s (launcher's exit code: {launcher.poll()})")


def wait_until_gone(workers: Sequence[psutil.Process], seconds: float = 60.0) -> None:
    _, alive = psutil.wait_procs(workers, timeout=seconds)
    if alive:
        raise RuntimeError(f"processes {[worker.pid for worker in alive]} are still there {seconds:g} s after a kill")


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:60] if lines else "nothing"


def figures(output: Path) -> list[dict[str, object]]:
    """The log without what depends on the clock or the machine."""

    def plain(record: Record) -> dict[str, object]:
        return {"kind": record.kind} | {name: value for name, value in vars(record).items() if name not in RATES}

    records = read_records(output / "log.jsonl")
    return [plain(record) for record in records if isinstance(record, StepRecord | ValidationRecord | EventRecord)]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def faults(whole: Path, killed: Path) -> list[str]:
    """What differs between the two runs, and what is damaged."""
    found = []
    if figures(whole) != figures(killed):
        found.append("the logs differ")
    names = [[folder.name for folder in list_checkpoints(output)] for output in (whole, killed)]
    if names[0] != names[1]:
        found.append(f"checkpoints: {names[0]} and {names[1]}")
    for folder in list_checkpoints(killed):
        found += [f"{folder.name}: {text}" for text in problems(folder)]
    found += [f"left over: {folder.name}" for folder in partial_folders(killed / "checkpoints")]
    expected, ended = (tensors(list_checkpoints(output)[-1]) for output in (whole, killed))
    if expected.keys() != ended.keys():
        found.append("the last checkpoints hold other tensors")
    found += [f"{key} differs" for key in expected if key in ended and not torch.equal(expected[key], ended[key])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="a dataset with a vocabulary of 512")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak/kills"))
    parser.add_argument("--layout", nargs="*", default=["parallel.pipeline=2", "parallel.expert=2"], metavar="OVERRIDE")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    whole, killed = folder / "whole", folder / "killed"
    data = arguments.data.resolve()
    with (folder / "whole.log").open("w") as output:
        run = command(data, whole, arguments.steps, arguments.layout, 0)
        subprocess.run(run, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, check=True)
    run = command(data, killed, arguments.steps, arguments.layout, arguments.kills + 5)
    chance = random.Random(arguments.seed)
    done = storm(run, folder / "killed.log", arguments.kills, chance)
    found = faults(whole, killed)
    print("\n".join(found) or f"{len(done)} kills: logs, checkpoints and every tensor are those of the run left alone")
    print(json.dumps({"kills": len(done), "steps": arguments.steps, "faults": found}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
