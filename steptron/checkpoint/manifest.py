"""What a checkpoint says of itself: its manifest and the configuration that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from steptron.checkpoint.folder import MANIFEST
from steptron.config.loader import load as load_config
from steptron.config.schema import PretrainConfig
from steptron.errors import UserError

FORMAT_VERSION = 1
CONFIG = "config.yaml"
"""The resolved configuration inside a checkpoint: a configuration file like any other."""


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
        progress: how far the run had come.
        optimizer_steps: updates that the optimizer's state has seen.
        datasets: content hashes of the training datasets, in their order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    steptron_version: str
    torch_version: str
    progress: Progress
    optimizer_steps: int
    datasets: list[str]


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
    except (OSError, ValidationError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def read_config(folder: Path) -> PretrainConfig:
    """The configuration that a checkpoint was trained with.

    Raises:
        UserError: the folder is no checkpoint of this format, or its configuration cannot be read.
    """
    read_manifest(folder)
    return load_config(folder / CONFIG).config
