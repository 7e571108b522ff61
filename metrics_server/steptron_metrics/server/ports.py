"""Ports to listen at."""

from __future__ import annotations

import contextlib
import socket

from steptron_metrics.errors import MetricsError


class Reserved:
    """A port that this process is bound to without listening: children may listen there, others find it taken.

    Args:
        host: address or name.
        port: 0 takes a free one.
        shared: several processes are to listen at it (SO_REUSEPORT).
        what: for the message.

    Raises:
        MetricsError: the address is taken, or none of this machine.
    """

    def __init__(self, host: str, port: int, shared: bool, what: str) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            if port:
                # Alone first: with SO_REUSEPORT another server at that port would not be noticed.
                with contextlib.closing(socket.socket(family, kind, protocol)) as alone:
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind(address)
                    alone.listen(1)
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MetricsError(f"{what}: cannot listen at {written(host, port)}: {reason}") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def written(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(str(address[0]).startswith("127.") or address[0] == "::1" for *_, address in found)
