"""Iterations that the database has refused, in files: whoever mends the cause can still look at them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from steptron_metrics.results import Iteration

FOLDER = "set_aside"
MAX_BYTES = 1 << 30
"""Of all files; the oldest are deleted for new ones."""


def set_aside(folder: Path, iteration: Iteration, reason: str) -> Path:
    """Writes an iteration to ``<run>-<session_ns>-<iteration>.npz``, in place of one that is there.

    An array for each aggregate, ``metric:layer``, and for each derived figure ``name:values``, ``name:layers`` and
    ``name:items``; ``about`` is JSON of everything else, with the reason.

    Args:
        folder: of the server.

    Raises:
        OSError: it cannot be written.
    """
    about = {name: value for name, value in vars(iteration).items() if name not in ("aggregates", "derived", "events")}
    about |= {"events": [[one.kind, one.detail] for one in iteration.events], "reason": reason}
    arrays: dict[str, Any] = {f"{one.metric}:{one.layer}": one.values for one in iteration.aggregates}
    for one in iteration.derived:
        arrays |= {f"{one.name}:values": one.values, f"{one.name}:layers": one.layers, f"{one.name}:items": one.items}
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(json.dumps(about)), **arrays)
    into = folder / FOLDER
    into.mkdir(exist_ok=True)
    path = into / f"{iteration.run}-{iteration.session_ns}-{iteration.iteration}.npz"
    _make_room(into, MAX_BYTES - content.tell())
    draft = path.with_suffix(".new")
    draft.write_bytes(content.getbuffer())
    os.replace(draft, path)
    return path


def _make_room(folder: Path, most: int) -> None:
    files = sorted(((file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.iterdir()), reverse=True)
    total = 0
    for _, size, file in files:
        total += size
        if total > most:
            file.unlink()
