"""``steptron sft``: conversations to datasets, what is trained of them, and the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from steptron.cli import training
from steptron.cli.building import print_bad_input, progress_bar, system_errors_named, terminal
from steptron.cli.interruption import terminated_like_interrupted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from steptron.data.chat.build import ChatBuildResult
    from steptron.data.chat.preview import PreviewedSample


class _TrainsByDefault(TyperGroup):
    """``steptron sft FILE`` is ``steptron sft train FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        is_file = Path(first).suffix in (".yaml", ".yml") or Path(first).is_file()
        is_option = first.startswith("-") and first not in ctx.help_option_names
        return super().parse_args(
            ctx, ["train", *args] if first not in self.commands and (is_file or is_option) else args
        )


app = typer.Typer(
    name="sft",
    cls=_TrainsByDefault,
    help="Make an assistant: build datasets of conversations, look at them, train on them.",
    no_args_is_help=True,
)

_Template = Annotated[
    str, typer.Option(help="step3p5, a Jinja file, or hf: the template beside the tokenizer", metavar="NAME|FILE|hf")
]
_Date = Annotated[str | None, typer.Option(help="day for Jinja templates that write today's", metavar="YYYY-MM-DD")]


@app.command()
def train(
    file: training.File,
    overrides: training.Overrides = None,
    nproc: training.Nproc = None,
    fresh: training.Fresh = False,
    max_restarts: training.MaxRestarts = 0,
    through: training.Through = None,
    profile: training.Profile = None,
    profile_ranks: training.ProfileRanks = None,
) -> None:
    """Trains on conversations; `steptron sft FILE` is short for it.

    Trains as `steptron pretrain` does, from the weights of another model (train.initial_weights), and refuses data
    that are no conversations or would be cut. The same command continues an interrupted run.

    Exit codes are those of `steptron pretrain`.
    """
    from steptron.data.chat.training import check_conversations

    given = training.Arguments(file, overrides or [], nproc, fresh, max_restarts, through, profile, profile_ranks)
    raise typer.Exit(training.run(["sft", "train"], given, check_conversations))


@app.command()
def build(
    inputs: Annotated[list[Path], typer.Argument(help="JSONL files (plain, .gz, .zst), or folders that hold some")],
    output: Annotated[Path, typer.Option(help="folder to write")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a Hugging Face or dataset folder that holds one")],
    template: _Template = "step3p5",
    date: _Date = None,
    on_bad: Annotated[
        Literal["stop", "skip"], typer.Option(help="what to do at a broken conversation: stop, or leave it out")
    ] = "stop",
    max_tokens: Annotated[int | None, typer.Option(help="longest sample that is accepted; none is ever cut")] = None,
    on_long: Annotated[
        Literal["stop", "skip"], typer.Option(help="what to do at a longer conversation: stop, or leave it out")
    ] = "stop",
    validation_fraction: Annotated[float, typer.Option(help="share of conversations in the validation split")] = 0.01,
    workers: Annotated[int | None, typer.Option(min=1, help="tokenizing processes; one per core by default")] = None,
    seed: Annotated[int, typer.Option(help="decides, with its content, which split a conversation belongs to")] = 1234,
    domain: Annotated[
        list[str] | None, typer.Option(help="only conversations of this domain; may be given several times")
    ] = None,
    eod_token: Annotated[
        str | None, typer.Option(help="token that ends documents, if not the tokenizer's eos_token")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a dataset that is there")] = False,
) -> None:
    """Turns conversations into a dataset whose loss mask has exactly the tokens that the assistant says."""
    from steptron.data.chat.build import ChatBuildOptions, build_chat_dataset

    options = ChatBuildOptions(
        inputs=inputs,
        output=output,
        tokenizer=tokenizer,
        template=template,
        date=date,
        on_bad=on_bad,
        max_tokens=max_tokens,
        on_long=on_long,
        workers=workers or len(os.sched_getaffinity(0)),
        validation_fraction=validation_fraction,
        seed=seed,
        domains=domain or [],
        eod_token=eod_token,
        force=force,
    )
    console = terminal()
    with system_errors_named(output), terminated_like_interrupted(), progress_bar(console) as report:
        result = build_chat_dataset(options, report)
    _print_result(console, output, result)


@app.command()
def preview(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL file (plain, .gz, .zst), or a dataset folder")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or the folder that holds it; a dataset folder has its own")
    ] = None,
    template: _Template = "step3p5",
    date: _Date = None,
    number: Annotated[int, typer.Option(min=1, help="conversations (of a dataset: samples) from the beginning")] = 3,
    line: Annotated[int | None, typer.Option(min=1, help="show the conversation on this line instead")] = None,
    split: Annotated[Literal["train", "validation"], typer.Option(help="split of a dataset")] = "train",
) -> None:
    """Shows conversations as the model is trained on them.

    What is trained is green, special tokens are bold. Without colours, what is trained stands between ⟦ and ⟧.
    """
    from rich.text import Text

    from steptron.data.chat.preview import preview_documents, preview_lines
    from steptron.data.chat.problems import BadConversation
    from steptron.data.errors import DataError

    console = terminal()
    with system_errors_named(source):
        if source.is_dir():
            if line is not None or tokenizer is not None or date is not None or template != "step3p5":
                raise DataError(
                    f"{source}: a dataset is rendered already: --line, --tokenizer, --template and --date belong to "
                    "JSONL files"
                )
            for sample in preview_documents(source, split, number):
                _print_sample(console, sample)
            return
        if tokenizer is None:
            raise DataError(f"{source}: give --tokenizer: a tokenizer.json or a folder that holds one")
        for shown in preview_lines(source, tokenizer, template, date, number, line):
            if isinstance(shown, BadConversation):
                console.print(Text(str(shown), style="bold yellow"), soft_wrap=True)
            else:
                _print_sample(console, shown)


