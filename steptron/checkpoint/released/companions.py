"""The files beside the tensors of a released folder: configuration, generation settings, tokenizer, remote code.

An import keeps them in the checkpoint as they are, and an export gives them back byte for byte. A run's checkpoint has
no more than its tokenizer: the rest is written, or taken from another released folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from steptron.checkpoint.released.config_format import ONLY
from steptron.checkpoint.released.folder import CONFIG, read_json
from steptron.checkpoint.released.model_config import read_model_config, read_precision, write_model_config
from steptron.checkpoint.released.names import Precision
from steptron.config.schema import ModelConfig
from steptron.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from steptron.errors import UserError

KEPT = "released"
"""Folder of an imported checkpoint with the files that the weights came with."""
GENERATION_CONFIG = "generation_config.json"

_NAMES = frozenset(
    {
        CONFIG,
        GENERATION_CONFIG,
        TOKENIZER_FILE,
        TOKENIZER_CONFIG_FILE,
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.json",
    }
)
_SUFFIXES = frozenset({".jinja", ".py"})


def companion_files(folder: Path) -> list[Path]:
    """The companion files in a folder, by name."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and (path.name in _NAMES or path.suffix in _SUFFIXES)
    )


def keep(source: Path, checkpoint: Path) -> None:
    """Copies the companion files of a released folder into a checkpoint, and its tokenizer to where ours is read."""
    kept = checkpoint / KEPT
    kept.mkdir()
    for file in companion_files(source):
        shutil.copyfile(file, kept / file.name)
        if file.name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            shutil.copyfile(file, checkpoint / file.name)


@dataclass(frozen=True)
class Companions:
    """The companion files of an export.

    Attributes:
        folder: where existing ones are; those that a released folder has and this one lacks are written.
        longest: tokens of the longest sequence, for a ``config.json`` without one to start from; None if not known.
    """

    folder: Path
    longest: int | None

    @classmethod
    def of(cls, checkpoint: Path, model: ModelConfig, sequence_length: int | None, override: Path | None) -> Companions:
        """The files of a checkpoint, or those of the released folder or imported checkpoint ``override``.

        Raises:
            UserError: ``override`` has none.
        """
        scaling = model.full.rope.scaling
        longest = round(scaling.factor * scaling.original_length) if scaling is not None else sequence_length
        chosen = checkpoint if override is None else override
        folder = chosen / KEPT if (chosen / KEPT).is_dir() else chosen
        if override is not None and (not folder.is_dir() or not companion_files(folder)):
            raise UserError(f"{override} has neither {CONFIG} nor a tokenizer: name a released folder")
        return cls(folder, longest)

    @cached_property
    def base(self) -> Mapping[str, object] | None:
        """The ``config.json`` that is there, if it describes a model of this kind.

        Raises:
            UserError: it cannot be read.
        """
        if not (self.folder / CONFIG).is_file():
            return None
        raw = read_json(self.folder / CONFIG)
        return raw if raw.get("model_type") == ONLY["model_type"][0] else None

    def config(self, model: ModelConfig, precision: Precision) -> bytes:
        """``config.json`` of the export: the one that is there if it says the same of the model, else a new one.

        Raises:
            ConfigError: the model cannot be expressed; every reason is listed.
        """
        source = str(self.folder / CONFIG)
        if (
            self.base is not None
            and read_model_config(self.base, source) == model
            and read_precision(self.base, source) == precision
        ):
            return (self.folder / CONFIG).read_bytes()
        bos, eos = (None, None) if self.base is not None else self._tokens()
        known = self.base is not None and self.base.get("max_position_embeddings") is not None
        return _json(
            write_model_config(
                model,
                precision,
                base=self.base,
                bos_token_id=bos,
                eos_token_id=eos,
                max_position_embeddings=None if known else self.longest,
            )
        )

    def write(self, output: Path, config: bytes) -> None:
        """Writes the files to ``output``: ``config`` as ``config.json``, the others as they are.

        Where there are no generation settings, the token ids of ``config.json`` are written as such.
        """
        for file in companion_files(self.folder):
            shutil.copyfile(file, output / file.name)
        (output / CONFIG).write_bytes(config)
        tokens = {key: json.loads(config).get(key) for key in ("bos_token_id", "eos_token_id")}
        tokens = {key: value for key, value in tokens.items() if value is not None}
        if tokens and not (output / GENERATION_CONFIG).exists():
            (output / GENERATION_CONFIG).write_bytes(_json(tokens))

    def _tokens(self) -> tuple[int | None, int | None]:
        """Ids of the tokens that begin and end a text, as far as the tokenizer has them."""
        if not (self.folder / TOKENIZER_FILE).is_file():
            return None, None
        eos = Tokenizer.load(self.folder).eod_id
        settings = self.folder / TOKENIZER_CONFIG_FILE
        bos = read_json(settings).get("bos_token") if settings.is_file() else None
        text = bos.get("content") if isinstance(bos, dict) else bos
        if not isinstance(text, str):
            return None, eos
        return tokenizers.Tokenizer.from_file(str(self.folder / TOKENIZER_FILE)).token_to_id(text), eos


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
