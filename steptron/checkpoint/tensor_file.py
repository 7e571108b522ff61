"""Writing many tensors into one file of a checkpoint, each as ``torch.save`` would, without its cost for each.

``torch.save`` builds an archive around a tensor's bytes: 0.2 ms of Python each, and a CRC-32 of what our own checksum
covers anyway. Around tensors of one dtype, shape and stride the archive is always the same, so it is made once.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from steptron.checkpoint.checksums import FileSum

_BUFFER_BYTES = 1 << 18
_archiving = threading.Lock()
"""Whether ``torch.save`` adds a CRC-32, which would be that of one tensor, is each thread's own setting in torch 2.13;
nothing promises it."""
_LOCAL_HEADER_BYTES = 30  # of a zip archive's member, before its name and its extra field


class _Archive(NamedTuple):
    """What ``torch.save`` writes before and after the bytes of a storage."""

    head: bytes
    tail: bytes


def write_tensor_file(
    path: Path,
    objects: Iterable[tuple[WriteItem, io.BytesIO]],
    tensors: Iterable[tuple[WriteItem, torch.Tensor]],
) -> tuple[list[WriteResult], FileSum]:
    """Writes a file to the disk.

    Args:
        path: the file, which torch's list of tensors calls by its name.
        objects: already serialized.
        tensors: on the CPU, of any dtype, shape and stride.

    Returns:
        Where in the file each item lies, for torch's list, and the file's size and checksum: those of what was meant to
        be written, not of what the disk gives back.

    Raises:
        OSError: the file cannot be written.
    """
    archives: dict[Any, _Archive] = {}
    results, digest, position = [], xxhash.xxh3_128(), 0
    serialized = ((item, (data.getbuffer(),)) for item, data in objects)
    with path.open("wb", buffering=_BUFFER_BYTES) as stream:
        for item, pieces in itertools.chain(
            serialized, ((item, _pieces(tensor, archives)) for item, tensor in tensors)
        ):
            length = 0
            for piece in pieces:
                stream.write(piece)
                digest.update(piece)
                length += len(piece)
            results.append(WriteResult(item.index, length, _StorageInfo(path.name, position, length)))
            position += length
        stream.flush()
        os.fsync(stream.fileno())
    return results, FileSum(bytes=position, xxh3_128=digest.hexdigest())


def _pieces(tensor: torch.Tensor, archives: dict[Any, _Archive]) -> tuple[bytes, memoryview, bytes]:
    """What ``torch.save`` writes, piece by piece; ``archives`` keeps what may serve again."""
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes())
    if key not in archives:
        archives[key] = _archive_around(tensor)
    head, tail = archives[key]
    return head, torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data, tail


def _archive_around(tensor: torch.Tensor) -> _Archive:
    written = io.BytesIO()
    with _archiving:
        with_checksum = get_crc32_options()
        set_crc32_options(False)
        try:
            torch.save(tensor, written)
        finally:
            set_crc32_options(with_checksum)
    content = written.getbuffer()
    with zipfile.ZipFile(written) as archive:
        (member,) = (found for found in archive.infolist() if found.filename.endswith("/data/0"))
    # The local header ends with a name and an extra field (padding that aligns the data), and gives their lengths.
    name, extra = (
        int.from_bytes(content[member.header_offset + at : member.header_offset + at + 2], "little") for at in (26, 28)
    )
    start = member.header_offset + _LOCAL_HEADER_BYTES + name + extra
    end = start + tensor.untyped_storage().nbytes()
    return _Archive(bytes(content[:start]), bytes(content[end:]))
