"""A transfer of weights shared between processes: who moves what, how far it is, and failures that all learn of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from steptron.errors import UserError
from steptron.platform.distributed import gather_to_all

Report = Callable[[int, int], None]
"""Called with the bytes of tensors that this process has moved, and with those that it will have moved at the end."""

LONGEST_TRANSFER = timedelta(days=2)
"""Longest wait for processes that still write their share; one that dies is noticed at once."""

_INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Transfer:
    """What was moved, over all processes."""

    num_tensors: int
    num_bytes: int


def transfer_group() -> dist.ProcessGroup:
    """All processes, with the patience that long transfers need. Collective."""
    return dist.new_group(timeout=LONGEST_TRANSFER, backend="gloo")


def on_every_rank(failure_title: str, action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Runs an action on every rank; what goes wrong on one is raised on all. Collective.

    Raises:
        UserError: ``failure_title`` and what went wrong on the first rank that failed.
        KeyboardInterrupt: a rank was interrupted.
    """
    failure: str | None = None
    cause: Exception | None = None
    try:
        action()
    except KeyboardInterrupt:
        failure = _INTERRUPTED
    except Exception as error:
        failure, cause = str(error) or repr(error), error
    failures = gather_to_all(failure, group)
    if _INTERRUPTED in failures:
        raise KeyboardInterrupt
    if cause is not None and not isinstance(cause, UserError | OSError):
        raise cause
    for failure in failures:
        if failure is not None:
            raise UserError(f"{failure_title}: {failure}") from cause
