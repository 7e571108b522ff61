"""A localised blow-up, as the report saw it in its last MoE layers, and what clipping does about it.

A small MoE is trained with Muon on a corpus that a few bi-grams dominate: without clipping, with weight clipping and
with activation clipping, three seeds each. Beside it: the EP-group balance loss off and on. Corpus and runs are made by
`steptron data build` and `steptron pretrain`; every figure comes back from a metrics server. Runs that the folder holds
are not repeated.

    python -m tools.reproduce.blowup [DATASET] [--folder runs/soak/blowup] [--steps 1500] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from steptron.data.manifest import read_manifest
from steptron.errors import UserError
from steptron.train.records import ValidationRecord, read_records
from steptron_metrics.errors import MetricsError
from steptron_metrics.reading.reader import MetricsReader
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings

from .corpus import write_corpus
from .figures import draw_balance, draw_blow_up
from .readings import LoadAt, Readings, common_loss, load_at, peak, read, share_over, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = "tools/reproduce/blowup.yaml"
WORDS, PAIRS, RATE = 2_000_000, 2, 0.18
TOKENIZER = 512
LIMIT = 3.0  # of activation clipping
THRESHOLD = 100.0  # of weight clipping ...
CLIP_EVERY_STEPS = 100  # ... which happens at checkpoints
UNUSUAL = 8.0  # a ratio: sound layers of small models scatter between 2 and 6
BALANCE_WINDOW = 100  # steps over which losses and loads are averaged to compare them
RUN_TIMEOUT_SECONDS = 3600


@dataclass(frozen=True)
class Arm:
    """One of the settings that are compared.

    Attributes:
        name: begins the names of its runs.
        title: in tables and figures.
        overrides: of the configuration.
    """

    name: str
    title: str
    overrides: tuple[str, ...] = ()


BLOW_UP = (
    Arm("none", "no clipping"),
    Arm(
        "weights",
        "weight clipping",
        (
            f"optimizer.weight_clipping.threshold={THRESHOLD:g}",
            f"train.checkpoint.every_steps={CLIP_EVERY_STEPS}",
            "train.checkpoint.keep=1",
        ),
    ),
    Arm("activations", "activation clipping", (f"model.clamp.routed={{1: {LIMIT}, 2: {LIMIT}, 3: {LIMIT}}}",)),
)
# Without the update of the selection biases, which would balance both.
BALANCE = (
    Arm("ep-off", "EP loss off", ("balance.bias.rate=0", "balance.ep_loss_coefficient=0")),
    Arm("ep-report", "EP loss, 0.001", ("balance.bias.rate=0", "balance.ep_loss_coefficient=0.001")),
    Arm("ep-strong", "EP loss, 0.01", ("balance.bias.rate=0", "balance.ep_loss_coefficient=0.01")),
)


@dataclass(frozen=True)
class Run:
    """One training run of an arm."""

    arm: Arm
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.seed}"

    def overrides(self, dataset: Path) -> list[str]:
        """All that its figures depend on, beside the configuration file."""
        return [
            f"data.train=[{{path: {dataset}}}]",
            f"train.steps={self.steps}",
            f"train.seed={self.seed}",
            f"data.seed={self.seed}",
            *self.arm.overrides,
        ]

    def name_at_server(self, dataset: Path) -> str:
        """Another one for every configuration, so that nothing is read of a run that was made before with another."""
        return f"{self.name}-{hashlib.sha256(json.dumps(self.overrides(dataset)).encode()).hexdigest()[:8]}"


def build_dataset(folder: Path, num_words: int = WORDS) -> Path:
    """The corpus of the study as a dataset, made where it is not there yet."""
    dataset = folder / "data"
    if not dataset.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "corpus.jsonl"
        write_corpus(text, num_words, PAIRS, RATE)
        _steptron(
            ["data", "build", str(text), "--output", str(dataset), "--train-tokenizer", str(TOKENIZER)],
            folder / "data.log",
        )
        text.unlink()
    return dataset


def train(run: Run, dataset: Path, folder: Path, server: Server) -> float:
    """Runs it where it has not been run yet; its validation loss, nats.

    Raises:
        RuntimeError: it failed; the message names its log.
        TimeoutError: the server has not stored all that it sent.
    """
    record, output = folder / f"{run.name}.json", folder / run.name
    overrides = run.overrides(dataset)
    if (done := _read_record(record)) is None or done["overrides"] != overrides:
        arguments = ["pretrain", CONFIG, "--fresh", *overrides]
        name = run.name_at_server(dataset)
        arguments += [f"train.output={output}", f"telemetry.server={server.address}", f"telemetry.run={name}"]
        _steptron(arguments, folder / f"{run.name}.log")
        with MetricsReader(server.http_address) as reader:
            wait_for(reader, name, run.steps)
        done = {"overrides": overrides, "validation_loss": _validation_loss(output / "log.jsonl")}
        record.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"{run.name}: validation loss {done['validation_loss']:.4f} nats", flush=True)
    return float(done["validation_loss"])


def _read_record(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _validation_loss(log: Path) -> float:
    return [record.lm_loss for record in read_records(log) if isinstance(record, ValidationRecord)][-1]


def _steptron(arguments: Sequence[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [sys.executable, "-m", "steptron", *arguments],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_SECONDS,
        ).returncode
    if code:
        raise RuntimeError(f"steptron {arguments[0]} ended with exit code {code}: see {log}")


@dataclass(frozen=True)
class Results:
    """Of an arm, by seed."""

    losses: list[float]
    readings: list[Readings]


def study(
    arms: Sequence[Arm], seeds: Sequence[int], steps: int, dataset: Path, folder: Path, server: Server
) -> dict[Arm, Results]:
    """All runs of the arms, seed by seed, so that what there is can be compared at any time."""
    runs = [Run(arm, seed, steps) for seed in seeds for arm in arms]
    losses = {run: train(run, dataset, folder, server) for run in runs}
    with MetricsReader(server.http_address) as reader:
        readings = {run: read(reader, run.name_at_server(dataset), steps) for run in runs}
    return {
        arm: Results([losses[run] for run in runs if run.arm == arm], [readings[run] for run in runs if run.arm == arm])
        for arm in arms
    }


def print_blow_up(results: dict[Arm, Results], seeds: Sequence[int]) -> None:
    table = Table(
        title="Where max/median of the experts' output norms was largest (running medians of 25 steps)",
        caption=f"over {UNUSUAL:g}: share of all steps. alignment: of the expert with the largest norm (median of the "
        "layer's experts). train: mean loss of the last third of the steps",
    )
    for column in (
        "clipping",
        "seed",
        "train",
        "validation",
        "max/median",
        f"over {UNUSUAL:g}",
        "step",
        "layer",
        "largest",
        "median",
        "alignment",
    ):
        table.add_column(column, justify="left" if column == "clipping" else "right")
    for arm, of_arm in results.items():
        for seed, loss, readings in zip(seeds, of_arm.losses, of_arm.readings, strict=True):
            top, last = peak(readings), readings.loss[-len(readings.loss) // 3 :].mean()
            table.add_row(
                *(arm.title, str(seed), f"{last:.4f}", f"{loss:.4f}", f"{top.ratio:.1f}"),
                *(f"{share_over(readings, UNUSUAL):.0%}", str(top.step), str(top.layer)),
                *(f"{top.largest:.0f}", f"{top.median:.0f}", f"{top.alignment:.2f} ({top.usual_alignment:.2f})"),
            )
    Console(width=130).print(table)


def balance_at_equal_loss(results: dict[Arm, Results]) -> tuple[float, dict[Arm, list[LoadAt]]]:
    """The loss that all runs have come down to, and each one's load there."""
    loss = common_loss([readings for of_arm in results.values() for readings in of_arm.readings], BALANCE_WINDOW)
    return loss, {
        arm: [load_at(readings, loss, BALANCE_WINDOW) for readings in of_arm.readings]
        for arm, of_arm in results.items()
    }


