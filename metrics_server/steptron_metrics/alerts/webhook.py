"""Posts alerts to a URL."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from steptron_metrics.errors import MetricsError

log = logging.getLogger(__name__)

_QUEUE = 256
_ATTEMPTS = 6


class Webhook:
    """A thread that posts JSON, one message after the other in order.

    A message that is not taken (connection, timeout, status 408, 425, 429 or 5xx) is sent again, after 1 s, then twice
    as long each time; after the sixth failure, or at once with another status, it is given up, counted and logged. Of
    more than 256 that wait, the new ones are given up.

    Args:
        url: http or https. It may hold a secret: only its host is logged.
        timeout_seconds: for each attempt.
        first_pause_seconds: after the first failure.

    Attributes:
        waiting, failed: messages still to be sent, and given up.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 10.0, first_pause_seconds: float = 1.0) -> None:
        check_url(url)
        self._url, self._timeout, self._first_pause = url, timeout_seconds, first_pause_seconds
        self._host = urlsplit(url).hostname
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE)
        self._closing = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self.waiting = 0
        self.failed = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def post(self, message: dict[str, Any]) -> None:
        """Returns at once."""
        try:
            with self._lock:
                self.waiting += 1
            self._queue.put_nowait(json.dumps(message, allow_nan=False).encode())
        except queue.Full:
            self._give_up(f"{_QUEUE} messages wait already")

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Sends what waits, without further attempts, for at most so long."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.error("webhook %s: %d messages are not sent", self._host, self.waiting)
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            log.error(
                "webhook %s: no end within %g s, %d messages are not sent", self._host, timeout_seconds, self.waiting
            )

    def _run(self) -> None:
        while (content := self._queue.get()) is not None:
            self._send(content)

    def _send(self, content: bytes) -> None:
        pause = self._first_pause
        for attempt in range(1, _ATTEMPTS + 1):
            reason, again = self._attempt(content)
            if reason is None:
                with self._lock:
                    self.waiting -= 1
                return
            if not again or attempt == _ATTEMPTS or self._closing.is_set():
                self._give_up(f"{reason}, attempt {attempt}")
                return
            log.warning("webhook %s: %s, attempt %d; again in %g s", self._host, reason, attempt, pause)
            self._closing.wait(pause)
            pause *= 2

    def _attempt(self, content: bytes) -> tuple[str | None, bool]:
        """Why it failed, and whether another attempt may help."""
        headers = {"Content-Type": "application/json", "User-Agent": "steptron-metrics"}
        request = urllib.request.Request(self._url, content, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout):
                return None, False
        except urllib.error.HTTPError as error:
            with error:
                return f"status {error.code}", error.code in (408, 425, 429) or error.code >= 500
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A reason may name the URL.
            return type(getattr(error, "reason", error)).__name__, True

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self.waiting -= 1
            self.failed += 1
        log.error("webhook %s: an alert is given up: %s", self._host, reason)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following one would turn the POST into a GET that tells nobody anything."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raises:
    MetricsError: this is no URL to post to.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise MetricsError("webhook: expected a URL such as https://hooks.example.org/metrics")
