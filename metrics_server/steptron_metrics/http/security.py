"""What holds for every request and every answer, whatever its path."""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_QUERY_BYTES = 16_384

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Wraps the application: headers of security, no trace of an exception to a client, no foreign host name.

    A page of another origin cannot read answers, since none allows it to. What is left is DNS rebinding: a name that
    first leads to the other page and then to this server. Without tokens a server of this machine alone therefore
    answers to addresses and local names only; with tokens the other page would not have one.

    Args:
        app: what it wraps.
        local_only: the server listens on this machine alone and asks for no tokens.
        encrypted: it speaks TLS.
        observe: is told of each request's status and seconds, by the route's template.
    """

    def __init__(self, app: ASGIApp, local_only: bool, encrypted: bool, observe: Callable[[Scope, int], None]) -> None:
        self._app = app
        self._local_only = local_only
        self._observe = observe
        headers = {**HEADERS, **({"strict-transport-security": "max-age=31536000"} if encrypted else {})}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
                return
            await send({"type": "websocket.close", "code": 1003})
            return
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in own)]
                if b"cache-control" not in own:
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        try:
            if self._local_only and not is_local(_host(scope)):
                await _refuse(
                    guarded,
                    421,
                    "this server answers to localhost and to addresses only; tokens let it answer to names",
                )
            elif len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
                await _refuse(guarded, 414, f"the query has more than {MAX_QUERY_BYTES} bytes")
            else:
                await self._app(scope, receive, guarded)
        except Exception:
            log.exception("failed at %s %s", scope.get("method"), scope.get("path"))
            if status:
                raise  # the connection is closed; the client sees that the answer is not whole
            await _refuse(guarded, 500, "the server failed at this; its log says more")
        finally:
            self._observe(scope, status)


async def _refuse(send: Send, status: int, reason: str) -> None:
    content = json.dumps({"reason": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _host(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"host":
            return str(value.decode("latin-1"))
    return ""


def is_local(host: str) -> bool:
    """Whether a Host header names this machine or an address, with or without a port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().endswith(".localhost")
    return True
