"""Checksums of a checkpoint's files. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

_CHUNK_BYTES = 1 << 20
"""Read into one buffer that stays in the cache: twice as fast as fresh ones of 4 MiB."""


class FileSum(BaseModel):
    """What a file should be.

    Attributes:
        bytes: its size.
        xxh3_128: XXH3's 128-bit hash of its content, hexadecimal. It finds damage; it does not protect against someone
            who wants to deceive.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    xxh3_128: str


def file_sum(file: Path, report: Callable[[int], None] = lambda num_bytes: None) -> FileSum:
    """Reads a file; ``report`` is told of each number of bytes that was read.

    Raises:
        OSError: it cannot be read.
    """
    state, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            state.update(buffer[:num_bytes])
            size += num_bytes
            report(num_bytes)
    return FileSum(bytes=size, xxh3_128=state.hexdigest())


def text_sum(text: str) -> str:
    """The same hash of a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def file_sums(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Those of some files of a folder, by name."""
    return {name: file_sum(folder / name) for name in names}


def fault(
    folder: Path,
    name: str,
    expected: FileSum,
    contents: bool = True,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> str | None:
    """What is wrong with a file, for a message; None if nothing is.

    Args:
        folder, name: the file.
        expected: what it should be.
        contents: read it; otherwise only its size is looked at.
        report: as :func:`file_sum`'s.
    """
    file = folder / name
    try:
        size = file.stat().st_size
        if size != expected.bytes:
            return f"{name} has {size:,} bytes, it was written with {expected.bytes:,}: it was cut off or changed"
        if contents and file_sum(file, report) != expected:
            return f"{name} has other content than was written (its checksum differs): it is damaged"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None
