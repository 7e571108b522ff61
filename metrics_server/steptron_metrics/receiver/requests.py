"""What alerts ask of runs, for the answers to their clients."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptron_metrics.protocol import messages

log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0
_MAX_FILE_BYTES = 64 << 10
_MAX_REQUESTS = 16
_MAX_REASON_LENGTH = 1000
_MAX_RUNS = 1024


@dataclass
class _Seen:
    looked_at: float
    stamp: tuple[int, int, int] | None
    requests: tuple[Any, ...]


class Requests:
    """Reads ``<run>.json`` of a folder: ``{"requests": [{"number": 1, "kind": "checkpoint", "reason": "..."}]}``.

    Args:
        folder: where the alerts write them, atomically.
        clock: seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def of(self, run: str) -> tuple[Any, ...]:
        """The run's requests as messages; its file is looked at once a second at most."""
        now = self._clock()
        seen = self._seen.get(run)
        if seen is None:
            if len(self._seen) >= _MAX_RUNS:
                self._seen.clear()
            seen = self._seen[run] = _Seen(-float("inf"), None, ())
        if now - seen.looked_at >= _EVERY_SECONDS:
            seen.looked_at = now
            self._look(run, seen)
        return seen.requests

    def _look(self, run: str, seen: _Seen) -> None:
        path = self._folder / f"{run}.json"
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == seen.stamp:
                return
            seen.stamp = stamp
            with path.open("rb") as file:
                seen.requests = _parse(file.read(_MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            seen.stamp, seen.requests = None, ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            seen.requests = ()
            log.error("requests to run %s in %s cannot be read: %r", run, path, error)


def _parse(content: bytes) -> tuple[Any, ...]:
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
    return tuple(
        messages.Request(number=one["number"], kind=_KINDS[one["kind"]], reason=one["reason"][:_MAX_REASON_LENGTH])
        for one in json.loads(content)["requests"][:_MAX_REQUESTS]
    )


_KINDS = {"checkpoint": messages.CHECKPOINT}
