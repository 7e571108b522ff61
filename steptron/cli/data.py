"""``steptron data``: corpora to datasets, and what is in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptron.cli.building import print_bad_input, progress_bar, system_errors_named, terminal
from steptron.cli.data_filter import filter_command
from steptron.cli.interruption import terminated_like_interrupted
from steptron.data.limits import LARGEST_VOCABULARY, SMALLEST_TOKENIZER_SAMPLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text

    from steptron.data.build import BuildResult
    from steptron.data.dataset import Split
    from steptron.data.index_cache import OrderFile
    from steptron.data.inspection import TextRun
    from steptron.data.manifest import Manifest

app = typer.Typer(name="data", help="Build and inspect datasets.", no_args_is_help=True)
tokenizer_app = typer.Typer(name="tokenizer", help="Train tokenizers.", no_args_is_help=True)
app.add_typer(tokenizer_app)
app.command(name="filter")(filter_command)

_Inputs = Annotated[list[Path], typer.Argument(help="folders, text files, JSONL (plain, .gz, .zst), Parquet files")]
_Glob = Annotated[
    str | None, typer.Option("--glob", help="read these files of a folder instead of the known extensions")
]
_TextField = Annotated[str, typer.Option(help="field (JSONL) or column (Parquet) of the text")]
_TokenizerBytes = Annotated[
    int,
    typer.Option(
        min=SMALLEST_TOKENIZER_SAMPLE, help="text that trains the tokenizer, bytes; a larger corpus is sampled"
    ),
]


@app.command()
def build(
    inputs: _Inputs,
    output: Annotated[Path, typer.Option(help="folder to write")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a Hugging Face or dataset folder that holds one")
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        typer.Option(
            metavar="VOCAB_SIZE", max=LARGEST_VOCABULARY, help="train a byte-level BPE tokenizer of this size instead"
        ),
    ] = None,
    eod_token: Annotated[
        str | None, typer.Option(help="token of a loaded tokenizer that ends documents, if not its eos_token")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="tokenizing processes; one per core by default")] = None,
    validation_fraction: Annotated[float, typer.Option(help="share of documents in the validation split")] = 0.01,
    text_field: _TextField = "text",
    spans_field: Annotated[
        str, typer.Option(help="field or column of start-end pairs: characters that do not count in the loss")
    ] = "masked_spans",
    metadata_fields: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="fields or columns that documents begin with, where they have them, such as "
            "content_type,language,domain,source",
        ),
    ] = "",
    max_bad_fraction: Annotated[float, typer.Option(help="share of bad documents that is accepted")] = 0.01,
    glob: _Glob = None,
    tokenizer_bytes: _TokenizerBytes = 2_000_000_000,
    seed: Annotated[int, typer.Option(help="decides, with its text, which split a document belongs to")] = 1234,
    force: Annotated[bool, typer.Option("--force", help="replace a dataset that is there")] = False,
) -> None:
    """Turns text into a dataset: tokens in Megatron's indexed format, two splits, tokenizer and manifest."""
    from steptron.data.build import BuildOptions, TooManyBadDocuments, build_dataset
    from steptron.data.readers import Fields

    options = BuildOptions(
        inputs=inputs,
        output=output,
        tokenizer=tokenizer,
        train_vocab_size=train_tokenizer,
        eod_token=eod_token,
        tokenizer_bytes=tokenizer_bytes,
        workers=workers or len(os.sched_getaffinity(0)),
        validation_fraction=validation_fraction,
        fields=Fields(text_field, spans_field, tuple(metadata_fields.split(",")) if metadata_fields else ()),
        max_bad_fraction=max_bad_fraction,
        pattern=glob,
        seed=seed,
        force=force,
    )
    console = terminal()
    with system_errors_named(output), terminated_like_interrupted():
        try:
            with progress_bar(console) as report:
                result = build_dataset(options, report)
        except TooManyBadDocuments as error:
            print_bad_input(console, error.bad)
            raise
    _print_build(console, output, result)
    if train_tokenizer is not None:
        _print_missing_tokens(console, result.manifest.vocabulary_size, train_tokenizer)


