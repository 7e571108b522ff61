"""`steptron config`: show and check a configuration, and list its fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from steptron.config.checks import check as run_checks
from steptron.config.checks import smallest_world_size
from steptron.config.loader import load
from steptron.config.reference import FieldReference, field_references, is_below
from steptron.config.schema import OptimizerConfig, PretrainConfig
from steptron.config.show import render, render_json
from steptron.config.summary import summary
from steptron.errors import UserError
from steptron.optim.rules import ORTHOGONALISABLE, TRAINED_ROLES, rule_of

app = typer.Typer(no_args_is_help=True, help="Show and check a configuration, and list its fields.")

File = Annotated[Path, typer.Argument(help="YAML file.")]
_WIDE = 160  # columns; below, cells are broken over lines, and rules keep the fields apart
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
    for line in summary(config, processes):
        typer.echo(f"  {line}")


@app.command()
def fields(
    prefix: Annotated[str, typer.Argument(help="Only this field and those below, such as optimizer.schedule.")] = "",
) -> None:
    """List every field: name, values, default and description. N stands for the number of a list item."""
    listed = [field for field in field_references(PretrainConfig) if not prefix or is_below(field.name, prefix)]
    if not listed:
        raise UserError(f"no field is named {prefix}; the sections are {', '.join(PretrainConfig.model_fields)}")
    _print_fields(listed)


@app.command()
def roles() -> None:
    """List the roles that optimizer.roles can name: by default with optimizer.name muon, and what Muon can take."""
    defaults = OptimizerConfig(lr=1.0)
    rows = [
        (role.value, rule_of(defaults, role).algorithm.value, "yes" if role in ORTHOGONALISABLE else "no")
        for role in TRAINED_ROLES
    ]
    _print_table(("role", "by default", "can be muon"), rows)


def _print_fields(listed: list[FieldReference]) -> None:
    rows = [(field.name, field.values, field.default, field.description) for field in listed]
    _print_table(("field", "values", "default", "description"), rows)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere a line per row, its cells separated by tabs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*head, show_lines=len(head) > 3 and console.width < _WIDE)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)
