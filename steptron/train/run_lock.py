"""One run per output folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from steptron.errors import UserError


@contextlib.contextmanager
def run_lock(output: Path) -> Iterator[None]:
    """Holds a run's folder within the ``with`` block, or until the process ends (the kernel releases it).

    Raises:
        UserError: someone else holds the folder; the message names it.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another run writes to {output}: wait for it, or set another train.output") from error
        yield


@contextlib.contextmanager
def run_lock_of_all(output: Path) -> Iterator[None]:
    """``run_lock`` for a run of many processes: the first rank holds it. Collective where it begins.

    Raises:
        UserError: someone else holds the folder, or it cannot be made; on every rank.
    """
    # Here, since ``steptron checkpoint prune`` does without torch.
    from steptron.platform.distributed import on_first_rank

    with contextlib.ExitStack() as held:
        on_first_rank("the run cannot start", lambda: held.enter_context(run_lock(output)))
        yield