@app.command(name="build-index")
def build_index(
    file: Annotated[Path, typer.Argument(help="training configuration (YAML) with data.index_cache", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="values that win over the file's", metavar="[a.b=c]...")
    ] = None,
    from_step: Annotated[
        int, typer.Option(min=0, help="steps that are done: orders that only they needed are not built")
    ] = 0,
) -> None:
    """Builds the orders of documents and samples that a run needs, so that its processes find them.

    Orders that are there are read and checked; damaged ones are replaced. Needs one core and 4.3 GB of memory at most.
    """
    from steptron.config.loader import load
    from steptron.data.errors import DataError
    from steptron.data.index_cache import IndexCache
    from steptron.data.sampler import validation_datasets
    from steptron.data.sources import open_source
    from steptron.data.spans import spans

    curriculum = load(file, overrides or ()).curriculum
    config = curriculum.stages[0].config
    data, folder = config.data, config.data.index_cache
    if folder is None:
        raise DataError(f"{file}: data.index_cache is not set: name the folder that the orders are written to")
    console = terminal()
    named: dict[str, OrderFile] = {}
    for stage, read in zip(curriculum.stages, spans(curriculum.stages), strict=True):
        data, train = stage.config.data, stage.config.train
        if from_step < stage.last_step and data.packing == "stream":
            begun = stage.consumed_before(max(from_step, stage.first_step)) - stage.first_sequence
            source = open_source(data.train, "train", data, spans=read if stage.name else None)
            named |= {order.name: order for order in source.order_files(begun, stage.sequences)}
            if datasets := validation_datasets(data):
                wanted = train.validation.batches * train.global_batch_size
                orders = open_source(datasets, "validation", data).order_files(0, wanted)
                named |= {order.name: order for order in orders}
    files = list(named.values())
    with system_errors_named(folder), terminated_like_interrupted(), _order_progress_bar(console) as report:
        cache = IndexCache(folder, config.parallel.timeout_seconds, report)
        for order in files:
            did = cache.prepare(order)
            console.print(f"{did:<9}{order.bytes / 1e6:>12,.1f} MB  {order.name}", soft_wrap=True, highlight=False)
    total = sum(order.bytes for order in files)
    console.print(f"{len(files)} orders, {total / 1e6:,.1f} MB, in {folder}", soft_wrap=True, highlight=False)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="dataset folder")],
    documents: Annotated[int, typer.Option(min=0, help="documents to print")] = 0,
    split: Annotated[
        str, typer.Option(help="split that documents and samples come from: train or validation")
    ] = "train",
    sample: Annotated[int | None, typer.Option(min=0, help="training sample to print, with --sequence-length")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="tokens per sample")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the order of samples (data.seed)")] = 1234,
) -> None:
    """Shows a dataset: manifest, document lengths, decoded documents or samples; and checks its files.

    Text that does not count in the loss stands between ⟦ and ⟧.
    """
    from steptron.data.errors import DataError
    from steptron.data.inspection import SPLITS, check_files
    from steptron.data.manifest import read_manifest

    console = terminal()
    with system_errors_named(folder):
        if split not in SPLITS:
            raise DataError(f"--split {split}: must be one of {', '.join(SPLITS)}")
        if (sample is None) != (sequence_length is None):
            raise DataError("--sample and --sequence-length belong together: give both or neither")
        manifest = read_manifest(folder)
        chosen: Split = "train" if split == "train" else "validation"
        _print_manifest(console, folder, manifest)
        problems = check_files(folder)
        if problems:
            raise DataError("\n".join([f"{folder}: {len(problems)} problems in the files", *problems]))
        console.print("Files are sound: sizes, hashes, index, vocabulary range, document ends.")
        _print_lengths(console, folder, manifest)
        if documents:
            _print_documents(console, folder, chosen, documents)
        if sample is not None and sequence_length is not None:
            _print_sample(console, folder, chosen, sample, sequence_length, seed)


@app.command(name="stdlib-corpus")
def stdlib_corpus(
    output: Annotated[Path, typer.Argument(help="JSONL file to write")],
    minimum_bytes: Annotated[int, typer.Option(help="below this, sources of installed packages are added")] = 5_000_000,
) -> None:
    """Writes the sources of this Python's standard library, without tests, as a corpus."""
    from steptron.data.readers import recorded_name
    from steptron.data.stdlib_corpus import collect

    with system_errors_named(output):
        report = collect(output, minimum_bytes)
    added = (
        f", of which {report.package_documents:,} files ({report.package_bytes / 1e6:.1f} MB) from installed packages"
        if report.package_documents
        else ""
    )
    terminal().print(
        f"{recorded_name(report.path)}: {report.documents:,} files, {report.bytes / 1e6:.1f} MB of Python source{added}"
        f" ({report.skipped} empty or undecodable files left out)",
        soft_wrap=True,
        highlight=False,
    )


