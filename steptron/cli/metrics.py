"""`steptron metrics`: the metrics server, and what it has to tell."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steptron.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from steptron_metrics.reading.source import Source

app = typer.Typer(
    name="metrics",
    help="Run a metrics server; list, export, plot and delete what it has.",
    no_args_is_help=True,
)

_Where = Annotated[
    str,
    typer.Argument(
        help="Address of a server's page (host:port or a URL), the server's folder, or URL of its PostgreSQL database.",
        metavar="ADDRESS|FOLDER",
    ),
]
_Run = Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]
_Token = Annotated[
    str | None, typer.Option(envvar="STEPTRON_METRICS_TOKEN", help="Bearer token, where the server asks for one.")
]
_Root = Annotated[
    Path | None, typer.Option("--certificate", help="Root certificate (PEM) of a server with TLS of your own.")
]
_First = Annotated[int, typer.Option(min=0, help="First iteration.")]
_Last = Annotated[int | None, typer.Option(min=0, help="Last iteration.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]

_SERVER_NEEDS = ("grpc", "google.protobuf", "fastapi", "uvicorn", "prometheus_client", "pyarrow", "xxhash", "yaml")


@app.command()
def serve(
    folder: Annotated[
        Path, typer.Option(help="Folder for what has arrived, the embedded database, logs and alerts.")
    ] = Path("metrics"),
    host: Annotated[str, typer.Option(help="Address to listen at. Others than this machine's own need --tokens.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that training sends to (gRPC); 0: a free one.")] = (
        7077
    ),
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page and the HTTP interface; 0: a free one.")
    ] = 7078,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="STEPTRON_METRICS_DATABASE",
            help="PostgreSQL database, postgresql://user:password@host/name; DuckDB in the folder without it.",
        ),
    ] = None,
    receivers: Annotated[int, typer.Option(min=1, help="Processes that take frames.")] = 1,
    reducers: Annotated[int, typer.Option(min=1, help="Processes that aggregate.")] = 1,
    tokens: Annotated[Path | None, typer.Option(help="YAML file of bearer tokens; none are asked for without.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM) of the server: turns TLS on.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
    rules: Annotated[
        Path | None, typer.Option(help="Alert rules on top of the defaults (`steptron metrics rules` explains them).")
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="STEPTRON_METRICS_WEBHOOK", help="Gets alerts as JSON by POST."),
    ] = None,
    raw_iterations: Annotated[
        int, typer.Option(min=0, help="Raw values are kept of so many latest iterations of a run ...")
    ] = 100,
    journal_gb: Annotated[float, typer.Option(min=0.02, help="... and take up at most this, all runs together.")] = 8.0,
    min_free_gb: Annotated[
        float,
        typer.Option(min=0, help="Space to leave on the disk: with less nothing is taken or stored until there is."),
    ] = 1.0,
    max_runs: Annotated[int, typer.Option(min=1, help="Runs that are kept; further ones are refused.")] = 1000,
    max_runs_per_token: Annotated[
        int, typer.Option(min=1, help="Runs that a token for some names can begin, of those that match them.")
    ] = 200,
    partial_after: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which an iteration is stored without the ranks it lacks.")
    ] = 120.0,
    stale_after: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a sign after which a run is called stale.")
    ] = 600.0,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Others may connect though no tokens are asked for.")
    ] = False,
) -> None:
    """Take what training sends with telemetry.server=HOST:PORT, keep it, show it and watch it.

    Prints where it receives and where its page is when it is ready. Ctrl-C ends it; processes of it that die are
    started again.
    """
    _need((*_SERVER_NEEDS, "duckdb" if database is None else "psycopg"), "the metrics server")
    with _user_errors():
        from steptron_metrics.server.supervisor import serve as run
        from steptron_metrics.settings import Settings

        settings = Settings(
            folder=folder,
            database=database,
            host=host,
            port=port,
            http_port=http_port,
            receivers=receivers,
            reducers=reducers,
            tokens=tokens,
            certificate=certificate,
            key=key,
            rules=rules,
            webhook=webhook,
            partial_after_seconds=partial_after,
            stale_after_seconds=stale_after,
            raw_iterations=raw_iterations,
            journal_bytes=int(journal_gb * 1e9),
            min_free_bytes=int(min_free_gb * 1e9),
            max_runs=max_runs,
            max_runs_per_token=max_runs_per_token,
        )
        raise typer.Exit(run(settings, allow_unauthenticated=allow_unauthenticated))


@app.command()
def runs(where: _Where, token: _Token = None, certificate: _Root = None, as_json: _Json = False) -> None:
    """List the runs that a server has, the latest first."""
    with _reading(where, token, certificate) as source:
        found = source.runs()
    if as_json:
        return _print_json(found)
    if not found:
        return typer.echo("no run yet")
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading, right in (
        *(("run", False), ("iterations", True), ("partial", True), ("ranks", True), ("tokens", True)),
        *(("latest", False), ("open alerts", True)),
    ):
        table.add_column(heading, justify="right" if right else "left")
    for run in found:
        table.add_row(
            run.name,
            f"{run.first_iteration:,} to {run.last_iteration:,}",
            f"{run.partial:,}",
            f"{run.world_size:,}",
            f"{run.consumed_tokens:,}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.last_ended_ns / 1e9)),
            str(run.open_alerts),
        )
    _console().print(table)


@app.command()
def alerts(
    where: _Where,
    run: Annotated[str | None, typer.Argument(help="Only of this run.", metavar="[RUN]")] = None,
    only_open: Annotated[bool, typer.Option("--open", help="Only those that have not ended.")] = False,
    token: _Token = None,
    certificate: _Root = None,
    as_json: _Json = False,
) -> None:
    """Show alerts: what was seen, the likely cause, and what to do."""
    with _reading(where, token, certificate) as source:
        found = [one for one in source.alerts(run) if one.ended_iteration is None or not only_open]
    if as_json:
        return _print_json(found)
    if not found:
        return typer.echo("no open alert" if only_open else "no alert")
    console = _console()
    colours = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
    for alert in found:
        ended = "" if alert.ended_iteration is None else f", ended at {alert.ended_iteration:,}"
        console.print(alert.severity, style=colours.get(alert.severity, ""), end=" ")
        title = f"{alert.run}: {alert.rule}, {alert.subject}, since iteration {alert.since_iteration:,}{ended}"
        console.print(title, markup=False)
        for text in (alert.saw, alert.cause, alert.remedy):
            console.print(f"  {text}", markup=False)


@app.command()
def delete(
    address: Annotated[
        str,
        typer.Argument(
            help="Address of the page of a running server (host:port or a URL), or its folder.",
            metavar="ADDRESS|FOLDER",
        ),
    ],
    run: _Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also while the run is live.")] = False,
    token: _Token = None,
    certificate: _Root = None,
) -> None:
    """Delete everything that a running server has of a run."""
    with _reading(address, token, certificate) as source:
        from steptron_metrics.reading.remote import RemoteSource

        if not isinstance(source, RemoteSource):
            raise UserError(f"{address}: no server runs there; start it: it deletes a run together with its raw values")
        found = next((one for one in source.runs() if one.name == run), None)
        if found is None:
            raise UserError(f"{address} has no run {run}")
        if not yes:
            typer.confirm(f"delete {found.iterations:,} iterations of run {run} for good?", abort=True)
        source.delete(run, force=force)
    typer.echo(f"run {run} is deleted")


@app.command()
def export(
    where: _Where,
    run: _Run,
    output: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    form: Annotated[
        Literal["parquet", "csv", "tensorboard"],
        typer.Option("--format", help="Tables of aggregates, one row an item, and derived figures; or an event file."),
    ] = "parquet",
    metric: Annotated[
        list[str] | None, typer.Option(help="Only this one, without derived figures; may be given again.")
    ] = None,
    items: Annotated[
        Literal["none", "histograms", "scalars"],
        typer.Option(help="What TensorBoard gets of metrics by expert: nothing, histograms, or a curve each."),
    ] = "histograms",
    first: _First = 0,
    last: _Last = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    token: _Token = None,
    certificate: _Root = None,
) -> None:
    """Write what is stored of a run to files, for other tools.

    One that was interrupted goes on where it stopped when the same command is given again.
    """
    with _reading(where, token, certificate) as source, _progress() as report:
        from steptron_metrics.reading.export import export_tables
        from steptron_metrics.reading.source import LAST_ITERATION
        from steptron_metrics.reading.to_tensorboard import export_tensorboard

        last = LAST_ITERATION if last is None else last
        if form == "tensorboard":
            export_tensorboard(
                *(source, run, output),
                items=items,
                metrics=metric,
                first=first,
                last=last,
                overwrite=force,
                progress=report,
            )
        else:
            export_tables(
                *(source, run, output, form),
                metrics=metric,
                first=first,
                last=last,
                overwrite=force,
                progress=report,
            )
    typer.echo(f"wrote {output}")


@app.command()
def rules(
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Check a file of rules instead, and list what is in force, changed, new and off."
        ),
    ] = None,
) -> None:
    """Print the default alert rules, with an explanation of every key: a file of one's own begins here."""
    with _user_errors():
        from steptron_metrics.alerts.loading import default_text, load_rules

        if check is None:
            return typer.echo(default_text(), nl=False)
        in_force = load_rules(check)
    import yaml

    defaults = yaml.safe_load(default_text())
    own = yaml.safe_load(check.read_text(encoding="utf-8")) or {}
    for rule in in_force:
        typer.echo(f"{rule.name} ({rule.severity}){_difference(defaults.get(rule.name), own.get(rule.name, {}))}")
    names = {rule.name for rule in in_force}
    for name in (*defaults, *(name for name in own if name not in defaults)):
        if name not in names:
            typer.echo(f"{name}: {'' if name in defaults else 'new, and '}switched off")


