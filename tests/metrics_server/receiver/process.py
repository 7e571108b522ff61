"""Real receiver processes, and conversations with them over real connections."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from steptron_metrics.protocol import VERSION, messages
from steptron_metrics.protocol.description import Series, serialize
from steptron_metrics.settings import Settings

# Imports once, then forks a receiver for each line that it reads: a process that runs as if it had been started alone.
NURSERY = """
import os, pickle, sys
from steptron_metrics.receiver.main import run
for line in sys.stdin:
    command, settings, number, port, errors = pickle.loads(bytes.fromhex(line))
    if command == "start":
        answer = os.fork()
        if not answer:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
            try:
                run(settings, number, port)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
    else:
        answer = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    print(answer, flush=True)
"""


class Nursery:
    """The parent of all receivers of a test process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, *command: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(pickle.dumps(command).hex(), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, made: Settings, number: int, port: int, errors: Path) -> int:
        return self._ask("start", made, number, port, str(errors))

    def wait(self, pid: int) -> int:
        return self._ask("wait", None, pid, 0, "")


@functools.cache
def nursery() -> Nursery:
    return Nursery()


SERIES = [Series("moe.tokens", layer=3, count=50), Series("train.loss")]
DESCRIPTION = serialize(SERIES)
NUM_VALUES = 51
METHOD = f"/{messages.SERVICE}/{messages.METHOD}"
TIMEOUT = 20.0


class Receiver:
    """A receiver process; ``port`` is where it listens."""

    def __init__(self, settings: Settings, number: int = 0, port: int = 0) -> None:
        self.settings = settings
        self.status_file = settings.folder / "receivers" / f"{number}.json"
        self.status_file.unlink(missing_ok=True)
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._errors = settings.folder / f"errors-{number}.txt"
        self.pid = nursery().start(settings, number, port, self._errors)
        self._ended = False

    def wait_until_ready(self) -> Receiver:
        deadline = time.monotonic() + TIMEOUT
        while not self.status_file.exists():
            assert time.monotonic() < deadline, f"the receiver did not come up: {self.errors()}"
            time.sleep(0.01)
        self.port = int(self.status()["port"])
        return self

    def status(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.status_file.read_text())
        return content

    def wait_for(self, **expected: float) -> dict[str, Any]:
        """Its status once it shows these."""
        deadline = time.monotonic() + 5.0
        while any((status := self.status())[name] != value for name, value in expected.items()):
            assert time.monotonic() < deadline, f"the status never showed {expected}: {status}"
            time.sleep(0.05)
        return status

    def runs(self) -> bool:
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"

    def kill(self) -> None:
        if not self._ended:
            self._signal(signal.SIGKILL)

    def stop(self) -> int:
        """Exit code after SIGTERM."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> int:
        os.kill(self.pid, number)
        self._ended = True
        return nursery().wait(self.pid)

    def errors(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""


@contextlib.contextmanager
def receiver(settings: Settings, number: int = 0, port: int = 0) -> Iterator[Receiver]:
    started = Receiver(settings, number, port)
    try:
        yield started.wait_until_ready()
    finally:
        started.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(folder: Path, **changed: Any) -> Settings:
    return Settings(folder=folder, **{"min_free_bytes": 1 << 20, **changed})


def channel(port: int, **options: int) -> grpc.Channel:
    """A connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20)]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=own)


class Conversation:
    """A call of the service's method, message by message, as bytes."""

    def __init__(self, through: grpc.Channel, token: str | None = None, **how: Any) -> None:
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = None if token is None else [("authorization", f"Bearer {token}")]
        self._call = through.stream_stream(METHOD)(
            iter(self._sent.get, None), metadata=metadata, timeout=TIMEOUT, **how
        )

    def send(self, content: bytes) -> None:
        self._sent.put(content)

    def receive(self) -> Any:
        """The next message to the client; raises grpc.RpcError where the server has ended the call with one."""
        return messages.ToClient.FromString(next(self._call))

    def ask(self, content: bytes) -> Any:
        """The answer to a message."""
        self.send(content)
        return self.receive().answer

    def greet(self, run: str = "run", world_size: int = 8, session_ns: int = 1, protocol: int = VERSION) -> Any:
        self.send(hello(run, world_size, session_ns, protocol))
        return self.receive().welcome

    def end(self) -> None:
        self._sent.put(None)
        self._call.cancel()


def hello(run: str = "run", world_size: int = 8, session_ns: int = 1, protocol: int = VERSION) -> bytes:
    session = messages.Session(run=run, started_ns=session_ns, world_size=world_size)
    content: bytes = messages.ToServer(hello=messages.Hello(protocol=protocol, session=session)).SerializeToString()
    return content


def values_of(rank: int, iteration: int, count: int = NUM_VALUES) -> bytes:
    return np.random.default_rng([rank, iteration, count]).normal(size=count).astype("<f4").tobytes()


def frame(rank: int = 0, iteration: int = 1, description: bytes = DESCRIPTION, **changed: Any) -> Any:
    """A frame that is right but for what is changed."""
    made = messages.Frame(
        rank=rank,
        iteration=iteration,
        description_id=messages.checksum(description),
        description=description,
        ended_ns=10**18 + iteration,
        seconds=1.5,
        consumed_tokens=iteration,
        values=values_of(rank, iteration),
    )
    made.checksum = messages.checksum(made.values)
    for name, value in changed.items():
        if name == "events":
            made.events.extend(value)
        else:
            setattr(made, name, value)
    return made


def frames(number: int, *several: Any) -> bytes:
    content: bytes = messages.ToServer(frames=messages.Frames(number=number, frames=several)).SerializeToString()
    return content


def names(refusals: Sequence[Any]) -> list[tuple[int, str]]:
    return [(refusal.index, refusal.reason) for refusal in refusals]


def files(folder: Path) -> dict[str, bytes]:
    """What is under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
