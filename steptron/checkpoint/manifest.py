"""What a checkpoint says of itself: its manifest and the configuration that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from steptron.checkpoint.folder import MANIFEST
from steptron.config.loader import load as load_config
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, PretrainConfig, Section
from steptron.errors import UserError

FORMAT_VERSION = 1
CONFIG = "config.yaml"
"""The resolved configuration inside a checkpoint of a run: a configuration file like any other."""
MODEL = "model.yaml"
"""Inside a checkpoint that holds a model alone: its ``model`` section; configurations can name it under ``base:``."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: completed optimizer steps.
        consumed_sequences: training sequences consumed, over all ranks.
        consumed_tokens: non-padding tokens consumed, over all ranks.
    """

    step: int = 0
    consumed_sequences: int = 0
    consumed_tokens: int = 0


class Manifest(BaseModel):
    """Content of ``steptron.json``, the file that is written last.

    Attributes:
        format_version: of the checkpoint's layout.
        steptron_version, torch_version: that wrote it.
        progress: how far the run had come; None in a checkpoint that holds a model alone.
        optimizer_steps: updates that the optimizer's state has seen.
        datasets: content hashes of the training datasets, in their order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    steptron_version: str
    torch_version: str
    progress: Progress | None
    optimizer_steps: int = 0
    datasets: list[str] = []


class _Version(BaseModel):
    format_version: int


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        UserError: it cannot be read, or was written in another format version.
    """
    file = folder / MANIFEST
    try:
        content = file.read_bytes()
        version = _Version.model_validate_json(content).format_version
        if version != FORMAT_VERSION:
            raise UserError(f"{folder} has checkpoint format {version}, this version reads {FORMAT_VERSION}")
        return Manifest.model_validate_json(content)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        faults = "; ".join(".".join(map(str, (*fault["loc"], fault["msg"]))) for fault in error.errors())
        raise UserError(f"{file} cannot be read: {faults}") from error


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
