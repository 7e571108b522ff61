"""One run per output folder."""

from __future__ import annotations

import fcntl
from pathlib import Path

from steptron.errors import UserError


class RunLock:
    """Holds a run's folder until the process ends, however it ends (the kernel releases it).

    Raises:
        UserError: another process holds the folder; the message names it.
    """

    def __init__(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._file = (output / ".lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another run writes to {output}: wait for it, or set another train.output") from error
