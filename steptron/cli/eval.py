"""``steptron eval``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from steptron.inspection.evaluation import Evaluation


def evaluate(
    weights: Annotated[
        Path,
        typer.Argument(help="Checkpoint, a run's folder (its newest checkpoint), or a released model's folder."),
    ],
    data: Annotated[list[Path], typer.Argument(help="Datasets, one for each domain; their validation splits count.")],
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per sequence; those that it was trained on when not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a forward pass.")] = 4,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="At most so many sequences of a dataset.")] = None,
    packing: Annotated[
        Literal["stream", "best_fit"], typer.Option(help="How rows are filled, see data.packing.")
    ] = "stream",
    metadata: Annotated[
        Literal["in_loss", "context_only"], typer.Option(help="Whether metadata of documents count.")
    ] = "in_loss",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Held-out loss of a model on each dataset: nats per token, bits per byte of text, and MTP losses."""
    from steptron.errors import UserError
    from steptron.platform import distributed

    device, _ = distributed.start("auto", threads=None, timeout_seconds=60)

    from rich.console import Console

    from steptron.checkpoint.restore import restore_model
    from steptron.checkpoint.weights import open_weights
    from steptron.config.schema import DataConfig, DatasetConfig
    from steptron.inspection.evaluation import evaluate as evaluate_domain
    from steptron.inspection.evaluation import open_domains

    opened = open_weights(weights)
    length = sequence_length or opened.sequence_length
    if length is None:
        raise UserError(f"{weights} does not say which sequences it was trained on: give --sequence-length")
    named = [DatasetConfig(path=folder) for folder in data]
    settings = DataConfig(train=named, sequence_length=length, packing=packing, metadata=metadata)
    sources = open_domains(data, settings)
    for source in sources:
        source.check_vocabulary(opened.model.vocab_size)
    model = restore_model(opened, device)
    found = []
    with Console(stderr=True).status("") as status:
        for source in sources:

            def report(done: int, total: int, name: Path = source.datasets[0].path) -> None:
                status.update(f"{name}: {done:,} of {total:,} sequences")

            found.append(evaluate_domain(model, source, device, batch_size, max_sequences, report))
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"dataset": str(one.dataset)} for one in found], indent=2))
    else:
        _print(found)
    distributed.shutdown()


def _print(found: list[Evaluation]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("dataset", *(("tokens", "nats per token", "bits per byte")))
    for depth in range(len(found[0].mtp_losses)):
        table.add_column(f"MTP {depth + 1}")
    for one in found:
        losses = [f"{one.lm_loss:.4f}", _or_unknown(one.bits_per_byte), *(f"{loss:.4f}" for loss in one.mtp_losses)]
        table.add_row(str(one.dataset), f"{one.tokens:,}", *losses)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def _or_unknown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
