"""The `steptron` command: its sub-commands, and how errors are shown."""

from __future__ import annotations

import os
import warnings
from importlib import metadata
from typing import Annotated, ClassVar

import typer

from steptron import __version__
from steptron.cli.lazy import LazyCommand, LazyGroup
from steptron.platform import threads


class _SteptronGroup(LazyGroup):
    lazy_commands: ClassVar[dict[str, LazyCommand]] = {
        "pretrain": LazyCommand("steptron.cli.pretrain:pretrain", "Pre-train a model."),
        "generate": LazyCommand("steptron.cli.generate:generate", "Write text with a checkpoint."),
        "eval": LazyCommand("steptron.cli.eval:evaluate", "Held-out loss of a model, dataset by dataset."),
        "sft": LazyCommand(
            "steptron.cli.sft:app", "Make an assistant: build datasets of conversations, train on them."
        ),
        "data": LazyCommand("steptron.cli.data:app", "Build and inspect datasets."),
        "config": LazyCommand("steptron.cli.config:app", "Show and check a configuration."),
        "plan": LazyCommand("steptron.cli.plan:plan", "Show what a layout costs and what its ranks hold."),
        "model": LazyCommand("steptron.cli.model:app", "Show a model; logits and traces of its weights."),
        "checkpoint": LazyCommand(
            "steptron.cli.checkpoint:app", "Inspect, verify, prune, reshard; move and compare weights."
        ),
        "metrics": LazyCommand("steptron.cli.metrics:app", "Run a metrics server; list, export and plot what it has."),
        "doctor": LazyCommand("steptron.cli.doctor:doctor", "Test this machine and say what to mend."),
    }


app = typer.Typer(
    cls=_SteptronGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _steptron(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="STEPTRON_DEBUG", help="Show the traceback of every error.")
    ] = False,
) -> None:
    """Pre-training of Step-3.5-style sparse mixture-of-experts language models."""


@app.command()
def version() -> None:
    """Print the versions of Steptron and of what it runs on."""
    typer.echo(f"steptron {__version__}")
    for package in ("torch", "megatron-core"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package} not installed")


def main() -> None:
    """Entry point of the console script."""
    # Deprecations inside the engine are ours to follow up, not the user's.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|megatron)\.")
    os.environ.update(threads.default_environment())
    app(prog_name="steptron")
