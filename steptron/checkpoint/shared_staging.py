"""A folder that several processes build together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from steptron.platform.distributed import on_first_rank
from steptron.platform.staging import staging_folder


@contextlib.contextmanager
def shared_staging_folder(output: Path, title: str) -> Iterator[Path]:
    """A temporary folder beside ``output`` that the first process makes, known to all; removed at the end, whatever
    happened. Collective.

    Raises:
        UserError: ``title`` and why it cannot be made; on every rank.
    """
    with contextlib.ExitStack() as stack:
        yield on_first_rank(title, lambda: stack.enter_context(staging_folder(output)))
