"""The first message of a connection: who speaks, for which run, and whether that is allowed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from steptron_metrics.access import Access
from steptron_metrics.journal import reading
from steptron_metrics.protocol import VERSION, messages
from steptron_metrics.protocol.description import RUN_NAME
from steptron_metrics.settings import Settings

_MAX_AHEAD_NS = 60_000_000_000


class Rejected(Exception):
    """A connection is refused.

    Attributes:
        code: status of gRPC.
        reason: for people.
    """

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class Session:
    """What a connection speaks for."""

    run: str
    started_ns: int
    world_size: int


def check_token(access: Access, token: str | None, run: str | None) -> None:
    """Raises:
    Rejected: the token does not allow to write the run.
    """
    why = access.check(token, "write", run)
    if why is not None:
        known = access.knows(token)
        raise Rejected(grpc.StatusCode.PERMISSION_DENIED if known else grpc.StatusCode.UNAUTHENTICATED, why)


def token_of(metadata: Any) -> str | None:
    """The bearer token among a call's metadata."""
    for name, content in metadata or ():
        if name == "authorization" and isinstance(content, str):
            scheme, _, token = content.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return None


def read_hello(content: bytes, settings: Settings) -> Session:
    """Checks a Hello.

    Raises:
        Rejected: it is none, or beyond the limits.
    """
    try:
        message = messages.ToServer.FromString(content)
    except DecodeError:
        raise _invalid("the first message is no message of this protocol (compressed ones are not taken)") from None
    if message.WhichOneof("content") != "hello":
        raise _invalid("the first message must be a Hello")
    hello = message.hello
    if hello.protocol != VERSION:
        raise Rejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"protocol: the client speaks version {hello.protocol}, this server version {VERSION}",
        )
    session = hello.session
    if not RUN_NAME.fullmatch(session.run):
        raise _invalid(f"run: {session.run[:200]!r} is no name of a run, expected {RUN_NAME.pattern}")
    if not 1 <= session.world_size <= settings.max_world_size:
        raise _invalid(f"world_size: {session.world_size}, expected 1 to {settings.max_world_size}")
    now_ns = time.time_ns()
    if not 1 <= session.started_ns <= now_ns + _MAX_AHEAD_NS:
        raise _invalid(
            f"started_ns: {session.started_ns} ({utc(session.started_ns)}), expected nanoseconds since 1970, at most "
            f"{_MAX_AHEAD_NS // 10**9} s ahead of the server's clock, which says {utc(now_ns)}: sessions are ordered "
            "by when they began, so set the clock that is wrong, and start anew"
        )
    return Session(session.run, session.started_ns, session.world_size)


def open_run(settings: Settings, run: str, patterns: Sequence[str] | None) -> None:
    """Makes the folder of a run in the journal, where it has none.

    Args:
        settings: of the server.
        run: its name.
        patterns: of names that the token is limited to, one of which the run matches; None: it is not.

    Raises:
        Rejected: there are as many runs as the server takes, or the disk does not take it.
    """
    folder = settings.journal / run
    try:
        if folder.is_dir():
            return
        runs = [entry.name for entry in reading.run_folders(settings.journal)]
        number = len(runs)
        if number >= settings.max_runs:
            raise Rejected(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the server has {number} runs, at most {settings.max_runs} are taken: delete one, or raise max_runs",
            )
        if patterns is not None:
            matching = sum(any(fnmatchcase(name, pattern) for pattern in patterns) for name in runs)
            if matching >= settings.max_runs_per_token:
                raise Rejected(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the server has {matching} runs that this token may write, at most {settings.max_runs_per_token} "
                    "are taken: delete one, or raise max_runs_per_token",
                )
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Rejected(
            grpc.StatusCode.UNAVAILABLE, f"the server cannot begin run {run!r} on its disk: {error.strerror}"
        ) from error


def utc(ns: int) -> str:
    """Nanoseconds since 1970 for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ns / 1e9))


def _invalid(reason: str) -> Rejected:
    return Rejected(grpc.StatusCode.INVALID_ARGUMENT, reason)
