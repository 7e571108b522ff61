"""Builds a dataset folder: read, tokenize, split, write, publish."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import numpy as np

from steptron.data.encoding import EncodedBatch, Encoder, parse
from steptron.data.errors import DataError
from steptron.data.indexed import IndexedWriter, WrittenFile, smallest_dtype
from steptron.data.limits import LARGEST_VOCABULARY, SMALLEST_TOKENIZER_SAMPLE
from steptron.data.loss_mask import COUNTS, METADATA
from steptron.data.manifest import FileRecord, Manifest, SourceRecord, SplitRecord
from steptron.data.readers import BadDocument, Fields, InputFile, RawDocument, find_files, read_file, recorded_name
from steptron.data.replace import check_replaceable
from steptron.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer, train_tokenizer
from steptron.data.workers import Batch, encode_in_order
from steptron.platform.staging import publish, staging_folder

BAD_INPUT_FILE = "bad_input.jsonl"
EXAMPLES_PER_KIND = 3
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    Attributes:
        inputs: folders and files to read.
        output: folder to write.
        tokenizer: ``tokenizer.json`` or Hugging Face folder; None trains one.
        train_vocab_size: vocabulary of the tokenizer to train; None loads one.
        eod_token: end-of-document token of a loaded tokenizer, where its own files name none or another.
        tokenizer_bytes: at most about this much text (bytes on disk) trains the tokenizer; a larger
            corpus is sampled by document.
        workers: tokenizing processes.
        validation_fraction: share of the documents in the validation split.
        fields: names of the fields of text, spans and metadata.
        max_bad_fraction: largest share of bad documents that is accepted.
        pattern: which files of a folder are read; by known extensions when None.
        seed: decides, with a document's text, its split.
        force: replace a dataset at ``output``.
    """

    inputs: list[Path]
    output: Path
    tokenizer: Path | None = None
    train_vocab_size: int | None = None
    eod_token: str | None = None
    tokenizer_bytes: int = 2_000_000_000
    workers: int = 1
    validation_fraction: float = 0.01
    fields: Fields = field(default_factory=Fields)
    max_bad_fraction: float = 0.01
    pattern: str | None = None
    seed: int = 1234
    force: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a build is; ``file_bytes`` of ``total_file_bytes`` on disk are done in this phase."""

    phase: str
    documents: int
    bad_documents: int
    file_bytes: int
    total_file_bytes: int


class BadItem(Protocol):
    """A dataclass that says what is wrong in the input, and where."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def message(self) -> str: ...


