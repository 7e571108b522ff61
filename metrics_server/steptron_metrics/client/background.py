"""The two threads that all clients of a process share: one for the network, one for the disk.

The network thread runs an event loop, so that many connections cost little; the disk thread does what may take long on
a slow file system, one job after the other, so that the network goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

# Trainers fork, for data loaders. gRPC's own handlers of that would stop and restart its threads each time, for the
# sake of children that use it; ours do not. No effect where gRPC is loaded already.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

logger = logging.getLogger("steptron_metrics.client")

_START_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """Threads of a process; daemons, so that neither a dead server nor a hanging disk keeps it from ending."""

    def __init__(self) -> None:
        import grpc.aio  # not before the environment variable above

        self._init_grpc = grpc.aio.init_grpc_aio
        self.loop = asyncio.new_event_loop()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._network = threading.Thread(target=self._run, name="metrics-network", daemon=True)
        begun = threading.Event()
        self.loop.call_soon(begun.set)
        self._network.start()
        begun.wait(_START_SECONDS)
        threading.Thread(target=self._work, name="metrics-disk", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        # Starts gRPC's own thread now: from Python 3.12 on none can be started once the interpreter ends, which is
        # when the client of a short process may open its first connection. It looks for an event loop, which the
        # trainer's thread has none of once it has used asyncio.run.
        self._init_grpc()
        self.loop.run_forever()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("a job of the disk thread failed")
            del job

    async def on_disk(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call in the disk thread, after those before it."""
        done: asyncio.Future[T] = self.loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def job() -> None:
            try:
                result, error = call(*args, **kwargs), None
            except BaseException as raised:  # whoever waits gets it, whatever it is
                result, error = None, raised
            self.loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(job)
        return await done

    def later_on_disk(self, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Has a call run in the disk thread, without waiting; what it raises is logged."""
        self._jobs.put(functools.partial(call, *args, **kwargs))

    def stop(self, timeout: float) -> None:
        """Ends the network thread, so that no call of gRPC is under way when the interpreter ends."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._network.join(timeout)


_lock = threading.Lock()
_shared: Background | None = None


def shared() -> Background:
    """The process's threads; started by the first client, ended with the process."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = Background()
        return _shared


def _forget() -> None:
    # A forked child has none of its parent's threads; its locks may be held by threads that it has not.
    global _lock, _shared
    _lock = threading.Lock()
    _shared = None


def _end(process: int = os.getpid()) -> None:
    if _shared is not None and os.getpid() == process:
        _shared.stop(timeout=2.0)


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
