"""``dataset.json``: what a dataset folder holds.

A folder is a dataset if and only if it holds this file; it is written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from steptron.data.errors import DataError

MANIFEST_FILE = "dataset.json"
FORMAT = "steptron.dataset"
FORMAT_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitRecord(_Record):
    """One split. Entropies are in nats per token and count every token whose prediction counts in the
    loss: end-of-document tokens do, tokens under a masked span do not.

    Attributes:
        documents: number of documents.
        tokens: number of tokens, one end-of-document token per document included.
        masked_tokens: tokens under a masked span.
        bytes: UTF-8 bytes of the documents' text.
        masked_bytes: those of them whose tokens do not count; None in datasets of versions that did not count them.
        loss_mask: whether a parallel uint8 dataset ``SPLIT.loss_mask`` marks tokens that do not count or are metadata.
        metadata_tokens: tokens of metadata before the texts; None where there are none.
        metadata_bytes: UTF-8 bytes of that metadata; None where there are none.
        unigram_entropy: -sum_v p_v log p_v with p the split's own token frequencies: what the best
            model without context reaches on this split. 0 for an empty split.
        unigram_cross_entropy: -sum_v p_v log q_v with q the frequencies of the *train* split after
            adding one to the count of each of the ``vocabulary_size`` tokens: what a model without
            context that learned only the train split's frequencies reaches on this split.
    """

    documents: int
    tokens: int
    masked_tokens: int
    bytes: int
    loss_mask: bool
    unigram_entropy: float
    unigram_cross_entropy: float
    masked_bytes: int | None = None
    metadata_tokens: int | None = None
    metadata_bytes: int | None = None


class SourceRecord(_Record):
    """One INPUT as given: files read, documents kept, bytes of their text."""

    path: str
    files: int
    documents: int
    bytes: int


class FileRecord(_Record):
    """Size in bytes and SHA-256 of a file of the dataset."""

    size: int
    sha256: str


class Manifest(_Record):
    """Content of ``dataset.json``.

    Attributes:
        format, format_version: ``steptron.dataset``, 1.
        vocabulary_size: largest token id of the tokenizer plus one.
        eod_id: id of the token that ends every document.
        tokenizer_hash: SHA-256 of ``tokenizer.json``.
        dtype: numpy name of the tokens' dtype on disk.
        seed, validation_fraction: what decided the split of each document.
        bad_documents: documents left out because they could not be read (``bad_input.jsonl``).
        train, validation: the splits.
        sources: the inputs.
        files: the data files; a split without documents has none.
        content_hash: SHA-256 over tokenizer, end-of-document id and data files: equal exactly for
            datasets that train alike.
        chat_template: name and SHA-256 of the template that rendered conversations; None for texts.
        metadata_fields: what documents begin with, where they say it; None without metadata.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    vocabulary_size: int
    eod_id: int
    tokenizer_hash: str
    dtype: str
    seed: int
    validation_fraction: float
    bad_documents: int
    train: SplitRecord
    validation: SplitRecord
    sources: list[SourceRecord]
    files: dict[str, FileRecord]
    content_hash: str
    chat_template: str | None = None
    metadata_fields: list[str] | None = None

    def split(self, name: str) -> SplitRecord:
        """The record of split ``train`` or ``validation``."""
        return {"train": self.train, "validation": self.validation}[name]

    def write(self, folder: Path) -> None:
        """Writes ``dataset.json`` into a folder."""
        (folder / MANIFEST_FILE).write_text(self.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


def content_hashes(folders: Iterable[Path]) -> list[str]:
    """What datasets hold, in short; see :func:`read_manifest`."""
    return [read_manifest(folder).content_hash for folder in folders]


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a dataset folder.

    Raises:
        DataError: no such folder, no dataset, or a dataset of another format version.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; a dataset is a folder written by `steptron data build`")
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise DataError(f"{folder}: not a dataset (it has no {MANIFEST_FILE}); write one with `steptron data build`")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); build the dataset again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{file}: not the manifest of a dataset (`format` is not {FORMAT!r})")
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{file}: format version {content.get('format_version')}, this Steptron reads version {FORMAT_VERSION}; "
            "build the dataset again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{file}: field {where}: {first['msg']}; build the dataset again") from error