@tokenizer_app.command(name="train")
def train_tokenizer_command(
    inputs: _Inputs,
    vocab_size: Annotated[
        int,
        typer.Option(max=LARGEST_VOCABULARY, help="tokens of the vocabulary, special tokens and bytes included"),
    ],
    output: Annotated[Path, typer.Option(help="tokenizer.json to write")],
    text_field: _TextField = "text",
    glob: _Glob = None,
    tokenizer_bytes: _TokenizerBytes = 2_000_000_000,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:
    """Trains a byte-level BPE tokenizer; <|endoftext|> is id 0."""
    from steptron.data.build import train_tokenizer_on
    from steptron.data.errors import DataError
    from steptron.data.readers import Fields, find_files, recorded_name
    from steptron.platform.staging import staging_file

    console = terminal()
    with system_errors_named(output):
        if output.exists() and (output.is_dir() or not force):
            raise DataError(f"{output}: exists; name another file{'' if output.is_dir() else ', or use --force'}")
        files, _ = find_files(inputs, glob)
        with staging_file(output) as partial:
            with progress_bar(console) as report:
                training = train_tokenizer_on(files, Fields(text=text_field), vocab_size, tokenizer_bytes, report)
            for document in training.bad[:10]:
                place = document.file if document.line is None else f"{document.file}:{document.line}"
                typer.echo(f"{place}: {document.kind}: {document.message}", err=True)
            if training.bad:
                typer.echo(f"{len(training.bad):,} bad documents were passed over", err=True)
            if training.documents == 0:
                raise DataError("there is no document to train on")
            partial.write_bytes(training.tokenizer.file_bytes)
    size = training.tokenizer.vocab_size
    console.print(f"{recorded_name(output)}: {size:,} tokens", soft_wrap=True, highlight=False)
    _print_missing_tokens(console, size, vocab_size)


@contextlib.contextmanager
def _order_progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the function that shows how far the order that is being built has come."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", visible=False)

        def report(name: str, done: int, total: int) -> None:
            if done == 0:
                bars.reset(task, description=name, total=total, visible=True)
            bars.update(task, completed=done, visible=done < total)

        yield report


def _print_missing_tokens(console: Console, size: int, asked: int) -> None:
    if size < asked:
        console.print(f"The text offers no more than {size:,} tokens; {asked:,} were asked for.")


def _print_build(console: Console, output: Path, result: BuildResult) -> None:
    from steptron.data.readers import recorded_name

    if result.bad.total:
        print_bad_input(console, result.bad)
        console.print(
            f"{result.bad.total:,} bad documents were left out; all of them: {recorded_name(result.bad.path)}",
            soft_wrap=True,
        )
    if result.files_left_out:
        console.print(f"{result.files_left_out:,} files of other kinds were not read; --glob names what to read.")
    _print_manifest(console, output, result.manifest)
    if result.manifest.validation.documents == 0 and result.manifest.validation_fraction > 0:
        console.print(
            "Note: the validation split is empty, and training on this dataset will run without validation: of so few "
            "documents, none fell into it. To get one, raise --validation-fraction or add documents.",
            soft_wrap=True,
        )