def print_balance(results: dict[Arm, Results], seeds: Sequence[int]) -> None:
    loss, loads = balance_at_equal_loss(results)
    table = Table(
        title=f"Max/mean load of EP groups over the first {BALANCE_WINDOW} steps whose mean loss is {loss:.3f} or less"
    )
    for column in (
        "balance loss",
        "seed",
        "step",
        "in a micro-batch",
        "over the window",
        "at the end",
        "validation loss",
    ):
        table.add_column(column, justify="left" if column == "balance loss" else "right")
    for arm, of_arm in results.items():
        for index, seed in enumerate(seeds):
            load, readings = loads[arm][index], of_arm.readings[index]
            table.add_row(
                *(arm.title, str(seed), str(load.step), f"{load.in_micro_batch:.3f}", f"{load.over_window:.3f}"),
                *(f"{readings.load[-BALANCE_WINDOW:].mean():.3f}", f"{of_arm.losses[index]:.4f}"),
            )
    Console(width=130).print(table)


def summary(blow_up: dict[Arm, Results], balance: dict[Arm, Results]) -> dict[str, object]:
    """Medians over seeds, for the last line."""
    found: dict[str, object] = {}
    if blow_up:
        found["max_over_median"] = {
            arm.name: round(statistics.median(peak(readings).ratio for readings in of_arm.readings), 2)
            for arm, of_arm in blow_up.items()
        }
    if balance:
        _, loads = balance_at_equal_loss(balance)
        found["load_at_equal_loss"] = {
            arm.name: round(statistics.median(load.in_micro_batch for load in of_arm), 3)
            for arm, of_arm in loads.items()
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", type=Path, nargs="?", help="another dataset of a vocabulary of at most 512")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak/blowup"), help="where runs are kept")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of each run")
    parser.add_argument("--balance-steps", type=int, default=300, help="of each run with the balance loss off or on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=["blow-up", "balance"], help="one of the two studies")
    parser.add_argument("--figures", type=Path, help="where the figures go; into the folder when left out")
    chosen = parser.parse_args(arguments)
    if chosen.balance_steps < BALANCE_WINDOW:
        parser.error(f"--balance-steps: {BALANCE_WINDOW} at least, over which losses and loads are averaged")
    try:
        _both_studies(chosen)
    except (UserError, MetricsError, RuntimeError, TimeoutError) as error:
        sys.exit(f"blowup: {error}")


def _both_studies(chosen: argparse.Namespace) -> None:
    folder: Path = chosen.folder.resolve()
    figures: Path = chosen.figures or folder
    for one in (folder, figures):
        one.mkdir(parents=True, exist_ok=True)
    dataset = build_dataset(folder) if chosen.dataset is None else chosen.dataset.resolve()
    read_manifest(dataset)
    blow_up: dict[Arm, Results] = {}
    balance: dict[Arm, Results] = {}
    with running(Settings(folder / "server", port=0, http_port=0)) as server:
        if chosen.only != "balance":
            blow_up = study(BLOW_UP, chosen.seeds, chosen.steps, dataset, folder, server)
            draw_blow_up({arm.title: results.readings for arm, results in blow_up.items()}, figures / "blowup.png")
            print_blow_up(blow_up, chosen.seeds)
        if chosen.only != "blow-up":
            balance = study(BALANCE, chosen.seeds, chosen.balance_steps, dataset, folder, server)
            draw_balance({arm.title: results.readings for arm, results in balance.items()}, figures / "ep_loss.png")
            print_balance(balance, chosen.seeds)
    print(json.dumps(summary(blow_up, balance)))


if __name__ == "__main__":
    main()
