"""``steptron doctor``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.platform.doctor import Report


def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of --config's file.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Local processes: their threads, and the self-test; 2 by default.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that the self-test may take, or with --nodes, longest wait.")
    ] = 120.0,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Examine all processes of a run together, under torchrun or srun.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="With --nodes: check this training configuration, its data and output too.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="With --nodes, without --config: the device.")
    ] = "auto",
    json: Annotated[Path | None, typer.Option(help="With --nodes: write everything to this file.")] = None,
) -> None:
    """Test this machine and say what to mend.

    Shows versions, devices and which fast paths are on, then lets a few processes exchange tensors.
    With --nodes, every process of a run joins as in training (under torchrun or srun; else --nproc
    local ones): versions, clocks, links, collectives, memory and folders of all nodes are compared.
    Exit code 1 says that something which Steptron needs is missing or broken.
    """
    from steptron.errors import UserError
    from steptron.platform import launch
    from steptron.platform.world import world as read_world

    world = read_world()
    if nodes:
        if not launch.under_launcher():
            arguments = _again(overrides, timeout, config, device, json)
            raise typer.Exit(launch.run_local(nproc or 2, arguments))
        if nproc not in (None, world.size, world.local_size):
            raise UserError(f"--nproc {nproc}, but a launcher has started {world.size} processes: leave --nproc out")
        _examine_nodes(overrides or [], timeout, config, device, json)
        return
    if config or overrides or json or device != "auto":
        raise UserError("--config, --device, --json and overrides belong to --nodes")
    if world.size > 1:
        raise UserError("under torchrun or srun add --nodes: without it, each process would examine its machine alone")
    _examine_machine(nproc or 2, timeout)


def _examine_machine(nproc: int, timeout: float) -> None:
    from rich.console import Console

    from steptron.platform import doctor as examination

    console = Console()
    reports = [examination.collect(nproc)]
    _print(console, reports[0])
    if not reports[0].failed:
        with console.status(f"self-test in {nproc} processes"):
            reports.append(examination.self_test(nproc, timeout))
        _print(console, reports[1])
    _conclude(console, reports, "Everything that Steptron needs works.")


def _examine_nodes(
    overrides: list[str],
    timeout: float,
    file: Path | None,
    device: Literal["auto", "cpu", "cuda"],
    json: Path | None,
) -> None:
    from rich.console import Console

    from steptron.config.loader import load
    from steptron.errors import ConfigError, UserError

    if overrides and file is None:
        raise UserError("overrides change the file that --config names: give it")
    config = None
    if file is not None:
        try:
            config = load(file, overrides).config
        except ConfigError as error:
            # Of a ConfigError only rank 0 speaks; here, one node may be the only one without the file.
            raise UserError(str(error)) from error
        device = config.train.device

    from steptron.platform.nodes.examination import examine, write_json

    findings = examine(device, timeout, config)
    if findings is None:
        return
    console = Console()
    _print(console, findings.report)
    if json is not None:
        write_json(findings, json)
    _conclude(console, [findings.report], "All nodes are fit for a run.")


def _again(
    overrides: list[str] | None, timeout: float, config: Path | None, device: str, json: Path | None
) -> list[str]:
    """The command line of one of the local processes."""
    arguments = ["doctor", "--nodes", "--timeout", str(timeout), "--device", device]
    arguments += [] if config is None else ["--config", str(config)]
    arguments += [] if json is None else ["--json", str(json)]
    return [*arguments, "--", *(overrides or [])]


def _conclude(console: Console, reports: list[Report], good: str) -> None:
    checks = [check for report in reports for check in report.checks]
    to_mend = [check for check in checks if check.status == "failed"]
    for check in to_mend:
        console.print(f"To mend: {check.section}, {check.name}: {check.value}. {check.advice}", markup=False)
    if to_mend:
        raise typer.Exit(1)
    warnings = sum(check.status == "warning" for check in checks)
    console.print(good + (f" Warnings: {warnings}." if warnings else ""))


def _print(console: Console, report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "off": "dim", "warning": "yellow", "failed": "bold red"}
    for section in dict.fromkeys(check.section for check in report.checks):
        table = Table(title=section, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("", "status", "found", "note"):
            table.add_column(heading, overflow="fold")
        for check in report.checks:
            if check.section == section:
                cells = (check.name, Text(check.status, styles[check.status]), check.value, check.advice)
                table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
        console.print(table)
        console.print()
