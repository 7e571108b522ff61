"""What a receiver counts, and how the rest of the server gets to know it: a small file for each receiver."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_STALE_NS = 10_000_000_000


@dataclass
class Counters:
    """Since the process began.

    Attributes:
        connections: open ones.
        connected: all so far.
        rejected: connections that were refused at their Hello.
        frames, bytes: stored in the journal; bytes of values.
        messages: answered ones.
        refused: frames that were not taken, and messages that were not.
        superseded: frames of sessions in whose place a later one is.
        later: messages that the client was told to send later.
        commits, commit_seconds: writes with a sync, and the time that they took.
    """

    connections: int = 0
    connected: int = 0
    rejected: int = 0
    frames: int = 0
    bytes: int = 0
    messages: int = 0
    refused: int = 0
    superseded: int = 0
    later: int = 0
    commits: int = 0
    commit_seconds: float = 0.0


def folder(server: Path) -> Path:
    """Where the receivers of a server leave their files, ``<number>.json``: the counters, pid, port and written_ns."""
    return server / "receivers"


def write(server: Path, number: int, port: int, waiting_bytes: int, counters: Counters) -> None:
    """Replaces a receiver's file; readers see the old or the new one."""
    path = folder(server) / f"{number}.json"
    content = {
        "number": number,
        "pid": os.getpid(),
        "port": port,
        "written_ns": time.time_ns(),
        "waiting_bytes": waiting_bytes,
        **asdict(counters),
    }
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(content))
    os.replace(draft, path)


def connections_of_others(server: Path, number: int) -> int:
    """Open connections of the server's other receivers, as of about a second ago."""
    total = 0
    for path in folder(server).glob("*.json"):
        if path.stem != str(number):
            try:
                content = json.loads(path.read_text())
                if time.time_ns() - content["written_ns"] < _STALE_NS:
                    total += int(content["connections"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being deleted, or not one of ours
    return total
