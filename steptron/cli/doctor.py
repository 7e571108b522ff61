"""``steptron doctor``"""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    nproc: Annotated[int, typer.Option(min=2, help="Local processes: their threads, and the self-test.")] = 2,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that the self-test may take.")] = 120.0,
) -> None:
    """Test this machine and say what to mend.

    Shows versions, devices and which fast paths are on, then lets a few processes exchange tensors.
    Exit code 1 says that something which Steptron needs is missing or broken.
    """
    from rich.console import Console

    from steptron.platform import doctor as examination

    console = Console()
    reports = [examination.collect(nproc)]
    _print(console, reports[0])
    if not reports[0].failed:
        with console.status(f"self-test in {nproc} processes"):
            reports.append(examination.self_test(nproc, timeout))
        _print(console, reports[1])
    checks = [check for report in reports for check in report.checks]
    to_mend = [check for check in checks if check.status == "failed"]
    for check in to_mend:
        console.print(f"To mend: {check.section}, {check.name}: {check.value}. {check.advice}", markup=False)
    if to_mend:
        raise typer.Exit(1)
    warnings = sum(check.status == "warning" for check in checks)
    console.print("Everything that Steptron needs works." + (f" Warnings: {warnings}." if warnings else ""))


def _print(console: object, report: object) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from steptron.platform.doctor import Report

    assert isinstance(console, Console) and isinstance(report, Report)
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
