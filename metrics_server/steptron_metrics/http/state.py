"""How the server itself does: plain data that the processor fills in and the API, Prometheus and the page show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReceiverState:
    """A receiver process, with what it counted since it was started.

    Attributes:
        number: from 0.
        pid: of the process; 0 while none runs.
        restarts: how often it died and was started again.
        connections: open ones.
        frames, bytes: stored in the journal.
        refused: frames that were malformed, too large or not allowed.
        later: messages that were put off because the journal or the disk was full.
    """

    number: int
    pid: int = 0
    restarts: int = 0
    connections: int = 0
    frames: int = 0
    bytes: int = 0
    refused: int = 0
    later: int = 0


@dataclass(frozen=True)
class ReducerState:
    """A reducer process.

    Attributes:
        number: from 0.
        pid: of the process; 0 while none runs.
        restarts: how often it died and was started again.
        iterations: that it has reduced.
        busy_seconds: that it took for them.
    """

    number: int
    pid: int = 0
    restarts: int = 0
    iterations: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class Waiting:
    """An iteration that is not stored yet.

    Attributes:
        run, iteration: which.
        ranks, world_size: how many have sent, and are to send.
        since_ns: when its first frame arrived.
        missing: ranks that have not sent, the first 10.
    """

    run: str
    iteration: int
    ranks: int
    world_size: int
    since_ns: int
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerState:
    """The whole server at a moment.

    Attributes:
        software: and its version.
        started_ns, now_ns: when the server began, and when this was taken.
        receivers, reducers: the processes.
        pending_iterations: iterations of which frames have arrived and that are not stored yet.
        waiting: of those the oldest, at most 100.
        stored_iterations: since the processor began.
        journal_bytes, journal_limit_bytes: what the raw values take up, and at most may.
        database_bytes: what the database takes up.
        free_bytes: what is left on the disk of the server's folder.
        dropped_frames: that clients said they had to give up, of all runs, since the processor began.
        ignored_frames: that changed nothing, by reason, since the processor began: "duplicate", "void" (of iterations
            that a later session has made again), "refused" (they contradict others of their session) and "gone" (their
            values or description no longer are in the journal).
        webhook_waiting, webhook_failed: deliveries of alerts still to do, and given up.
        set_aside: iterations that the database has refused and that are in files instead, since the processor began.
        trouble: what keeps it from storing, for people; None when nothing does.
    """

    software: str
    started_ns: int
    now_ns: int
    receivers: tuple[ReceiverState, ...] = ()
    reducers: tuple[ReducerState, ...] = ()
    pending_iterations: int = 0
    waiting: tuple[Waiting, ...] = ()
    stored_iterations: int = 0
    journal_bytes: int = 0
    journal_limit_bytes: int = 0
    database_bytes: int = 0
    free_bytes: int = 0
    dropped_frames: int = 0
    ignored_frames: Mapping[str, int] = field(default_factory=dict)
    webhook_waiting: int = 0
    webhook_failed: int = 0
    set_aside: int = 0
    trouble: str | None = None