@dataclass
class BadInputLog:
    """Counts bad documents and writes each to a JSONL file, in input order.

    Attributes:
        counts: number by kind.
        examples: the first few of each kind.
    """

    path: Path
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[BadItem]] = field(default_factory=lambda: defaultdict(list))
    _file: IO[str] | None = None

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, bad: BadItem) -> None:
        self.counts[bad.kind] += 1
        if len(self.examples[bad.kind]) < EXAMPLES_PER_KIND:
            self.examples[bad.kind].append(bad)
        if self._file is None:
            self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close
        self._file.write(json.dumps(dataclasses.asdict(bad), ensure_ascii=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class BuildResult:
    """A finished dataset, what was left out of it, and files in folders that were not read."""

    manifest: Manifest
    bad: BadInputLog
    files_left_out: int


@dataclass(frozen=True)
class TokenizerTraining:
    """A new tokenizer, the number of documents that trained it, and the documents that could not be read."""

    tokenizer: Tokenizer
    documents: int
    bad: list[BadDocument]


class TooManyBadDocuments(DataError):
    """The share of bad documents is past the limit, or there is no other.

    Attributes:
        bad: counts and examples; ``bad.path`` is the full report.
    """

    def __init__(self, message: str, bad: BadInputLog) -> None:
        super().__init__(message)
        self.bad = bad


def build_dataset(options: BuildOptions, report: Callable[[Progress], None] = lambda _: None) -> BuildResult:
    """Builds a dataset. Nothing appears at ``options.output`` unless all of it does.

    The files depend on the options and the inputs' content only, not on ``workers`` or time.

    Raises:
        TooManyBadDocuments: past ``max_bad_fraction``, or all; only the report of bad input is left.
        DataError: a wrong option, unusable inputs or tokenizer; nothing is left.
        OSError: the folder cannot be written; nothing is left.
    """
    _check_options(options)
    options = dataclasses.replace(options, output=Path(os.path.abspath(options.output)))  # "." has no name to write to
    check_replaceable(options.output, options.force, BAD_INPUT_FILE)
    files, files_left_out = find_files(options.inputs, options.pattern)
    with staging_folder(options.output) as folder:  # first of all: a folder that cannot be written is found at once
        tokenizer = _load_or_train_tokenizer(options, files, report)
        bad = BadInputLog(folder / BAD_INPUT_FILE)
        try:
            manifest = _write_dataset(options, files, tokenizer, folder, bad, report)
        except TooManyBadDocuments as error:
            bad.close()
            bad.path = _keep_report(bad.path, options.output)
            raise TooManyBadDocuments(f"{error}; all of them: {bad.path}", bad) from None
        check_replaceable(options.output, options.force, BAD_INPUT_FILE)  # another build may have been faster
        publish(folder, options.output)
        bad.path = options.output / BAD_INPUT_FILE
    return BuildResult(manifest, bad, files_left_out)


def _check_options(options: BuildOptions) -> None:
    if (options.tokenizer is None) == (options.train_vocab_size is None):
        raise DataError("give either --tokenizer (load one) or --train-tokenizer (train one), and not both")
    if options.train_vocab_size is not None and options.train_vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"--train-tokenizer {options.train_vocab_size}: at least {SMALLEST_VOCABULARY} are needed")
    if options.train_vocab_size is not None and options.train_vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"--train-tokenizer {options.train_vocab_size}: at most {LARGEST_VOCABULARY} are allowed")
    if options.train_vocab_size is not None and options.eod_token is not None:
        raise DataError("--eod-token belongs to a loaded tokenizer; one trained here ends documents with <|endoftext|>")
    names = options.fields.metadata
    if len(set(names) - {"", options.fields.text, options.fields.spans}) < len(names):
        raise DataError(
            f"--metadata-fields {','.join(names)}: names that are separated by commas, each once, and none of them the "
            f"text's ({options.fields.text}) or the spans' ({options.fields.spans})"
        )
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1 process is needed")
    if not 0 <= options.validation_fraction < 1:
        raise DataError(f"--validation-fraction {options.validation_fraction}: must be at least 0 and below 1")
    if not 0 <= options.max_bad_fraction <= 1:
        raise DataError(f"--max-bad-fraction {options.max_bad_fraction}: must be between 0 and 1")
    if not 0 <= options.seed < 2**63:
        raise DataError(f"--seed {options.seed}: must be at least 0 and below 2^63")


def _load_or_train_tokenizer(
    options: BuildOptions, files: list[InputFile], report: Callable[[Progress], None]
) -> Tokenizer:
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer, options.eod_token)
    assert options.train_vocab_size is not None
    # Bad documents are passed over here; tokenizing meets them again, and there they are counted.
    return train_tokenizer_on(
        files, options.fields, options.train_vocab_size, options.tokenizer_bytes, report
    ).tokenizer


