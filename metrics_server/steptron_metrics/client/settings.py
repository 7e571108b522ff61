"""Times and sizes of a client that hardly anybody changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """How a client paces itself; seconds and bytes.

    Attributes:
        linger: a frame waits so long for others to share its message.
        spool_after: a frame that has waited so long in memory goes to the spool, unless it is on its way.
        look_every: how often frames are looked through for that.
        connect: for a connection and the server's Welcome.
        answer: for the answer to a message, and for the server to take one.
        heartbeat: an idle connection sends an empty message so often; a dead server is noticed by its missing answer.
        first_retry, last_retry: pause after a lost connection, doubled up to the last; each with jitter.
        refused_retry: pause after the server has refused the Hello.
        later, last_later: pause after an answer LATER, doubled up to the last; each with jitter.
        warn_every: warnings of one kind come at most so often.
        disk: at the end, for the disk to take what is left.
        message_bytes: of one message, unless the server allows less.
        unanswered: messages without an answer at most.
        segment_bytes: of a file of the spool, at most; an eighth of the spool where that is less.
        min_free_bytes: the spool does not grow while the disk has less room than that.
    """

    linger: float = 0.005
    spool_after: float = 2.0
    look_every: float = 1.0
    connect: float = 15.0
    answer: float = 30.0
    heartbeat: float = 10.0
    first_retry: float = 0.5
    last_retry: float = 30.0
    refused_retry: float = 30.0
    later: float = 0.5
    last_later: float = 10.0
    warn_every: float = 30.0
    disk: float = 5.0
    message_bytes: int = 4 << 20
    unanswered: int = 8
    segment_bytes: int = 16 << 20
    min_free_bytes: int = 1 << 30
