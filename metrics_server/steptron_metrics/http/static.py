"""The page's files, read once."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def _files(folder: Traversable, prefix: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _files(entry, f"{prefix}{entry.name}/")
        elif _suffix(entry.name) in _TYPES:
            found[prefix + entry.name] = entry.read_bytes()
    return found


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def page_router() -> APIRouter:
    """Serves the page at ``/`` and its files under ``/page/``; nothing in them is secret."""
    router = APIRouter(include_in_schema=False)
    files = _files(resources.files("steptron_metrics.http").joinpath("page"))

    def add(path: str, name: str) -> None:
        content = files[name]
        headers = {
            "etag": f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"',
            "cache-control": "no-cache",
            "content-type": _TYPES[_suffix(name)],
        }

        async def serve(request: Request) -> Response:
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(status_code=304, headers={"etag": headers["etag"]})
            return Response(content, headers=headers)

        router.add_api_route(path, serve, methods=["GET", "HEAD"])

    add("/", "index.html")
    for name in files:
        add(f"/page/{name}", name)
    return router