def train_tokenizer_on(
    files: list[InputFile],
    fields: Fields,
    vocab_size: int,
    max_bytes: int = 2_000_000_000,
    report: Callable[[Progress], None] = lambda _: None,
) -> TokenizerTraining:
    """Trains a tokenizer on files, or on a sample of about ``max_bytes`` bytes of them.

    Where no document can be read, its tokens are the bytes.

    Raises:
        DataError: the vocabulary is too small or too large, or the sample is or turns out empty.
    """
    if max_bytes < SMALLEST_TOKENIZER_SAMPLE:
        raise DataError(f"--tokenizer-bytes {max_bytes}: at least {SMALLEST_TOKENIZER_SAMPLE} are needed")
    total = sum(file.size for file in files)
    keep_fraction = max_bytes / max(total, 1)
    bad: list[BadDocument] = []
    documents = passed_over = 0

    def texts() -> Iterator[str]:
        nonlocal documents, passed_over
        done = 0
        for file in files:
            position = 0
            for item in read_file(file, fields):
                done += item.file_bytes_read - position
                position = item.file_bytes_read
                if isinstance(item.document, RawDocument) and not _is_kept(item.document.payload, keep_fraction):
                    passed_over += 1
                    continue
                document = item.document if isinstance(item.document, BadDocument) else parse(item.document, fields)
                if isinstance(document, BadDocument):
                    bad.append(document)
                    continue
                documents += 1
                report(Progress("tokenizer", documents, len(bad), done, total))
                yield document.text

    tokenizer = train_tokenizer(texts(), vocab_size)
    if documents == 0 and passed_over > 0:
        raise DataError(f"no document fell into the tokenizer's sample of --tokenizer-bytes {max_bytes}; raise it")
    return TokenizerTraining(tokenizer, documents, bad)


