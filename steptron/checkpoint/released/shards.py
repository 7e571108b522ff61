"""The safetensors files of an export: which tensors each holds, and writing one with one tensor in memory.

The safetensors library writes a file from tensors that are all in memory. Its format is a length (8 bytes, little
endian), a JSON header of that length, and the tensors' bytes in the header's order
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from steptron.checkpoint.released.folder import DTYPES, NAMES, SINGLE
from steptron.checkpoint.released.names import Precision, ReleasedTensor
from steptron.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ALIGNMENT = 8
_TOGETHER_BYTES = 32 * 2**20
"""Tensors that are read at once, unless one is larger: small ones would each cost a look at the list of all."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; ``dtype`` is safetensors' name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """A safetensors file.

    Attributes:
        file: its name.
        entries: what it holds, in the order of its bytes.
    """

    file: str
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    @cached_property
    def header(self) -> bytes:
        """Everything before the tensors' bytes, filled up with spaces so that those are aligned."""
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in self.entries:
            content[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.num_bytes],
            }
            offset += entry.num_bytes
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def is_complete(self, folder: Path) -> bool:
        """Whether the file is there as it was planned: with this header, and as long as that says."""
        path = folder / self.file
        if not path.is_file() or path.stat().st_size != len(self.header) + self.num_bytes:
            return False
        with path.open("rb") as stream:
            return stream.read(len(self.header)) == self.header

    def write(
        self,
        folder: Path,
        read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
        wrote: Callable[[int], None],
    ) -> None:
        """Writes the file; it has its name only when it is complete and on the disk.

        Args:
            folder: where it goes.
            read: returns whole tensors by name, of which the dtypes are converted.
            wrote: told the bytes of each tensor that was written.
        """
        partial = folder / f"{self.file}.partial"
        with partial.open("wb") as stream:
            stream.write(self.header)
            for batch in _batches(self.entries):
                tensors = read([entry.name for entry in batch])
                for entry in batch:
                    tensor = tensors[entry.name].to(DTYPES[entry.dtype]).contiguous()
                    stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                    wrote(entry.num_bytes)
                del tensors, tensor
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(folder / self.file)


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    for entry in entries:
        if batch and sum(other.num_bytes for other in batch) + entry.num_bytes > _TOGETHER_BYTES:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def plan_shards(tensors: Sequence[ReleasedTensor], precision: Precision, max_bytes: int) -> list[Shard]:
    """Deals tensors, in their order and unsplit, to files of up to ``max_bytes`` of tensors each.

    A tensor that is larger has a file of its own. One file is ``model.safetensors``.
    """
    groups: list[list[Entry]] = [[]]
    size = 0
    for tensor in tensors:
        entry = Entry(tensor.name, tensor.shape, NAMES[tensor.precision(precision)])
        if groups[-1] and size + entry.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    count = len(groups)
    return [
        Shard(
            SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            # Wider dtypes first, so that every tensor starts at a multiple of its element's size.
            tuple(sorted(group, key=lambda entry: -DTYPES[entry.dtype].itemsize)),
        )
        for number, group in enumerate(groups, start=1)
    ]


def parse_size(text: str) -> int:
    """Bytes from ``5GB``, ``500MB``, ``4GiB`` or a plain number.

    Raises:
        UserError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        raise UserError(f"size {text!r} is not understood: give bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
    return size
