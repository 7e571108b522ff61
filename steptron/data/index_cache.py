"""Orders of documents and samples as files of one folder, memory-mapped by all processes of all nodes.

A file is written once, by whichever process needs it first or ahead of the run (``steptron data
build-index``), under another name, and renamed when it is complete. Its name and its first 4,096 bytes
say what the order depends on; then come the permutation (uint32, or int64 beyond 2^32 entries), zeros
up to a multiple of 8 bytes and, for documents, the tokens of the epoch up to the end of each (int64).
There is no checksum because the content proves itself where it is read (``permutation``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from steptron.data.dataset import TokenDataset
from steptron.data.errors import DataError
from steptron.data.orders import DocumentOrder, document_key, sample_key
from steptron.data.permutation import Permutation, number_dtype, permutation_pieces

FORMAT = "steptron.order"
FORMAT_VERSION = 1
_HEADER_BYTES = 4096  # a page, so that the arrays are aligned

_TELL_SECONDS = 1.0  # between signs of life of a process that builds
_LONGEST_POLL_SECONDS = 2.0
_LEFTOVER_SECONDS = 24 * 3600.0  # a file that nobody has written to for so long is no longer being built

Report = Callable[[str, int, int], None]
"""Called with the name of a file that is built, entries done and entries in all."""


@dataclass(frozen=True)
class OrderFile:
    """One order, by all that it depends on.

    Attributes:
        seed: of the stream: ``data.seed`` plus the dataset's place in the blend times 2^64.
        epoch: of documents, or block of samples.
        size: entries.
        dataset: whose documents are ordered; None for an order of samples, which depends on their number only.
    """

    seed: int
    epoch: int
    size: int
    dataset: TokenDataset | None

    @classmethod
    def of_documents(cls, dataset: TokenDataset, seed: int, epoch: int) -> OrderFile:
        return cls(seed, epoch, dataset.num_documents, dataset)

    @classmethod
    def of_samples(cls, size: int, seed: int, block: int) -> OrderFile:
        return cls(seed, block, size, None)

    @property
    def name(self) -> str:
        """Name of the file; those of another format version have other names."""
        number, seed = divmod(self.seed, 2**64)
        what = f"samples-{self.size}"
        if self.dataset is not None:
            what = f"documents-{self.dataset.manifest.content_hash[:16]}-{self.dataset.split}"
        return f"{what}-seed{seed}-dataset{number}-epoch{self.epoch}.v{FORMAT_VERSION}"

    @property
    def key(self) -> int:
        """Key of the permutation."""
        return (sample_key if self.dataset is None else document_key)(self.seed, self.epoch)

    @property
    def header(self) -> bytes:
        """The first bytes of the file, the same for the same order."""
        fields: dict[str, object] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "entries": self.size,
            "seed": self.seed,
            "epoch": self.epoch,
            "key": self.key,
        }
        if self.dataset is not None:
            fields |= {"content_hash": self.dataset.manifest.content_hash, "split": self.dataset.split}
        return json.dumps(fields).encode().ljust(_HEADER_BYTES - 1) + b"\n"

    @property
    def ends_offset(self) -> int:
        """First byte after the permutation and its padding."""
        return _HEADER_BYTES + -(-self.size * number_dtype(self.size).itemsize // 8) * 8

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.ends_offset + (0 if self.dataset is None else 8 * self.size)


@dataclass(frozen=True)
class MappedOrder:
    """Content of a file: its permutation and, for documents, the tokens up to the end of each, int64 [D]."""

    permutation: Permutation
    ends_D: np.ndarray | None


class IndexCache:
    """The folder.

    Args:
        folder: it is made where it does not exist.
        wait_seconds: longest wait for a process that builds a file and gives no sign of life.
        report: told the progress of files that are built here; by default a line on stderr every 10 s.
    """

    def __init__(self, folder: Path, wait_seconds: float, report: Report | None = None) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._report = _LineReport() if report is None else report

    def has(self, file: OrderFile) -> bool:
        """Whether the file is there, whatever it holds."""
        return (self._folder / file.name).is_file()

    def open(self, file: OrderFile) -> MappedOrder:
        """Maps an order; it is built if it is not there, or waited for while another process builds it.

        Raises:
            DataError: the file is damaged or another one, the folder cannot be used, or the process that builds
                it gave no sign of life for ``wait_seconds``; the message names that process.
        """
        if not self.has(file):
            self._build_once(file)
        return self._map(file)

    def prepare(self, file: OrderFile) -> Literal["found", "built", "replaced"]:
        """Makes sure that the file is there, and right: all of one that is there is read and checked, and a
        damaged one is replaced. Processes that have it mapped keep what they have.

        Raises:
            DataError: the folder cannot be used, or as for ``open``.
        """
        if not self.has(file):
            return "built" if self._build_once(file) else "found"
        try:
            self._check(file)
        except DataError:
            self._build_once(file, replace=True)
            return "replaced"
        return "found"

    def _map(self, file: OrderFile) -> MappedOrder:
        path = self._folder / file.name
        advice = "delete it, or let `steptron data build-index` replace it"
        with self._system_errors(path):
            size = path.stat().st_size
            if size != file.bytes:
                raise DataError(f"{path}: {size} bytes instead of {file.bytes}: cut off or damaged; {advice}")
            # asarray drops numpy's memmap subclass, whose indexing is slow; the pages stay mapped.
            content = np.asarray(np.memmap(path, mode="r"))
        if content[:_HEADER_BYTES].tobytes() != file.header:
            raise DataError(f"{path}: damaged, or not the order that its name says; {advice}")
        numbers_N = np.frombuffer(content, number_dtype(file.size), file.size, _HEADER_BYTES)
        ends_D = None if file.dataset is None else np.frombuffer(content, "<i8", file.size, file.ends_offset)
        return MappedOrder(Permutation(numbers_N, file.key, str(path)), ends_D)

    def _check(self, file: OrderFile) -> None:
        """Reads all of a file.

        Raises:
            DataError: it is not the order, or the dataset's index is damaged.
        """
        mapped = self._map(file)
        end, at_once = 0, 2**20
        for start in range(0, file.size, at_once):
            stop = min(start + at_once, file.size)
            numbers_N = mapped.permutation.read(start, stop)
            if file.dataset is not None and mapped.ends_D is not None:
                ends_N = end + np.cumsum(file.dataset.lengths_D[numbers_N], dtype=np.int64)
                if not np.array_equal(ends_N, mapped.ends_D[start:stop]):
                    raise DataError(f"{self._folder / file.name}: damaged between entries {start} and {stop}")
                end = int(ends_N[-1])

    def _build_once(self, file: OrderFile, replace: bool = False) -> bool:
        """Builds a file unless another process does; whether this one did."""
        path = self._folder / file.name
        with self._system_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f".{file.name}.lock", "a+", encoding="utf-8") as lock:
                if not self._take(lock, path, replace):
                    return False
                there = path.exists() and not replace
                if not there:
                    self._write(file, path, lock)
                # It is still held, and the file is there: whoever opened it before finds the file and builds nothing.
                Path(lock.name).unlink(missing_ok=True)
        return not there

    def _take(self, lock: IO[str], path: Path, replace: bool) -> bool:
        """Waits for the lock of a file; False when another process has written the file meanwhile."""
        builder, deadline, pause = "", time.monotonic() + self._wait_seconds, 0.05
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError as error:
                raise DataError(
                    f"{path}: missing, and the file system has no locks ({error.strerror}) by which one process "
                    "would build it: run `steptron data build-index` on one node first, or mount it with locks"
                ) from error
            if not replace and path.exists():
                return False
            lock.seek(0)
            told = lock.read()
            if told != builder:
                builder, deadline = told, time.monotonic() + self._wait_seconds
            if time.monotonic() > deadline:
                raise DataError(
                    f"{path}: not there, and {builder or 'another process'}, which builds it, gave no sign of life for "
                    f"{self._wait_seconds:g} s (parallel.timeout_seconds)"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))  # thousands of processes must not ask at once
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _write(self, file: OrderFile, path: Path, lock: IO[str]) -> None:
        me = f"process {os.getpid()} on {socket.gethostname()}"
        last_told = 0.0

        def tell(done: int) -> None:
            nonlocal last_told
            if time.monotonic() - last_told >= _TELL_SECONDS or done == file.size:
                last_told = time.monotonic()
                lock.seek(0)
                lock.truncate()
                lock.write(f"{me} ({done:,} of {file.size:,} entries done)")
                lock.flush()
                self._report(file.name, done, file.size)

        tell(0)
        self._remove_leftovers(file)
        free = shutil.disk_usage(self._folder).free
        if free < file.bytes:
            raise DataError(f"{path}: needs {file.bytes:,} bytes, the file system has {free:,} left")
        if file.dataset is not None:
            file.dataset.verify()
        partial = self._folder / f".{file.name}.{socket.gethostname()}-{os.getpid()}.partial"
        try:
            with open(partial, "xb") as whole:
                whole.write(file.header)
                whole.truncate(file.bytes)
                with open(partial, "r+b") as numbers, open(partial, "r+b") as ends:
                    _write_entries(file, numbers, ends, tell)
                os.fsync(whole.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _remove_leftovers(self, file: OrderFile) -> None:
        """Removes what processes that were killed left of a file whose lock is held.

        Where locks hold only on their own node, another node may be building it at the same time.
        """
        for path in self._folder.glob(f".{file.name}.*.partial"):
            with contextlib.suppress(OSError):
                ours = path.name.startswith(f".{file.name}.{socket.gethostname()}-")
                if ours or time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def _system_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{path}: data.index_cache cannot be used: {error.filename or path}: {error.strerror or error}"
            ) from error


class CachedOrders:
    """The orders of one dataset, from an ``IndexCache``."""

    def __init__(self, cache: IndexCache, dataset: TokenDataset) -> None:
        self._cache = cache
        self._dataset = dataset

    def documents(self, lengths_D: np.ndarray, seed: int, epoch: int) -> DocumentOrder:
        mapped = self._cache.open(OrderFile.of_documents(self._dataset, seed, epoch))
        assert mapped.ends_D is not None
        return DocumentOrder(mapped.permutation, mapped.ends_D)

    def samples(self, size: int, seed: int, block: int) -> Permutation:
        return self._cache.open(OrderFile.of_samples(size, seed, block)).permutation


def _write_entries(file: OrderFile, numbers: IO[bytes], ends: IO[bytes], tell: Callable[[int], None]) -> None:
    """Writes permutation and ends piece by piece, through two handles of the same file."""
    numbers.seek(_HEADER_BYTES)
    ends.seek(file.ends_offset)
    done = end = 0
    for numbers_N in permutation_pieces(file.size, file.key):
        numbers.write(numbers_N.tobytes())
        if file.dataset is not None:
            ends_N = end + np.cumsum(file.dataset.lengths_D[numbers_N], dtype=np.int64)
            ends.write(ends_N.astype("<i8").tobytes())
            end = int(ends_N[-1])
        done += numbers_N.size
        tell(done)


class _LineReport:
    """A line on stderr for builds that take long."""

    _EVERY_SECONDS = 10.0

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        if done == 0:
            self._last = time.monotonic()
        elif time.monotonic() - self._last >= self._EVERY_SECONDS:
            self._last = time.monotonic()
            print(f"steptron: building {name}: {done / total:.0%}", file=sys.stderr, flush=True)
