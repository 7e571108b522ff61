"""Validation loss of Muon and AdamW at equal tokens, each at its best learning rate of a small sweep.

Short runs of the quickstart's model on the quickstart's data: one seed for the sweep of each optimizer, then the other
seeds at the best rate. Every run is `steptron pretrain` itself; runs that a folder holds already are not repeated.

    make quickstart && python -m benchmarks.muon_against_adamw runs/quickstart/data
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import print_result, print_table
from steptron.train.records import StepRecord, ValidationRecord, read_records

CONFIG = "configs/pretrain/tiny-quickstart.yaml"
RATES = {"muon": [1e-3, 2e-3, 4e-3, 8e-3], "adamw": [1e-3, 2e-3, 4e-3, 8e-3]}
SEEDS = [1234, 1235, 1236]
RUN_TIMEOUT = 3600


@dataclass(frozen=True)
class Run:
    """One short training run."""

    optimizer: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.rate:g}-{self.seed}"


def train(run: Run, dataset: Path, folder: Path, steps: int) -> Path:
    """Runs it where it has not been run yet; returns its log."""
    output = folder / run.name
    log = output / "log.jsonl"
    if log.exists() and any(
        record.step == steps for record in read_records(log) if isinstance(record, ValidationRecord)
    ):
        return log
    overrides = [
        "parallel.expert=1",
        f"data.train=[{{path: {dataset}}}]",
        f"optimizer.name={run.optimizer}",
        f"optimizer.lr={run.rate}",
        f"optimizer.schedule.min_lr={run.rate / 10}",
        f"train.seed={run.seed}",
        f"data.seed={run.seed}",
        f"train.steps={steps}",
        f"train.output={output}",
        "train.threads=1",
        "train.checkpoint.every_steps=null",
        "train.validation.every_steps=null",
        "train.validation.batches=32",
        "train.logging.tensorboard=false",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "steptron", "pretrain", CONFIG, "--fresh", *overrides],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
    )
    if done.returncode:
        raise SystemExit(f"{run.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    print(f"{run.name}: {validation_loss(log):.4f} nats", flush=True)
    return log


def validation_loss(log: Path) -> float:
    """The last one, of the main head, nats."""
    return [record.lm_loss for record in read_records(log) if isinstance(record, ValidationRecord)][-1]


def losses_of(log: Path) -> tuple[list[int], list[float]]:
    """Consumed tokens and loss of the main head, step by step."""
    records = [record for record in read_records(log) if isinstance(record, StepRecord)]
    return [record.consumed_tokens for record in records], [record.lm_loss for record in records]


def plot(logs: dict[str, list[Path]], path: Path) -> None:
    """Training losses of all seeds at the best rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (label, own), colour in zip(logs.items(), ("C0", "C1"), strict=True):
        for index, log in enumerate(own):
            tokens, losses = losses_of(log)
            smooth = [statistics.fmean(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
            axes.plot(tokens, smooth, color=colour, linewidth=1, label=label if index == 0 else None)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss of the main head (nats), mean of five steps")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a dataset of `steptron data prepare`, such as the quickstart's")
    parser.add_argument("--folder", type=Path, default=Path("runs/muon_against_adamw"), help="where runs are kept")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--plot", type=Path, help="where to draw the losses")
    arguments = parser.parse_args()
    dataset, folder, steps = arguments.dataset.resolve(), arguments.folder.resolve(), arguments.steps

    with ThreadPoolExecutor(arguments.jobs) as pool:

        def losses(runs: list[Run]) -> list[float]:
            return [validation_loss(log) for log in pool.map(lambda run: train(run, dataset, folder, steps), runs)]

        sweep = [Run(optimizer, rate, SEEDS[0]) for optimizer, rates in RATES.items() for rate in rates]
        swept = dict(zip(sweep, losses(sweep), strict=True))
        best = {
            optimizer: min((run for run in sweep if run.optimizer == optimizer), key=lambda run: swept[run])
            for optimizer in RATES
        }
        finals = {
            optimizer: losses([Run(optimizer, run.rate, seed) for seed in SEEDS]) for optimizer, run in best.items()
        }
    print_table(
        f"Validation loss after {steps} steps, seed {SEEDS[0]} (nats)",
        ["optimizer", "learning rate", "loss", "best"],
        [
            [run.optimizer, f"{run.rate:g}", f"{loss:.4f}", "*" if run in best.values() else ""]
            for run, loss in swept.items()
        ],
    )
    print_table(
        "At the best rates, all seeds (nats)",
        ["optimizer", *map(str, SEEDS), "mean", "spread"],
        [
            [optimizer, *(f"{loss:.4f}" for loss in own), f"{statistics.fmean(own):.4f}", f"{max(own) - min(own):.4f}"]
            for optimizer, own in finals.items()
        ],
    )
    if arguments.plot is not None:
        logs = {
            f"{optimizer}, lr {run.rate:g}": [
                folder / Run(optimizer, run.rate, seed).name / "log.jsonl" for seed in SEEDS
            ]
            for optimizer, run in best.items()
        }
        plot(logs, arguments.plot)
    lower = sum(muon < adamw for muon, adamw in zip(finals["muon"], finals["adamw"], strict=True))
    print_result(
        "muon_against_adamw",
        {
            "adamw_minus_muon_nats": statistics.fmean(finals["adamw"]) - statistics.fmean(finals["muon"]),
            "seeds_where_muon_is_lower": lower,
        },
        {"adamw_minus_muon_nats": 0.0, "seeds_where_muon_is_lower": len(SEEDS)},
    )


if __name__ == "__main__":
    main()
