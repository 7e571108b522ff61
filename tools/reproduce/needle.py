"""A needle beyond the window: found by the full layers, after the extension of the context and not before.

A small model learns to answer questions about needles in noise, in sequences of 64 tokens; a second stage of the same
run goes on with 512 and a larger RoPE theta (`tools/reproduce/needle.yaml`). The checkpoints at the ends of both stages
are asked for needles at all distances in documents of 508 tokens, and the last one once more with its full layers, or
its sliding ones, silent. Data and runs are made by `steptron data build` and `steptron pretrain`; runs that the folder
holds are not repeated.

    python -m tools.reproduce.needle [--folder runs/soak/needle] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from steptron.checkpoint.restore import restore_model
from steptron.checkpoint.weights import open_weights
from steptron.config.layout import AttentionKind
from steptron.data.batch import MicroBatch
from steptron.data.manifest import MANIFEST_FILE
from steptron.data.tokenizer import Tokenizer
from steptron.model.assembly import StepModel
from steptron.platform import distributed

from .haystack import haystack, write_haystacks

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = "tools/reproduce/needle.yaml"
VOCABULARY = 272  # special tokens and bytes
SHORT, LONG = 64, 512
BORDERS = (16, 46, 64, 128, 256, LONG)
"""Distances are told apart by these: the window, what three sliding layers reach, the base stage's sequences."""
RUN_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Accuracy:
    """How often needles were named.

    Attributes:
        asked, right: for each of ``BORDERS``, questions about needles that are nearer (and not nearer than the border
            before), and those of them that were answered rightly.
    """

    asked: tuple[int, ...]
    right: tuple[int, ...]

    def share(self, nearest: int) -> float:
        """Of the needles from a border on."""
        first = BORDERS.index(nearest) + 1
        return sum(self.right[first:]) / sum(self.asked[first:])


@dataclass(frozen=True)
class Outcome:
    """What a seed has come to.

    Attributes:
        short_before: at the end of the base stage, in documents as long as its sequences.
        before, after: at the end of the base stage and of the extension, in long documents.
        without_full, without_sliding: after the extension, with the attention of these layers silent.
    """

    short_before: Accuracy
    before: Accuracy
    after: Accuracy
    without_full: Accuracy
    without_sliding: Accuracy


def prepare(folder: Path, short: int = 12_000, long: int = 2_500) -> None:
    """Builds the data of both stages, of so many documents, where they are not there."""
    made = {"short": (short, 24, SHORT - 4), "long": (long, 300, LONG - 4)}
    for name, (count, shortest, longest) in made.items():
        if (folder / name / MANIFEST_FILE).exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_haystacks(folder / f"{name}.jsonl", count, shortest, longest, seed=1)
        tokenizer = ("--train-tokenizer", VOCABULARY) if name == "short" else ("--tokenizer", folder / "short")
        _steptron("data", "build", folder / f"{name}.jsonl", "--output", folder / name, *tokenizer, "--workers", 1)


def train(folder: Path, seed: int, overrides: Sequence[str] = ()) -> Path:
    """Runs both stages, or goes on with them; returns the run's folder."""
    output = folder / f"seed{seed}"
    _steptron(
        *("pretrain", REPOSITORY / CONFIG, f"train.output={output}", f"train.seed={seed}", f"data.seed={seed}"),
        *(f"data.train.0.path={folder / 'short'}", f"stages.1.data.train=[{{path: {folder / 'long'}}}]", *overrides),
    )
    return output


def _steptron(*arguments: object) -> None:
    command = [sys.executable, "-m", "steptron", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS, stdout=subprocess.DEVNULL, cwd=REPOSITORY)


def measure(folder: Path, output: Path, documents: int = 100) -> Outcome:
    """Asks the checkpoints at the ends of both stages about new documents."""
    base, extended = sorted((output / "checkpoints").iterdir())
    tokenizer = Tokenizer.load(folder / "short")
    with _model(base) as model:
        short_before = accuracy(model, tokenizer, SHORT - 4, documents)
        before = accuracy(model, tokenizer, LONG - 4, documents)
    with _model(extended) as model:
        after = accuracy(model, tokenizer, LONG - 4, documents)
        silent = []
        for kind in (AttentionKind.FULL, AttentionKind.SLIDING):
            with _silent(model, kind):
                silent.append(accuracy(model, tokenizer, LONG - 4, documents))
    return Outcome(short_before, before, after, *silent)


