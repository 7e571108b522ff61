"""Filters a corpus: read, judge in several processes, write, publish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from steptron.data.build import BAD_INPUT_FILE, BadInputLog, Progress, TooManyBadDocuments
from steptron.data.errors import DataError
from steptron.data.filters.config import FilterConfig
from steptron.data.filters.judge import Judge, Judged, Removal
from steptron.data.filters.output import REMOVED_FILE, KeptShards, ZstdLines, removed_line
from steptron.data.filters.records import read_records
from steptron.data.filters.report import FORMAT, REPORT_FILE, Report
from steptron.data.filters.spool import Spool
from steptron.data.readers import InputFile, RawDocument, find_files
from steptron.data.workers import Batch, encode_in_order
from steptron.platform.staging import publish, staging_folder

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class FilterOptions:
    """What to filter.

    Attributes:
        inputs: folders and files to read.
        output: folder to write.
        config: the filters.
        workers: judging processes.
        keep_removed: how many removed records are written for each filter and reason, the first ones; None for all.
        shard_bytes: uncompressed bytes after which a new file of kept records begins.
        max_bad_fraction: largest share of bad documents that is accepted.
        pattern: which files of a folder are read; by known extensions when None.
        force: replace the output of an earlier run at ``output``.
    """

    inputs: list[Path]
    output: Path
    config: FilterConfig
    workers: int = 1
    keep_removed: int | None = None
    shard_bytes: int = 256_000_000
    max_bad_fraction: float = 0.01
    pattern: str | None = None
    force: bool = False


@dataclass(frozen=True)
class FilterResult:
    """A finished run, bad documents, and files in folders that were not read."""

    report: Report
    bad: BadInputLog
    files_left_out: int


def filter_corpus(options: FilterOptions, report: Callable[[Progress], None] = lambda _: None) -> FilterResult:
    """Filters a corpus. Nothing appears at ``options.output`` unless all of it does.

    The files depend on the configuration and the inputs only, not on ``workers`` or time.

    Raises:
        TooManyBadDocuments: past ``max_bad_fraction``, or all; only ``NAME.bad_input.jsonl`` beside the output is left.
        DataError: a wrong option or setting, unusable inputs or benchmarks, or a filter that failed; nothing is left.
        OSError: the folder cannot be written; nothing is left.
    """
    _check_options(options)
    options = replace(options, output=Path(os.path.abspath(options.output)))  # "." has no name to write to
    check_output(options.output, options.force)
    files, files_left_out = find_files(options.inputs, options.pattern)
    judge = Judge(options.config)
    names = (spec.name for spec in options.config.filters)
    counts = Report.empty((file.name for file in files), names, judge.summaries)
    with staging_folder(options.output) as folder:
        bad = BadInputLog(folder / BAD_INPUT_FILE)
        try:
            _write(options, files, judge, folder, counts, bad, report)
        except TooManyBadDocuments as error:
            bad.close()
            kept = options.output.with_name(f"{options.output.name}.{BAD_INPUT_FILE}")
            os.replace(bad.path, kept)
            bad.path = kept
            raise TooManyBadDocuments(f"{error}; all of them: {kept}", bad) from None
        check_output(options.output, options.force)  # another run may have been faster
        publish(folder, options.output)
        bad.path = options.output / BAD_INPUT_FILE
    return FilterResult(counts, bad, files_left_out)


def check_output(output: Path, force: bool) -> None:
    """Checks that a run may write to ``output``.

    Raises:
        DataError: something is there that must not be replaced.
    """
    if not output.exists() and not output.is_symlink():
        return
    try:
        is_ours = not output.is_symlink() and json.loads((output / REPORT_FILE).read_bytes())["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise DataError(f"{output}: exists and is not the output of a filter run; name another folder")
    if not force:
        raise DataError(f"{output}: holds a filtered corpus; name another folder, or replace it with --force")


def _check_options(options: FilterOptions) -> None:
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1 process is needed")
    if options.keep_removed is not None and options.keep_removed < 0:
        raise DataError(f"--keep-removed {options.keep_removed}: must be 0 or more")
    if options.shard_bytes < 1:
        raise DataError(f"--shard-bytes {options.shard_bytes}: must be 1 or more")
    if not 0 <= options.max_bad_fraction <= 1:
        raise DataError(f"--max-bad-fraction {options.max_bad_fraction}: must be between 0 and 1")


def _write(
    options: FilterOptions,
    files: list[InputFile],
    judge: Judge,
    folder: Path,
    counts: Report,
    bad: BadInputLog,
    report: Callable[[Progress], None],
) -> None:
    with ExitStack() as stack:
        stack.callback(bad.close)
        kept = stack.enter_context(KeptShards(folder, options.shard_bytes))
        removed = stack.enter_context(ZstdLines(folder / REMOVED_FILE))

        def settle(judged: Judged) -> None:
            if judged.removal is None:
                kept.add(judged.json_line)
                counts.add_kept(judged)
            else:
                _note_removal(options, counts, removed, judged, judged.removal)

        spool = stack.enter_context(closing(Spool(folder))) if judge.corpus_filters else None
        for judged in stack.enter_context(closing(_judged(options, files, judge, counts, bad, report))):
            if spool is not None and judged.removal is None:
                spool.add(judged)
            else:
                settle(judged)
        for judged in spool.settle(judge.corpus_filters) if spool is not None else ():
            settle(judged)
    counts.write(folder, options.config, kept.names)


def _judged(
    options: FilterOptions,
    files: list[InputFile],
    judge: Judge,
    counts: Report,
    bad: BadInputLog,
    report: Callable[[Progress], None],
) -> Generator[Judged, None, None]:
    """Yields the judged documents in input order; notes bad ones, and stops where there are too many."""
    total_bytes = sum(file.size for file in files)
    bytes_of_batch: list[int] = []  # filled by the reader, taken as results arrive, in the same order
    done_bytes = documents = 0
    with closing(encode_in_order(_batches(files, bytes_of_batch), judge, options.workers)) as results:
        for number, batch in enumerate(results):
            for item in batch:
                if isinstance(item, Judged):
                    documents += 1
                    yield item
                else:
                    bad.add(item)
                    counts.add_bad(item)
            done_bytes += bytes_of_batch[number]
            report(Progress("filter", documents, bad.total, done_bytes, total_bytes))
    total = bad.total + documents
    if documents == 0:
        raise TooManyBadDocuments(f"none of the {total} documents could be read", bad)
    if bad.total > options.max_bad_fraction * total:
        raise TooManyBadDocuments(
            f"{bad.total} of {total} documents are bad ({bad.total / total:.2%}), "
            f"more than --max-bad-fraction {options.max_bad_fraction:g} allows",
            bad,
        )


def _batches(files: list[InputFile], bytes_of_batch: list[int]) -> Iterator[Batch]:
    """Cuts the documents of all files into batches whose borders depend on the input alone."""
    batch: Batch = []
    payload = file_bytes = 0
    for file in files:
        position = 0
        for item in read_records(file):
            batch.append(item.document)
            payload += len(item.document.payload) if isinstance(item.document, RawDocument) else 0
            file_bytes += item.file_bytes_read - position
            position = item.file_bytes_read
            if payload >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                bytes_of_batch.append(file_bytes)
                yield batch
                batch, payload, file_bytes = [], 0, 0
    if batch:
        bytes_of_batch.append(file_bytes)
        yield batch


def _note_removal(options: FilterOptions, counts: Report, removed: ZstdLines, judged: Judged, removal: Removal) -> None:
    count = counts.add_removed(judged, removal)
    if options.keep_removed is None or count.documents <= options.keep_removed:
        removed.write(removed_line(judged, removal))
