"""``server.json`` in a server's folder: where it answers and of which processes it is made."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "server.json"


@dataclass(frozen=True)
class Status:
    """What a running server says of itself.

    Attributes:
        pid: of the supervisor.
        address: host:port of gRPC.
        http_address: of API and page, such as http://127.0.0.1:7078.
        started_ns: nanoseconds since 1970.
        ready: both addresses have answered.
        pids: of the processes that run, by name: "processor", "receiver 0", ...
        restarts: by name, how often they died and were started again.
    """

    pid: int
    address: str
    http_address: str
    started_ns: int
    ready: bool = False
    pids: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)


def write(folder: Path, status: Status) -> None:
    """Replaces the file; readers see the old or the new one."""
    draft = folder / f"{FILE}.new"
    draft.write_text(json.dumps(asdict(status), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, folder / FILE)


def read(folder: Path) -> Status | None:
    """The status of the folder's server, which may have been killed since; None where none has left one."""
    try:
        return Status(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remove(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)