@contextmanager
def _model(checkpoint: Path) -> Iterator[StepModel]:
    device, _ = distributed.start("cpu", threads=None, timeout_seconds=60)
    try:
        yield restore_model(open_weights(checkpoint), device)
    finally:
        distributed.shutdown()


@contextmanager
def _silent(model: StepModel, kind: AttentionKind) -> Iterator[None]:
    """Layers of a kind whose attention adds nothing."""
    handles = [
        model.get_submodule(f"layers.{layer.index}.attention").register_forward_hook(_nothing)
        for layer in model.spec.layers
        if layer.attention.kind is kind
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """In the place of what a module puts out."""
    return torch.zeros_like(output)


@torch.no_grad()
def accuracy(model: StepModel, tokenizer: Tokenizer, length: int, documents: int, seed: int = 1_000_003) -> Accuracy:
    """Asks about documents of one length that no stage has seen."""
    draw = random.Random(seed)
    asked, right = [0] * len(BORDERS), [0] * len(BORDERS)
    positions_BS = torch.arange(length)[None]
    for _ in range(documents):
        document = haystack(draw, length)
        tokens_BS = torch.tensor([tokenizer.encode(document.text)])
        zeros = torch.zeros_like(tokens_BS)
        logits = model.logits(MicroBatch(tokens_BS, zeros, zeros.bool(), positions_BS, zeros))
        assert isinstance(logits, tuple)
        said = logits[0][0].argmax(dim=-1)
        for distance, place in zip(document.distances, document.answers, strict=True):
            group = next(number for number, border in enumerate(BORDERS) if distance < border)
            asked[group] += 1
            right[group] += int(said[place - 1] == tokens_BS[0, place])
    return Accuracy(tuple(asked), tuple(right))


# ------------------------------------------------------------------------------------- the study


TITLES = {
    "short_before": "base stage, documents of 60 tokens",
    "before": "base stage, documents of 508 tokens",
    "after": "extended, documents of 508 tokens",
    "without_full": "extended, full layers silent",
    "without_sliding": "extended, sliding layers silent",
}


def _draw(outcomes: dict[int, Outcome], png: Path) -> None:
    from matplotlib.figure import Figure

    colours = {"before": "#D55E00", "after": "#0072B2", "without_full": "#CC79A7", "without_sliding": "#009E73"}
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=130)
    axes = figure.subplots()
    labels = [f"{low}–{high - 1}" for low, high in zip((1, *BORDERS[:-1]), BORDERS, strict=True)]
    for name, colour in colours.items():
        for number, outcome in enumerate(outcomes.values()):
            measured: Accuracy = getattr(outcome, name)
            shares = [right / max(asked, 1) for right, asked in zip(measured.right, measured.asked, strict=True)]
            label = TITLES[name] if number == 0 else None
            axes.plot(labels, shares, color=colour, marker="o", markersize=4, linewidth=1.2, alpha=0.8, label=label)
    axes.axhline(1 / 6, color="#555555", linestyle=(0, (6, 3)), linewidth=1)
    axes.annotate(
        "chance, within the class asked for", (0, 1 / 6), xytext=(0, 4), textcoords="offset points", fontsize=8
    )
    axes.set(xlabel="distance of the needle, tokens", ylabel="needles named", ylim=(-0.02, 1.02))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, format="png")


def _show(outcomes: dict[int, Outcome]) -> None:
    table = Table("", "seed", *(f"< {border}" for border in BORDERS), title="Needles named, by distance in tokens")
    for name, title in TITLES.items():
        for seed, outcome in outcomes.items():
            measured: Accuracy = getattr(outcome, name)
            shares = [f"{r / a:.2f}" if a else "-" for r, a in zip(measured.right, measured.asked, strict=True)]
            table.add_row(title, str(seed), *shares)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak/needle"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--figure", type=Path, help="PNG to write; in the folder when not given")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    prepare(folder)
    outcomes = {}
    for seed in arguments.seeds:
        print(f"seed {seed}", flush=True)
        outcomes[seed] = measure(folder, train(folder, seed))
    _show(outcomes)
    found = {
        seed: {name: {"asked": getattr(one, name).asked, "right": getattr(one, name).right} for name in TITLES}
        for seed, one in outcomes.items()
    }
    (folder / "needle.json").write_text(json.dumps({"borders": BORDERS, "seeds": found}, indent=1) + "\n")
    _draw(outcomes, arguments.figure or folder / "needle.png")


if __name__ == "__main__":
    main()
