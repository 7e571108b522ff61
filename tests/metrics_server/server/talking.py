"""What tests of whole servers ask of them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from steptron_metrics.server.local import Server


def asked(server: Server, path: str) -> Any:
    """What its interface answers, from JSON.

    Raises:
        OSError: it does not.
    """
    with urllib.request.urlopen(server.http_address + path, timeout=5) as answer:
        return json.load(answer)


def until(holds: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    """Waits until it holds; a server that does not answer meanwhile may be starting again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