def _difference(default: dict[str, Any] | None, own: dict[str, Any]) -> str:
    """What a file makes of a rule, by its keys."""
    if default is None:
        return ": new"
    absent = {"enabled": True}
    changes = [
        f"{key} {_brief(default.get(key, absent.get(key)))} -> {_brief(value)}"
        for key, value in own.items()
        if value != default.get(key, absent.get(key))
    ]
    return f": changed: {', '.join(changes)}" if changes else ""


def _brief(value: object) -> str:
    text = "nothing" if value is None else f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@app.command()
def plot(
    where: _Where,
    run: _Run,
    output: Annotated[Path, typer.Argument(help="Picture to write: .png, .pdf or .svg.", metavar="OUT.png")],
    metric: Annotated[str, typer.Option(help="Metric by expert.")] = "moe.output_norm_max",
    first: _First = 0,
    last: _Last = None,
    token: _Token = None,
    certificate: _Root = None,
) -> None:
    """Draw the experts' activation norms, layer by layer over time, beside the loss."""
    _need(("matplotlib",), "a picture", "pip install matplotlib")
    from steptron.cli.metrics_picture import KINDS, draw, read_picture

    if output.suffix[1:].lower() not in KINDS:
        raise UserError(f"{output}: expected the name of a .png, .pdf or .svg file")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"{output}: expected a file in a folder that is there")
    with _reading(where, token, certificate) as source:
        picture = read_picture(source, run, metric, first, last)
    try:
        draw(picture, output)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {output}")


