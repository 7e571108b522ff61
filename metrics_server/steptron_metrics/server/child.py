"""Main of a process that a supervisor starts: ``python -m steptron_metrics.server.child``, its orders on stdin.

The pipe stays open as long as the parent lives; when it closes, the process ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from steptron_metrics.errors import MetricsError
from steptron_metrics.server import logs
from steptron_metrics.settings import Settings

USER_ERROR = 3
"""Exit status of a process that found something a user has to mend; the message is on its stderr."""
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Orders:
    """What a process is to do.

    Attributes:
        role: "supervisor", "processor", "receiver", or a module's function ``package.module:name`` that is called with
            these orders.
        settings: of the server, with the ports that were taken.
        number: of the receiver.
        allow_unauthenticated: of the supervisor.
        name: in the log.
    """

    role: str
    settings: Settings
    number: int = 0
    allow_unauthenticated: bool = False

    @property
    def name(self) -> str:
        return f"receiver {self.number}" if self.role == "receiver" else self.role


def start(
    orders: Orders, *, stderr: int | IO[bytes] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process; it ends when the ``stdin`` of what is returned is closed, also by the end of this process.

    Args:
        stderr: as of ``subprocess.Popen``.
        pass_fds: that it inherits.
    """
    # The paths of this process in their order, so that the other one finds the same modules; not the current folder.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "steptron_metrics.server.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is the supervisor's
    )
    assert process.stdin is not None
    # When it has died already, that is seen by who waits for it.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pickle.dumps(orders))
        process.stdin.flush()
    return process


def main() -> int:
    faulthandler.enable()
    orders: Orders = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        if orders.role == "supervisor":
            from steptron_metrics.server.supervisor import serve

            return serve(orders.settings, allow_unauthenticated=orders.allow_unauthenticated)
        logs.set_up(None, orders.name)
        _perform(orders)
    except MetricsError as error:
        print(error, file=sys.stderr, flush=True)
        return USER_ERROR
    return 0


def _perform(orders: Orders) -> None:
    if orders.role == "processor":
        from steptron_metrics.server import processor

        processor.run(orders.settings)
    elif orders.role == "receiver":
        from steptron_metrics.receiver import main as receiver

        receiver.run(orders.settings, orders.number, orders.settings.port)
    else:
        import importlib

        module, function = orders.role.split(":")
        getattr(importlib.import_module(module), function)(orders)


def _end_with_parent() -> None:
    # Unbuffered: pickle may have read ahead, but there is nothing more to come than the end.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    # Under its own name, so that what it unpickles is of the same module.
    from steptron_metrics.server import child

    sys.exit(child.main())
