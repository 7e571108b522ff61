"""Serves the application in a thread."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn
from fastapi import FastAPI

from steptron_metrics.errors import MetricsError
from steptron_metrics.settings import Settings

START_SECONDS = 20.0
MAX_CONCURRENT = 512
KEEP_ALIVE_SECONDS = 15


class HttpServer:
    """A server that runs; made by :func:`start`.

    Attributes:
        address: ``host:port``, with the port taken where the settings leave it free.
        url: of the page.
    """

    def __init__(self, server: uvicorn.Server, thread: threading.Thread, sock: socket.socket, scheme: str) -> None:
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.url = f"{scheme}://{self.address}/"
        self._server = server
        self._thread = thread
        self._socket = sock

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends it; answers under way get up to ``timeout`` seconds."""
        self._server.should_exit = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(timeout)
        self._socket.close()


def start(settings: Settings, app: FastAPI) -> HttpServer:
    """Binds the settings' address and serves.

    Raises:
        MetricsError: the address is taken or not of this machine, a certificate cannot be read, or the server has not
            come up in 20 seconds.
    """
    sock = _bind(settings.host, settings.http_port)
    try:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONCURRENT,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=3,
            h11_max_incomplete_event_size=32_768,
            http="h11",
            ws="none",
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
        )
        config.load()
    except (OSError, ValueError) as error:
        sock.close()
        raise MetricsError(f"certificate {settings.certificate}, key {settings.key}: {error}") from error
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="http", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            server.should_exit = True
            sock.close()
            raise MetricsError(f"the HTTP server at {settings.host}:{settings.http_port} has not come up; see the log")
        time.sleep(0.01)
    scheme = "https" if settings.certificate is not None else "http"
    return HttpServer(server, thread, sock, scheme)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise MetricsError(f"HTTP cannot listen at {host}:{port}: {error.strerror or error}") from error
    return sock