@app.command(name="stdlib-conversations")
def stdlib_conversations(
    corpus: Annotated[Path, typer.Argument(help="JSONL file that `steptron data stdlib-corpus` has written")],
    output: Annotated[Path, typer.Argument(help="folder to write, one JSONL file for each domain")],
) -> None:
    """Writes conversations about Python's standard library, with tools, and arithmetic with reasoning."""
    from steptron.data.chat.stdlib_conversations import write_conversations

    with system_errors_named(output):
        written = write_conversations(corpus, output)
    for domain, number in written.items():
        terminal().print(f"{output / domain}.jsonl: {number:,} conversations", soft_wrap=True, highlight=False)


def _print_sample(console: Console, sample: PreviewedSample) -> None:
    console.rule(sample.title, align="left")
    console.print(_marked(sample, console.is_terminal and console.color_system is not None), soft_wrap=True)
    share = sample.trained_tokens / sample.tokens
    console.print(f"{sample.tokens:,} tokens, {sample.trained_tokens:,} trained ({share:.1%})", highlight=False)


def _marked(sample: PreviewedSample, in_colour: bool) -> Text:
    from itertools import groupby

    from rich.text import Text

    text = Text()
    for trained, runs in groupby(sample.runs, key=lambda run: run.trained):
        brackets = ("⟦", "⟧") if trained and not in_colour else ("", "")
        text.append(brackets[0])
        for run in runs:
            style = "green" if trained else "dim"
            text.append(run.text, style=f"{style} bold reverse" if run.special else style)
        text.append(brackets[1])
    return text


def _print_result(console: Console, output: Path, result: ChatBuildResult) -> None:
    from rich.table import Table
    from rich.text import Text

    from steptron.data.readers import recorded_name

    if result.bad.total:
        print_bad_input(console, result.bad)
        console.print(
            f"{result.bad.total:,} conversations were left out; all of them: {recorded_name(result.bad.path)}",
            soft_wrap=True,
        )
    if passed_over := result.summary.passed_over:
        console.print(f"{passed_over.total():,} conversations of {len(passed_over):,} other domains were passed over.")
    if result.files_left_out:
        console.print(f"{result.files_left_out:,} files that are no JSONL were not read.")
    console.print(Text(recorded_name(output), style="bold"), soft_wrap=True)
    table = Table()
    table.add_column("domain")
    for heading in ("conversations", "samples", "tokens", "trained tokens", "share trained"):
        table.add_column(heading, justify="right")
    domains = result.summary.domains.items()
    rows = [(domain or "(none)", counts) for domain, counts in domains] if any(name for name, _ in domains) else []
    for name, counts in [*rows, ("all", result.summary.total)]:
        table.add_row(
            Text(name),
            f"{counts.conversations:,}",
            f"{counts.samples:,}",
            f"{counts.tokens:,}",
            f"{counts.trained_tokens:,}",
            f"{counts.trained_tokens / counts.tokens:.1%}",
        )
    console.print(table)
    lengths = ", ".join(f"{share} %: {result.summary.percentile(share):,}" for share in (10, 50, 90, 99))
    console.print(f"tokens per sample: {lengths}, longest: {result.summary.percentile(100):,}", highlight=False)
    manifest = result.manifest
    console.print(
        f"train: {manifest.train.documents:,} samples, validation: {manifest.validation.documents:,}", highlight=False
    )
    console.print(f"chat template: {manifest.chat_template}", highlight=False, soft_wrap=True)
    if manifest.validation.documents == 0 and manifest.validation_fraction > 0:
        console.print(
            "Note: the validation split is empty: of so few conversations, none fell into it. To get one, raise "
            "--validation-fraction or add conversations.",
            soft_wrap=True,
        )
