"""The files of a filter run: shards of kept records, and the removed ones with their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import zstandard

from steptron.data.filters.judge import Judged, Removal

KEPT_FOLDER = "kept"
REMOVED_FILE = "removed.jsonl.zst"
_LEVEL = 3


class ZstdLines:
    """A .zst file of lines; context manager."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - closed by close
        self._stream = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).stream_writer(self._file)

    def write(self, line: bytes) -> None:
        """Writes a line, given without its end."""
        self._stream.write(line + b"\n")

    def close(self) -> None:
        self._stream.close()  # and the file with it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class KeptShards:
    """Kept records as ``kept/00000.jsonl.zst`` and so on; context manager.

    Args:
        folder: the output folder.
        shard_bytes: a shard ends with the record that reaches this many bytes, uncompressed.

    Attributes:
        names: files written, relative to ``folder``.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shard: ZstdLines | None = None
        self._written = 0
        self.names: list[str] = []
        (folder / KEPT_FOLDER).mkdir()

    def add(self, json_line: bytes) -> None:
        if self._shard is None:
            self.names.append(f"{KEPT_FOLDER}/{len(self.names):05}.jsonl.zst")
            self._shard, self._written = ZstdLines(self._folder / self.names[-1]), 0
        self._shard.write(json_line)
        self._written += len(json_line) + 1
        if self._written >= self._shard_bytes:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None


def removed_line(judged: Judged, removal: Removal) -> bytes:
    """A removed record as JSON line: why, where it stood, and under ``record`` the record as it was.

    The text is no field of the line itself, so that ``steptron data build`` refuses the file, should it be given it.
    """
    head = {
        "filter": removal.filter,
        "reason": removal.verdict.reason,
        "detail": removal.verdict.detail,
        "value": removal.verdict.value,
        "file": judged.file,
        "line": judged.line,
    }
    return json.dumps(head, ensure_ascii=False).encode()[:-1] + b', "record": ' + judged.json_line + b"}"
