"""Muon's diagnostics as files: every rank appends its own lines to ``muon/rank-00000.jsonl`` in the run's folder."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from steptron.errors import UserError
from steptron.optim.diagnostics import MatrixDiagnostics
from steptron.train.appended_file import AppendedFile
from steptron.train.messages import warn
from steptron.train.records import jsonable
from steptron.train.sinks import cut_back

FOLDER = "muon"
"""Name of the folder in a run's output folder."""
_FIELDS = [field.name for field in dataclasses.fields(MatrixDiagnostics)]


class MuonLog:
    """One JSON object per record: ``step``, then a list for each field of ``MatrixDiagnostics``, all in the order of
    ``matrix``; null where a matrix was not sampled, figures that are not finite as in ``log.jsonl``.

    On opening, records of steps after the one that the run resumes from are dropped. Files of ranks that the run no
    longer has are cut back by the first rank.

    Records that cannot be written wait in memory (``AppendedFile``). A context manager that closes it; where another
    exception leaves the ``with`` block, records that are lost are only a warning.

    Args:
        output: folder of the run.
        rank: of this process.
        world_size: number of processes.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: a line of an existing file cannot be read; the message names it.
        OSError: the file cannot be written.
    """

    def __init__(self, output: Path, rank: int, world_size: int, resume_step: int) -> None:
        folder = output / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05}.jsonl"
        abandoned = [file for file in sorted(folder.glob("rank-*.jsonl")) if _rank_of(file) >= world_size]
        for file in [path, *(abandoned if rank == 0 else ())]:
            if file.exists():
                cut_back(file, resume_step)
        self._file = AppendedFile(path)

    def write(self, step: int, matrices: Sequence[MatrixDiagnostics]) -> None:
        columns = {name: [jsonable(getattr(matrix, name)) for matrix in matrices] for name in _FIELDS}
        self._file.append((json.dumps({"step": step} | columns, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Raises:
        UserError: records were lost; the message says how many.
        """
        self._file.close()

    def __enter__(self) -> MuonLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError as lost:
            if error is None:
                raise
            warn(str(lost))


def _rank_of(file: Path) -> int:
    match = re.fullmatch(r"rank-(\d+)\.jsonl", file.name)
    return int(match[1]) if match else -1
