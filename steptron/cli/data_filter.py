"""``steptron data filter``: removes documents by rules, benchmarks and filters of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptron.cli.interruption import terminated_like_interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.data.filters.run import FilterResult


def filter_command(
    inputs: Annotated[list[Path], typer.Argument(help="folders, text files, JSONL (plain, .gz, .zst), Parquet files")],
    config: Annotated[Path, typer.Option(help="the filters (YAML), such as configs/data/filter.yaml")],
    output: Annotated[Path, typer.Option(help="folder to write")],
    workers: Annotated[int | None, typer.Option(min=1, help="judging processes; one per core by default")] = None,
    keep_removed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="write only the first N removed records of each reason; all by default"),
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(min=1, help="bytes after which a new file of kept records begins, uncompressed")
    ] = 256_000_000,
    max_bad_fraction: Annotated[float, typer.Option(help="share of bad documents that is accepted")] = 0.01,
    glob: Annotated[
        str | None, typer.Option("--glob", help="read these files of a folder instead of the known extensions")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the output of an earlier run")] = False,
) -> None:
    """Keeps the documents that all filters keep; writes the others with the reason, and a report.

    `steptron data build OUTPUT/kept` reads the result.
    """
    from steptron.cli.building import print_bad_input, progress_bar, system_errors_named, terminal
    from steptron.data.build import TooManyBadDocuments
    from steptron.data.filters.config import load_filters
    from steptron.data.filters.run import FilterOptions, filter_corpus

    options = FilterOptions(
        inputs=inputs,
        output=output,
        config=load_filters(config),
        workers=workers or len(os.sched_getaffinity(0)),
        keep_removed=keep_removed,
        shard_bytes=shard_bytes,
        max_bad_fraction=max_bad_fraction,
        pattern=glob,
        force=force,
    )
    console = terminal()
    with system_errors_named(output), terminated_like_interrupted():
        try:
            with progress_bar(console) as report:
                result = filter_corpus(options, report)
        except TooManyBadDocuments as error:
            print_bad_input(console, error.bad)
            raise
    if result.bad.total:
        print_bad_input(console, result.bad)
    _print_result(console, output, result)


def _print_result(console: Console, output: Path, result: FilterResult) -> None:
    from rich.table import Table

    from steptron.data.readers import recorded_name

    report = result.report
    if result.files_left_out:
        console.print(f"{result.files_left_out:,} files of other kinds were not read; --glob names what to read.")
    table = Table()
    for heading in ("filter", "reason", "documents", "bytes of text"):
        table.add_column(heading, justify="right" if heading in ("documents", "bytes of text") else "left")
    for name, reasons in report.reasons.items():
        for reason, count in sorted(reasons.items()):
            table.add_row(name, reason, f"{count.documents:,}", f"{count.bytes:,}")
    table.add_section()
    for what, total in (("removed", report.removed), ("kept", report.kept)):
        table.add_row(what, "", f"{total.documents:,}", f"{total.bytes:,}")
    console.print(table)
    for name, summary in report.summaries.items():
        console.print(f"{name}: {summary}", soft_wrap=True, highlight=False)
    if report.kept.documents == 0:
        console.print("Note: nothing was kept; report.md in the output folder says why.")
    console.print(f"The report: {recorded_name(output / 'report.md')}", soft_wrap=True, highlight=False)
