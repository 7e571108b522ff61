"""A folder in the released Hugging Face layout: what its safetensors files hold, and reading from them.

Only headers are read when a folder is opened. A tensor, or a part of one, is read when asked for, and its file is
closed again: what a process has read and let go does not stay mapped into it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from steptron.checkpoint.released.names import Precision, ReleasedTensor
from steptron.errors import ConfigError, UserError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
"""By the names of safetensors: those that a model of ours can have."""
NAMES = {"fp32": "F32", "bf16": "BF16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it; ``dtype`` is safetensors' name, such as BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """0 for a dtype that no model of ours has."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0


class ReleasedFolder:
    """The tensors of a folder with ``model.safetensors``, or with shards and ``model.safetensors.index.json``.

    Args:
        path: the folder.

    Raises:
        ConfigError: lists every file that is missing, damaged, or does not hold what the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        single, index = path / SINGLE, path / INDEX
        if single.is_file() and index.is_file():
            raise UserError(f"{path} holds both {SINGLE} and {INDEX}: which one is meant? Take the other away")
        if not single.is_file() and not index.is_file():
            raise UserError(f"{path} is no model in the released layout: it has neither {SINGLE} nor {INDEX}")
        problems: list[str] = []
        self.tensors: Mapping[str, StoredTensor] = (
            _headers([single], problems) if single.is_file() else _indexed(index, problems)
        )
        if problems:
            raise ConfigError(str(path), problems)

    def read(self, name: str, part: Sequence[slice] = ()) -> torch.Tensor:
        """A tensor, or a part of it given by a slice for each of its first axes, in the dtype that is stored.

        Raises:
            UserError: the file cannot be read.
        """
        stored = self.tensors[name]
        try:
            with safe_open(stored.file, framework="pt") as file:
                values: torch.Tensor = file.get_slice(name)[tuple(part) or ...]
                # A copy: what is mapped would keep the file open.
                return values.clone()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{stored.file}: {name} cannot be read: {error}") from error

    def check(self, expected: Iterable[ReleasedTensor], precision: Precision) -> None:
        """Checks that exactly the expected tensors are there, in their shapes and dtypes.

        Raises:
            ConfigError: lists every missing, extra, wrongly shaped and wrongly typed tensor.
        """
        wanted = {tensor.name: tensor for tensor in expected}
        problems = list(self._differences(wanted, precision))
        problems += [f"{name} is not part of the model" for name in self.tensors if name not in wanted]
        if problems:
            raise ConfigError(f"{self.path} does not fit its {CONFIG}", problems)

    def _differences(self, wanted: Mapping[str, ReleasedTensor], precision: Precision) -> Iterator[str]:
        for name, tensor in wanted.items():
            stored, dtype = self.tensors.get(name), NAMES[tensor.precision(precision)]
            if stored is None:
                yield f"{name} {list(tensor.shape)} is missing"
                continue
            if stored.shape != tensor.shape:
                yield f"{name} has shape {list(stored.shape)}, the model needs {list(tensor.shape)}"
            if stored.dtype != dtype:
                yield f"{name} has dtype {stored.dtype}, the model needs {dtype}"


def read_json(file: Path) -> dict[str, object]:
    """The mapping in a JSON file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a mapping")
    return content


def _indexed(index: Path, problems: list[str]) -> dict[str, StoredTensor]:
    content = read_json(index)
    entries = content.get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        problems.append(f"{index.name}: weight_map must be a mapping from tensor to file name")
        return {}
    names = list(dict.fromkeys(entries.values()))
    others = sorted(path.name for path in index.parent.glob("*.safetensors") if path.name not in names)
    problems += [f"{name} is not named by {index.name}" for name in others]
    outside = [name for name in names if Path(name).name != name]
    problems += [f"{index.name}: {name!r} is not the name of a file in the folder" for name in outside]
    tensors = _headers([index.parent / name for name in names if name not in outside], problems)
    unreadable = {name for name in names if not any(stored.file.name == name for stored in tensors.values())}
    for name, file in entries.items():
        if file in unreadable:
            continue  # the file itself was named already
        if name not in tensors:
            problems.append(f"{name}: the index says {file}, which does not hold it")
        elif tensors[name].file.name != file:
            problems.append(f"{name}: the index says {file}, but it lies in {tensors[name].file.name}")
    problems += [
        f"{name} lies in {stored.file.name}, but the index does not name it"
        for name, stored in tensors.items()
        if name not in entries
    ]
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(stored.num_bytes for stored in tensors.values())
    if total is not None and total != held and all(stored.num_bytes for stored in tensors.values()) and not problems:
        problems.append(f"{index.name}: metadata.total_size is {total!r}, the tensors have {held} bytes")
    return tensors


def _headers(files: Iterable[Path], problems: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    header = file.get_slice(name)
                    if name in tensors:
                        problems.append(f"{name} lies in {tensors[name].file.name} and in {path.name}")
                    tensors[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
        except FileNotFoundError:
            problems.append(f"{path.name} is missing")
        except (OSError, SafetensorError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    return tensors
