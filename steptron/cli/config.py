"""`steptron config`: show and check a configuration, and list its fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from steptron.config.checks import check_stages, smallest_world_size
from steptron.config.loader import load
from steptron.config.reference import FieldReference, field_references, is_below
from steptron.config.schema import OptimizerConfig, PretrainConfig
from steptron.config.show import render, render_json
from steptron.config.summary import describe_stage, summary
from steptron.errors import UserError
from steptron.optim.rules import ORTHOGONALISABLE, TRAINED_ROLES, rule_of
from steptron.planning.fitting import check_memory

app = typer.Typer(no_args_is_help=True, help="Show and check a configuration, and list its fields.")

File = Annotated[Path, typer.Argument(help="YAML file.")]
_WIDE = 160  # columns; below, cells are broken over lines, and rules keep the fields apart
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that win over the file's.", metavar="a.b=c")]


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    png: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Draw learning rate, batch, context and mixture over the tokens."),
    ] = None,
) -> None:
    """Print every value with its source, and the schedule of a run with stages as a table.

    The output is a configuration file itself; the table stands in it as a comment.
    """
    loaded = load(file, overrides or ())
    if png is not None:
        from steptron.planning import timetable

        try:
            timetable.plot(loaded.curriculum, png)
        except (OSError, ValueError) as error:
            raise UserError(f"--plot {png}: {error}") from error
    if as_json:
        typer.echo(render_json(loaded))
        return
    if loaded.curriculum.is_staged:
        from steptron.planning.timetable import table

        typer.echo("".join(f"# {line}\n" for line in table(loaded.curriculum)))
    typer.echo(render(loaded), nl=False)


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
    memory: Annotated[
        float | None, typer.Option(min=0, help="Memory of a device in GiB: also check that every stage fits it.")
    ] = None,
) -> None:
    """Check a configuration without starting anything: print "ok" with a summary, or every problem."""
    curriculum = load(file, overrides or ()).curriculum
    parallel = curriculum.stages[0].config.parallel
    processes = world_size if world_size is not None else smallest_world_size(parallel)
    check_stages(curriculum, processes, device, check_data=data)
    if memory is not None:
        check_memory(curriculum, processes, None if device == "auto" else device, memory)
    typer.echo(f"ok: {file} on {processes} process{'' if processes == 1 else 'es'}")
    for stage in curriculum.stages:
        if stage.name:
            typer.echo(f"  stage     {describe_stage(stage, curriculum)}")
        for line in summary(stage.config, processes):
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
