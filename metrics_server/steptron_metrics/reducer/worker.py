"""A reducer process: reads jobs from a socket, and answers each with its result. ``Reducers`` starts it."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
from typing import Any

from steptron_metrics.journal.reading import read_values
from steptron_metrics.protocol.description import Limits, parse
from steptron_metrics.reducer.aggregate import reduce_frames
from steptron_metrics.reducer.derived import derive
from steptron_metrics.reducer.job import Job
from steptron_metrics.reducer.layout import Layouts
from steptron_metrics.results import Aggregate, Derived, Event, Iteration

_LENGTH = struct.Struct("<Q")


class Gone(Exception):
    """A job's values are no longer there: its run has been deleted, or its segment pruned."""


def send(connection: socket.socket, message: Any) -> None:
    """Writes a message to a socket, as ``receive`` reads it."""
    content = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> Any:
    """Waits for a message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return pickle.loads(_read(connection, length))


def _read(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        got = connection.recv_into(rest)
        if not got:
            raise EOFError("the other side of the socket is gone")
        rest = rest[got:]
    return content


def perform(job: Job, layouts: Layouts) -> Iteration:
    """Reduces an iteration.

    Args:
        job: what to do.
        layouts: of descriptions that have been seen before.

    Raises:
        Gone: see there.
        ValueError: descriptions or values are not what a receiver would have let pass, or beyond limits.
    """
    known = [layouts.read(description) for description in job.descriptions]
    try:
        frames = [
            (known[description], read_values(job.segments[segment], offset, length))
            for _, segment, description, length, offset in job.frames.tolist()
        ]
    except FileNotFoundError as error:
        raise Gone(str(error)) from None
    aggregates = reduce_frames(frames, job.frames["rank"].tolist())
    return finished(job, aggregates, derive(aggregates))


def finished(
    job: Job, aggregates: list[Aggregate], derived: list[Derived], events: tuple[Event, ...] = ()
) -> Iteration:
    """A job's result; ``events`` in addition to the job's."""
    return Iteration(
        job.run,
        job.session_ns,
        job.iteration,
        job.world_size,
        job.missing,
        job.ended_ns,
        job.seconds,
        job.consumed_tokens,
        job.dropped,
        job.events + events,
        tuple(aggregates),
        tuple(derived),
    )


def main(descriptor: int, nice: int) -> None:
    """Works until the other side of the socket is closed, as it also is when the parent is killed.

    The first message is the limits of descriptions, the others are jobs. An answer is an ``Iteration``, or the
    ``Gone`` or ``ValueError`` that came of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us in its own time
    os.nice(nice)
    connection = socket.socket(fileno=descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), name="listen", daemon=True).start()
    limits: Limits = messages.get()
    layouts = Layouts(lambda content: parse(content, limits))
    while True:
        job: Job = messages.get()
        answer: Iteration | Exception
        try:
            answer = perform(job, layouts)
        except (Gone, ValueError) as error:
            answer = error
        try:
            send(connection, answer)
        except OSError:
            return  # nobody is there any more


def _listen(connection: socket.socket, messages: queue.SimpleQueue[Any]) -> None:
    """In a thread of its own, so that the parent's end is noticed in the middle of a job too."""
    while True:
        try:
            messages.put(receive(connection))
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