def _print_manifest(console: Console, folder: Path, manifest: Manifest) -> None:
    from rich.table import Table
    from rich.text import Text

    from steptron.data.readers import recorded_name

    console.print(Text(recorded_name(folder), style="bold"), soft_wrap=True)
    splits = Table()
    splits.add_column("")
    splits.add_column("train", justify="right")
    splits.add_column("validation", justify="right")
    records = (manifest.train, manifest.validation)
    for name, values in (
        ("documents", [f"{record.documents:,}" for record in records]),
        ("tokens", [f"{record.tokens:,}" for record in records]),
        ("masked tokens", [f"{record.masked_tokens:,}" for record in records]),
        ("tokens of metadata", [f"{record.metadata_tokens or 0:,}" for record in records]),
        ("bytes of text", [f"{record.bytes:,}" for record in records]),
        ("bytes per token", [f"{record.bytes / max(record.tokens, 1):.3f}" for record in records]),
        ("unigram entropy, nats per token", [f"{record.unigram_entropy:.4f}" for record in records]),
        ("cross entropy under train's unigrams", [f"{record.unigram_cross_entropy:.4f}" for record in records]),
    ):
        splits.add_row(name, *values)
    console.print(splits)
    facts = Table(show_header=False, box=None)
    for name, value in (
        ("vocabulary", f"{manifest.vocabulary_size:,} tokens, {manifest.dtype} on disk"),
        ("end of document", f"id {manifest.eod_id}"),
        ("validation", f"fraction {manifest.validation_fraction:g}, seed {manifest.seed}"),
        ("bad documents", f"{manifest.bad_documents:,}"),
        *(
            ("source", f"{source.path}: {source.files:,} files, {source.documents:,} documents, {source.bytes:,} bytes")
            for source in manifest.sources
        ),
        ("tokenizer", manifest.tokenizer_hash),
        ("content", manifest.content_hash),
        ("format", f"{manifest.format} version {manifest.format_version}"),
    ):
        facts.add_row(Text(name), Text(value, overflow="fold"))
    console.print(facts)


def _print_lengths(console: Console, folder: Path, manifest: Manifest) -> None:
    from rich.table import Table

    from steptron.data.dataset import TokenDataset
    from steptron.data.inspection import SPLITS, length_histogram

    for split in SPLITS:
        if manifest.split(split).documents == 0:
            continue
        bins = length_histogram(TokenDataset.open(folder, split).lengths_D)
        table = Table(title=f"{split}: tokens per document", title_justify="left")
        for heading in ("tokens", "documents", "share of tokens", ""):
            table.add_column(heading, justify="left" if heading == "" else "right")
        most = max(row.documents for row in bins)
        total = sum(row.tokens for row in bins)
        for row in bins:
            table.add_row(
                f"{row.low:,} – {row.high - 1:,}",
                f"{row.documents:,}",
                f"{row.tokens / total:.1%}",
                "█" * round(20 * row.documents / most),
            )
        console.print(table)


def _print_documents(console: Console, folder: Path, split: Split, count: int) -> None:
    from steptron.data.dataset import TokenDataset
    from steptron.data.inspection import text_runs
    from steptron.data.tokenizer import Tokenizer

    dataset, tokenizer = TokenDataset.open(folder, split), Tokenizer.load(folder)
    for number in range(min(count, dataset.num_documents)):
        tokens_T, counts_T = dataset.document(number)
        console.rule(f"{split} document {number}: {tokens_T.size:,} tokens")
        runs = text_runs(tokenizer, tokens_T, counts_T, dataset.metadata_tokens(number))
        console.print(_marked(runs), soft_wrap=True)


def _print_sample(console: Console, folder: Path, split: Split, number: int, sequence_length: int, seed: int) -> None:
    from steptron.config.schema import DataConfig, DatasetConfig
    from steptron.data.inspection import text_runs
    from steptron.data.sampler import SampleSource
    from steptron.data.tokenizer import Tokenizer

    datasets = [DatasetConfig(path=folder)]
    source = SampleSource(datasets, split, DataConfig(train=datasets, sequence_length=sequence_length, seed=seed))
    tokenizer = Tokenizer.load(folder)
    batch = source.micro_batch(number, 1)
    labels_S, counts_S = batch.labels_BS[0].numpy(), batch.loss_mask_BS[0].numpy()
    documents_S = batch.documents_BS[0].numpy()
    console.rule(f"{split} sample {number}: {sequence_length:,} targets, {int(counts_S.sum()):,} count")
    for document in range(int(documents_S.max()) + 1):
        inside_S = documents_S == document
        console.print(f"[targets of document {document} of the row, {int(inside_S.sum()):,} tokens]", markup=False)
        console.print(_marked(text_runs(tokenizer, labels_S[inside_S], counts_S[inside_S])), soft_wrap=True)


def _marked(runs: list[TextRun]) -> Text:
    from rich.text import Text

    text = Text()
    for run in runs:
        if run.metadata:
            text.append(f"⟪{run.text}⟫", style="black on cyan")
        elif run.counts:
            text.append(run.text)
        else:
            text.append(f"⟦{run.text}⟧", style="black on yellow")
    return text
