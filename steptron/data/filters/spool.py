"""Documents that wait for the verdict of corpus filters, on disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from steptron.data.filters.interface import CorpusFilter
from steptron.data.filters.judge import Judged, Removal


class Spool:
    """Judged documents in order, in two files: observations are read once per filter, the documents once.

    Args:
        folder: existing; the files are removed by ``close``.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / name for name in ("observations.spool", "documents.spool")]
        self._files: list[IO[bytes]] = [open(path, "w+b") for path in self._paths]  # noqa: SIM115 - closed by close
        self._count = 0

    def add(self, judged: Judged) -> None:
        observations, documents = self._files
        pickle.dump(judged.observations, observations, pickle.HIGHEST_PROTOCOL)
        pickle.dump(replace(judged, observations=()), documents, pickle.HIGHEST_PROTOCOL)
        self._count += 1

    def settle(self, filters: Sequence[tuple[str, CorpusFilter]]) -> Iterator[Judged]:
        """Yields the documents with their final removal; each filter has seen what those before it kept."""
        removals: dict[int, Removal] = {}
        for place, (name, each) in enumerate(filters):
            for number, observations in enumerate(self._read(self._files[0])):
                if number not in removals:
                    each.collect(number, observations[place])  # type: ignore[index]
            for number in range(self._count):
                if number not in removals and not (verdict := each.judge(number)).keeps:
                    removals[number] = Removal(name, verdict)
        for number, judged in enumerate(self._read(self._files[1])):
            assert isinstance(judged, Judged)
            yield replace(judged, removal=removals.get(number))

    def close(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink()

    def _read(self, file: IO[bytes]) -> Iterator[object]:
        file.seek(0)
        for _ in range(self._count):
            yield pickle.load(file)
