"""The server's log: stderr, and ``server.log`` in its folder.

Only the supervisor writes to the file: it passes on what its children write to their stderr.
"""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILE = "server.log"
_CHILDREN = logging.getLogger("steptron_metrics.child")
_BYTES = 16 << 20


def set_up(folder: Path | None, name: str) -> list[logging.Handler]:
    """Sends this process's log to stderr, and to the folder's file where one is given (four older ones are kept).

    Args:
        name: of the process, in each line.

    Returns:
        What :func:`take_down` takes away again.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if folder is not None:
        handlers.append(RotatingFileHandler(folder / FILE, maxBytes=_BYTES, backupCount=4, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    return handlers


def take_down(handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()


def pass_on(line: str) -> None:
    """Adds a line of a child's as it is."""
    _CHILDREN.info("%s", line)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == _CHILDREN.name else super().format(record)
