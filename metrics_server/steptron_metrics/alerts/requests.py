"""What alerts ask of runs: a checkpoint. Receivers read the files and tell the run's clients."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from steptron_metrics.alerts.book import Change

CHECKPOINT = "checkpoint"
"""Kind of the event with which a run says that it has written one."""
_MAX_REASON_LENGTH = 1000


class Requests:
    """Writes ``<run>.json``: ``{"requests": [{"number": 1, "kind": "checkpoint", "reason": "..."}]}``.

    A run is asked for one checkpoint at a time, however many alerts want one; the request goes by the number of the
    first of them. It is withdrawn when the run says that it has made one, or when all alerts that wanted it have ended.

    Args:
        folder: ``Settings.requests``; made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def update(self, run: str, changes: Iterable[Change], events: Iterable[str] = ()) -> None:
        """Takes note of an iteration: first of the kinds of its events, then of its alerts.

        Doing it again changes nothing.

        Raises:
            OSError: the file cannot be written.
        """
        asked = self._read(run)
        before = json.dumps(asked)
        if asked is not None and CHECKPOINT in events:
            asked = None
        for change in changes:
            alert = change.alert
            if change.what == "ended" and asked is not None:
                asked["alerts"] = [number for number in asked["alerts"] if number != alert.number]
                asked = asked if asked["alerts"] else None
            elif change.what == "began" and alert.wants_checkpoint:
                if asked is None:
                    reason = f"{alert.rule}, {alert.subject}: {alert.saw}"[:_MAX_REASON_LENGTH]
                    asked = {"number": alert.number, "kind": CHECKPOINT, "reason": reason, "alerts": []}
                if alert.number not in asked["alerts"]:
                    asked["alerts"].append(alert.number)
        if json.dumps(asked) != before:
            self._write(run, asked)

    def pending(self, run: str) -> str | None:
        """Why the run is asked for a checkpoint; None where it is not."""
        asked = self._read(run)
        return None if asked is None else str(asked["reason"])

    def forget(self, run: str) -> None:
        """The run was deleted."""
        self._path(run).unlink(missing_ok=True)

    def _path(self, run: str) -> Path:
        return self._folder / f"{run}.json"

    def _read(self, run: str) -> dict[str, Any] | None:
        try:
            requests = json.loads(self._path(run).read_text(encoding="utf-8"))["requests"]
            asked = requests[0] if requests else None
            return asked if asked is None or isinstance(asked["alerts"], list) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # never asked, or damaged: the next alert asks anew

    def _write(self, run: str, asked: dict[str, Any] | None) -> None:
        path = self._path(run)
        if asked is None:
            path.unlink(missing_ok=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"requests": [asked]}), encoding="utf-8")
        os.replace(draft, path)
