"""What a checkpoint says of itself: its manifest and the configuration that it was trained with."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from steptron.checkpoint.checksums import FileSum, text_sum
from steptron.checkpoint.folder import MANIFEST
from steptron.config.loader import load as load_config
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, PretrainConfig, Section
from steptron.errors import UserError

FORMAT_VERSION = 2
CONFIG = "config.yaml"
"""The resolved configuration inside a checkpoint of a run: a configuration file like any other."""
_OWN_SUM = "manifest_xxh3_128"
MODEL = "model.yaml"
"""Inside a checkpoint that holds a model alone: its ``model`` section; configurations can name it under ``base:``."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: completed optimizer steps.
        consumed_sequences: training sequences consumed, over all ranks.
        consumed_tokens: non-padding tokens consumed, over all ranks.
        left_out_sequences: sequences before the next one that were passed over when the run rolled back.
        recent_losses: main head, nats, of the last steps, oldest first, where loss spikes are looked for.
    """

    step: int = 0
    consumed_sequences: int = 0
    consumed_tokens: int = 0
    left_out_sequences: int = 0
    recent_losses: tuple[float, ...] = ()

    @property
    def next_sequence(self) -> int:
        """Place of the next sequence in the order of training."""
        return self.consumed_sequences + self.left_out_sequences


class StageRecord(BaseModel):
    """A stage of a run.

    Attributes:
        name: of the stage.
        first_sequence: sequences of the stages before.
        sequences: that it takes in all.
        ends: it ends with this checkpoint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    first_sequence: int
    sequences: int
    ends: bool


class Manifest(BaseModel):
    """Content of ``steptron.json``, the file that is written last.

    Attributes:
        format_version: of the checkpoint's layout.
        written_at: when, ISO 8601 in UTC.
        steptron_version, torch_version, megatron_version: that wrote it.
        processes: number of processes that wrote it.
        layout: their ``parallel`` section, for people: any layout reads any checkpoint.
        progress: how far the run had come; None in a checkpoint that holds a model alone.
        optimizer_steps: updates that the optimizer's state has seen.
        validation_loss: cross entropy of the main head at this step, nats; None if it was not validated.
        requested: an alert asked for it.
        datasets: content hashes of the training datasets, in their order.
        stage: of the run's curriculum that wrote it; None where it has none.
        files: every other file of the folder, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = FORMAT_VERSION
    written_at: str
    steptron_version: str
    torch_version: str
    megatron_version: str
    processes: int
    layout: dict[str, Any] = {}
    progress: Progress | None
    optimizer_steps: int = 0
    validation_loss: float | None = None
    requested: bool = False
    datasets: list[str] = []
    stage: StageRecord | None = None
    files: dict[str, FileSum]


class _Version(BaseModel):
    format_version: int


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, with a checksum of its own, to the disk."""
    content = manifest.model_dump(mode="json")
    with (folder / MANIFEST).open("w") as stream:
        json.dump({_OWN_SUM: _sum_of(content), **content}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        UserError: it cannot be read, is damaged, or was written in another format version.
    """
    file = folder / MANIFEST
    try:
        text = file.read_bytes()
        version = _Version.model_validate_json(text).format_version
        if version != FORMAT_VERSION:
            raise UserError(f"{folder} has checkpoint format {version}, this version reads {FORMAT_VERSION}")
        content: dict[str, Any] = json.loads(text)
        if content.pop(_OWN_SUM, None) != _sum_of(content):
            raise UserError(f"{file} has other content than was written (its checksum differs): it is damaged")
        return Manifest.model_validate(content)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        faults = "; ".join(".".join(map(str, (*fault["loc"], fault["msg"]))) for fault in error.errors())
        raise UserError(f"{file} cannot be read: {faults}") from error


def _sum_of(content: dict[str, Any]) -> str:
    return text_sum(json.dumps(content, sort_keys=True))


class _ModelFile(Section):
    model: ModelConfig


def read_config(folder: Path) -> PretrainConfig:
    """The configuration that a checkpoint was trained with.

    Raises:
        UserError: the folder is no checkpoint of this format, holds a model alone, or its configuration cannot be read.
    """
    if read_manifest(folder).progress is None:
        raise UserError(
            f"{folder} holds a model alone, not the state of a run; it can be a run's train.initial_weights"
        )
    return load_config(folder / CONFIG).config


def read_model_config(folder: Path) -> ModelConfig:
    """The architecture of a checkpoint's model, whether a run wrote it or it holds a model alone.

    Raises:
        UserError: the folder is no checkpoint of this format, or its configuration cannot be read.
    """
    if read_manifest(folder).progress is None:
        return load_section(folder / MODEL, _ModelFile).model
    return load_config(folder / CONFIG).config.model


def read_sequence_length(folder: Path) -> int | None:
    """Tokens of the sequences that a checkpoint's run trained on; None where it holds a model alone.

    Raises:
        UserError: the folder is no checkpoint of this format, or its configuration cannot be read.
    """
    return None if read_manifest(folder).progress is None else read_config(folder).data.sequence_length
