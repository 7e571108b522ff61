"""`steptron config`: show and check a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from steptron.config.checks import check as run_checks
from steptron.config.checks import data_parallel_size, smallest_world_size
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.config.show import render, render_json

app = typer.Typer(no_args_is_help=True, help="Show and check a configuration.")

File = Annotated[Path, typer.Argument(help="YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that win over the file's.", metavar="a.b=c")]


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print every value with its source. The output is a configuration file itself."""
    loaded = load(file, overrides or ())
    typer.echo(render_json(loaded) if as_json else render(loaded), nl=as_json)


@app.command()
def check(
    file: File,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; the fewest that the layout takes when not given.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to check for; auto is what this machine has.")
    ] = "auto",
    data: Annotated[bool, typer.Option("--data", help="Also check that the dataset folders are there.")] = False,
) -> None:
    """Check a configuration without starting anything: print "ok" with a summary, or every problem."""
    config = load(file, overrides or ()).config
    processes = world_size if world_size is not None else smallest_world_size(config.parallel)
    run_checks(config, processes, device, check_data=data)
    typer.echo(f"ok: {file} on {processes} process{'' if processes == 1 else 'es'}")
    for line in _summary(config, processes):
        typer.echo(f"  {line}")


def _summary(config: PretrainConfig, processes: int) -> list[str]:
    model, parallel, train = config.model, config.parallel, config.train
    ranks = data_parallel_size(parallel, processes)
    micro_batches = train.global_batch_size // (train.micro_batch_size * ranks)
    ramp = f" (from {train.batch_ramp.start:,})" if train.batch_ramp is not None else ""
    return [
        f"model     {model.num_layers} layers, {model.mtp.depths} MTP, hidden {model.hidden_size}, "
        f"{model.moe.num_experts} experts top {model.moe.top_k}, {model.layout}",
        f"parallel  pipeline {parallel.pipeline} x data {ranks}; experts over {parallel.expert}",
        f"batch     {train.global_batch_size:,} sequences{ramp} of {config.data.sequence_length:,} tokens: "
        f"{micro_batches} x {train.micro_batch_size} per rank",
        f"training  {train.steps:,} steps, {config.optimizer.name}, {train.precision}",
    ]