@contextlib.contextmanager
def _reading(where: str, token: str | None, certificate: Path | None) -> Iterator[Source]:
    """What is to be read; a run, metric or layer that is not there is the user's error."""
    with _user_errors():
        from steptron_metrics.reading.source import open_source

        with contextlib.closing(open_source(where, token=token, certificate=certificate)) as source:
            try:
                yield source
            except KeyError as error:
                # Of a running server it is a sentence already.
                missing = str(error.args[0])
                raise UserError(missing if " " in missing else f"{where} has no run {missing}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows what is being written and how many parts are done, where someone watches; on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)
        yield lambda part, done, total: bars.update(task, description=part, completed=done, total=total)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # In a pipe or file nothing is folded to a width that nobody sees.
    return console if console.is_terminal else Console(highlight=False, width=200, soft_wrap=True)


def _print_json(rows: Sequence[Any]) -> None:
    """Data classes as objects; infinity and NaN as texts, which JSON has not."""
    plain = [
        {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]
    typer.echo(json.dumps(plain, indent=1, allow_nan=False))


def _need(modules: Sequence[str], what: str, command: str = "pip install 'steptron[metrics]'") -> None:
    missing = []
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except (ModuleNotFoundError, ValueError):  # its package is missing, or it was switched off
            found = False
        if not found:
            missing.append(module)
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: {command}")


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """The server's errors as those of the command line; a package that is missing names the extra."""
    try:
        from steptron_metrics.errors import MetricsError
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install 'steptron[metrics]'") from error
    try:
        yield
    except MetricsError as error:
        raise UserError(str(error)) from error
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install 'steptron[metrics]'") from error