class SplitWriter:
    """One split on disk: tokens, loss mask once a document has spans, and the counts of the manifest."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, vocab_size: int, stack: ExitStack) -> None:
        self._folder = folder
        self._name = name
        self._stack = stack
        self._tokens = stack.enter_context(IndexedWriter(folder / name, dtype))
        self._loss_mask: IndexedWriter | None = None
        self._lengths: list[np.ndarray] = []
        self.token_counts_V = np.zeros(vocab_size, np.int64)
        self.documents = self.text_bytes = self.masked_bytes = self.metadata_tokens = self.metadata_bytes = 0

    def add(
        self,
        tokens_T: np.ndarray,
        loss_mask_T: np.ndarray | None,
        lengths_D: np.ndarray,
        text_bytes: int,
        masked_bytes: int = 0,
        metadata_bytes: int = 0,
    ) -> None:
        """Adds documents.

        Args:
            tokens_T: their tokens, one after the other.
            loss_mask_T: uint8, bits of ``loss_mask``; None where all tokens count.
            lengths_D: tokens of each.
            text_bytes: UTF-8 bytes of their texts.
            masked_bytes: those of them whose tokens do not count in the loss.
            metadata_bytes: of the metadata before them.
        """
        if loss_mask_T is not None and self._loss_mask is None:
            self._loss_mask = self._stack.enter_context(
                IndexedWriter(self._folder / f"{self._name}.loss_mask", np.dtype("u1"))
            )
            for lengths in self._lengths:
                self._loss_mask.add(np.full(int(lengths.sum()), COUNTS, np.uint8), lengths)
        self._tokens.add(tokens_T, lengths_D)
        if self._loss_mask is not None:
            mask_T = np.full(tokens_T.size, COUNTS, np.uint8) if loss_mask_T is None else loss_mask_T
            self._loss_mask.add(mask_T, lengths_D)
        else:
            self._lengths.append(lengths_D)
        counted_T = tokens_T if loss_mask_T is None else tokens_T[loss_mask_T & COUNTS != 0]
        self.token_counts_V += np.bincount(counted_T, minlength=self.token_counts_V.size)
        self.documents += lengths_D.size
        self.text_bytes += text_bytes
        self.masked_bytes += masked_bytes
        self.metadata_tokens += 0 if loss_mask_T is None else int(np.count_nonzero(loss_mask_T & METADATA))
        self.metadata_bytes += metadata_bytes

    def finish(self) -> list[WrittenFile]:
        """Writes the indices; a split without documents leaves no file (an empty one cannot be mapped)."""
        files = self._tokens.finish()
        if self._loss_mask is not None:
            files += self._loss_mask.finish()
        if self.documents == 0:
            for file in files:
                (self._folder / file.name).unlink()
            return []
        return files

    def record(self, train_counts_V: np.ndarray) -> SplitRecord:
        smoothed_V = (train_counts_V + 1) / (train_counts_V.sum() + train_counts_V.size)
        total = int(self.token_counts_V.sum())
        return SplitRecord(
            documents=self.documents,
            tokens=self._tokens.num_tokens,
            masked_tokens=self._tokens.num_tokens - total,
            bytes=self.text_bytes,
            masked_bytes=self.masked_bytes,
            loss_mask=self._loss_mask is not None,
            metadata_tokens=self.metadata_tokens or None,
            metadata_bytes=self.metadata_bytes or None,
            unigram_entropy=_cross_entropy(self.token_counts_V, self.token_counts_V / max(total, 1)),
            unigram_cross_entropy=_cross_entropy(self.token_counts_V, smoothed_V),
        )


def _write_dataset(
    options: BuildOptions,
    files: list[InputFile],
    tokenizer: Tokenizer,
    folder: Path,
    bad: BadInputLog,
    report: Callable[[Progress], None],
) -> Manifest:
    dtype = smallest_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, options.fields, options.seed, options.validation_fraction, dtype)
    total_bytes = sum(file.size for file in files)
    bytes_of_batch: list[int] = []  # filled by the reader, taken as results arrive, in the same order
    source_documents = np.zeros(len(options.inputs), np.int64)
    source_bytes = np.zeros(len(options.inputs), np.int64)
    with ExitStack() as stack:
        stack.callback(bad.close)
        splits = {
            name: SplitWriter(folder, name, dtype, tokenizer.vocab_size, stack) for name in ("train", "validation")
        }
        done_bytes = documents = 0
        batches = read_batches(files, options.fields, bytes_of_batch)
        results = encode_in_order(batches, encoder, options.workers)
        stack.callback(results.close)
        for number, encoded in enumerate(results):
            for document in encoded.bad:
                bad.add(document)
            for name, writer in splits.items():
                add_selected(writer, encoded, encoded.validation_D == (name == "validation"))
            np.add.at(source_documents, encoded.sources_D, 1)
            np.add.at(source_bytes, encoded.sources_D, encoded.text_bytes_D)
            documents += encoded.lengths_D.size
            done_bytes += bytes_of_batch[number]
            report(Progress("tokens", documents, bad.total, done_bytes, total_bytes))
            _check_bad_share_early(options, bad, documents, done_bytes / max(total_bytes, 1))
        _check_bad_share(options, bad, documents)
        if documents == 0:
            raise TooManyBadDocuments(f"none of the {bad.total} documents could be read", bad)
        if splits["train"].documents == 0:
            raise DataError(
                f"all {documents} documents fell into the validation split; lower --validation-fraction, or set it to 0"
            )
        return finish_dataset(
            folder,
            tokenizer,
            splits,
            source_records(options.inputs, files, source_documents, source_bytes),
            seed=options.seed,
            validation_fraction=options.validation_fraction,
            bad_documents=bad.total,
            metadata_fields=options.fields.metadata,
        )


def source_records(
    inputs: list[Path], files: list[InputFile], documents_I: np.ndarray, bytes_I: np.ndarray
) -> list[SourceRecord]:
    """The inputs as the manifest records them: documents and bytes of text, int64 [I], that came from each."""
    return [
        SourceRecord(
            path=recorded_name(given),
            files=sum(file.source == number for file in files),
            documents=int(documents_I[number]),
            bytes=int(bytes_I[number]),
        )
        for number, given in enumerate(inputs)
    ]


def finish_dataset(
    folder: Path,
    tokenizer: Tokenizer,
    splits: dict[str, SplitWriter],
    sources: list[SourceRecord],
    *,
    seed: int,
    validation_fraction: float,
    bad_documents: int,
    chat_template: str | None = None,
    metadata_fields: tuple[str, ...] = (),
) -> Manifest:
    """Writes what makes the written splits ``train`` and ``validation`` a dataset: indices, tokenizer, manifest."""
    written = [file for writer in splits.values() for file in writer.finish()]
    tokenizer.save(folder)
    train_counts_V = splits["train"].token_counts_V
    content = hashlib.sha256(f"{tokenizer.hash} {tokenizer.eod_id}".encode())
    for file in written:
        content.update(f" {file.name} {file.sha256}".encode())
    manifest = Manifest(
        vocabulary_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        tokenizer_hash=tokenizer.hash,
        dtype=smallest_dtype(tokenizer.vocab_size).name,
        seed=seed,
        validation_fraction=validation_fraction,
        bad_documents=bad_documents,
        train=splits["train"].record(train_counts_V),
        validation=splits["validation"].record(train_counts_V),
        sources=sources,
        files={file.name: FileRecord(size=file.size, sha256=file.sha256) for file in written},
        content_hash=content.hexdigest(),
        chat_template=chat_template,
        metadata_fields=list(metadata_fields) or None,
    )
    manifest.write(folder)
    return manifest


def read_batches(files: list[InputFile], fields: Fields, bytes_of_batch: list[int]) -> Iterator[Batch]:
    """Cuts the documents of all files into batches whose borders depend on the input alone.

    Args:
        files: read in this order.
        fields: names of the fields of text and spans.
        bytes_of_batch: gets, before a batch is handed out, the bytes on disk that were read for it.
    """
    batch: Batch = []
    payload = file_bytes = 0
    for file in files:
        position = 0
        for item in read_file(file, fields):
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


def add_selected(writer: SplitWriter, encoded: EncodedBatch, selected_D: np.ndarray) -> None:
    """Writes the documents of a batch that are selected, bool [D], to a split."""
    if not selected_D.any():
        return
    selected_T = np.repeat(selected_D, encoded.lengths_D)
    writer.add(
        encoded.tokens_T[selected_T],
        None if encoded.loss_mask_T is None else encoded.loss_mask_T[selected_T],
        encoded.lengths_D[selected_D],
        int(encoded.text_bytes_D[selected_D].sum()),
        int(encoded.masked_bytes_D[selected_D].sum()),
        0 if encoded.metadata_bytes_D is None else int(encoded.metadata_bytes_D[selected_D].sum()),
    )


def _check_bad_share(options: BuildOptions, bad: BadInputLog, documents: int) -> None:
    total = bad.total + documents
    if total and bad.total > options.max_bad_fraction * total:
        raise TooManyBadDocuments(
            f"{bad.total} of {total} documents are bad ({bad.total / total:.2%}), "
            f"more than --max-bad-fraction {options.max_bad_fraction:g} allows",
            bad,
        )


def _check_bad_share_early(options: BuildOptions, bad: BadInputLog, documents: int, fraction_read: float) -> None:
    """Spares the rest of a hopeless build: stops once the bad documents so far exceed twice what is
    allowed for the whole input, its number of documents extrapolated from the bytes read."""
    expected_total = (bad.total + documents) / max(fraction_read, 1e-9)
    if bad.total > 2 * options.max_bad_fraction * expected_total and bad.total >= 1000:
        raise TooManyBadDocuments(
            f"{bad.total} of the first {bad.total + documents} documents are bad, far more than --max-bad-fraction "
            f"{options.max_bad_fraction:g} allows; stopped after {fraction_read:.0%} of the input",
            bad,
        )


def _keep_report(report: Path, output: Path) -> Path:
    """Moves the report into the output folder, or beside it if a dataset lives there."""
    kept = output / BAD_INPUT_FILE
    if output.exists() and any(path.name != BAD_INPUT_FILE for path in output.iterdir()):
        kept = output.with_name(f"{output.name}.{BAD_INPUT_FILE}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(report, kept)
    return kept


def _is_kept(payload: bytes, fraction: float) -> bool:
    if fraction >= 1:
        return True
    digest = hashlib.blake2b(payload, digest_size=8, person=b"tokenizer-sample").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _cross_entropy(counts_V: np.ndarray, probabilities_V: np.ndarray) -> float:
    """-sum p log q in nats, p the frequencies of ``counts_V``; 0 without counts."""
    seen_V = counts_V > 0
    if not seen_V.any():
        return 0.0
    frequencies = counts_V[seen_V] / counts_V.sum()
    return float(-(frequencies * np.log(probabilities_V[seen_V])).sum())
