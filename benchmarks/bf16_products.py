"""Loss curves of bf16 products against fp32 with three seeds: `tiny` on the quickstart's dataset, one process.

The runs see the same data in the same order; seeds differ in the initial values. The bf16 run starts
from the first seed. Curves are means over 10 steps. The spread is that of the fp32 seeds (largest minus
smallest loss), the distance that of the bf16 run from the fp32 run of its seed. Ratios of spread over
distance, of their means over the run and of their largest values: above 1, rounding the operands changes
less than other initial values do. (Of three seeds, a fourth would lie outside their range half of the time.)

    python -m benchmarks.bf16_products DATASET [--plot docs/figures/bf16_products.png]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness import print_result, print_table
from steptron.train.records import StepRecord, read_records

CONFIG = "configs/pretrain/tiny-quickstart.yaml"
SEEDS = (1, 2, 3)
WINDOW = 10
RUNS = {**{f"fp32, seed {seed}": ("fp32", seed) for seed in SEEDS}, "bf16, seed 1": ("bf16", 1)}


def train(dataset: Path, folder: Path, steps: int, products: str, seed: int) -> np.ndarray:
    """Losses of the main head, one per step."""
    overrides = [
        f"data.train=[{{path: {dataset}}}]",
        "parallel.expert=1",
        f"train.steps={steps}",
        f"train.output={folder}",
        f"train.products={products}",
        f"train.seed={seed}",
        "train.kernels=native",
        "train.global_batch_size=4",
    ]
    command = [sys.executable, "-m", "steptron", "pretrain", CONFIG, *overrides, "--fresh"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    records = read_records(folder / "log.jsonl")
    return np.array([record.lm_loss for record in records if isinstance(record, StepRecord)])


def smooth(losses: np.ndarray) -> np.ndarray:
    """Means over WINDOW steps."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")


def plot(curves: dict[str, np.ndarray], path: Path) -> None:
    """The curves, and below them their distances from the fp32 run of seed 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained", dpi=130)
    losses, distances = figure.subplots(2, 1, sharex=True)
    reference = curves["fp32, seed 1"]
    styles = {
        "fp32, seed 1": "#0072B2",
        "fp32, seed 2": "#56B4E9",
        "fp32, seed 3": "#009E73",
        "bf16, seed 1": "#D55E00",
    }
    for name, curve in curves.items():
        steps = np.arange(WINDOW, WINDOW + len(curve))
        losses.plot(steps, curve, label=name, color=styles[name], linewidth=1.3)
        if name != "fp32, seed 1":
            distances.plot(steps, curve - reference, label=name, color=styles[name], linewidth=1.3)
    losses.set_ylabel("loss, nats per token")
    distances.set_ylabel("difference from fp32, seed 1")
    distances.set_xlabel(f"step (means over {WINDOW})")
    distances.axhline(0.0, color="#555555", linewidth=0.8)
    losses.legend()
    distances.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", type=Path, help="dataset folder, such as runs/quickstart/data")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, help="figure to write")
    arguments = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (products, seed)) in enumerate(RUNS.items()):
            print(f"{name} ...", flush=True)
            curves[name] = smooth(train(arguments.dataset, Path(folder) / str(number), arguments.steps, products, seed))
    seeds = np.stack([curves[f"fp32, seed {seed}"] for seed in SEEDS])
    spread = seeds.max(axis=0) - seeds.min(axis=0)
    distance = np.abs(curves["bf16, seed 1"] - curves["fp32, seed 1"])
    rows = [
        [
            str(step + WINDOW),
            *(f"{curve[step]:.4f}" for curve in curves.values()),
            f"{spread[step]:.4f}",
            f"{distance[step]:.4f}",
        ]
        for step in np.linspace(0, len(spread) - 1, 7).astype(int)
    ]
    print_table(f"Loss, means over {WINDOW} steps", ["step", *curves, "spread of seeds", "bf16 from fp32"], rows)
    print(f"distance within the spread at {np.mean(distance <= spread):.0%} of the steps")
    if arguments.plot is not None:
        plot(curves, arguments.plot)
        table = np.column_stack([np.arange(WINDOW, WINDOW + len(spread)), *curves.values()])
        header = ",".join(["step", *(name.replace(", ", " ") for name in curves)])
        np.savetxt(arguments.plot.with_suffix(".csv"), table, "%.5g", delimiter=",", header=header, comments="")
    ratios = {"mean": float(spread.mean() / distance.mean()), "largest": float(spread.max() / distance.max())}
    print_result("bf16_products", ratios, {"mean": 1.0})


if __name__ == "__main__":
    main()
