"""What the handlers of requests work with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from steptron_metrics.access import Access
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.queries import Queries
from steptron_metrics.http.state import ServerState
from steptron_metrics.results import Run
from steptron_metrics.settings import Settings

MAX_EXPORTS = 2
"""Tables that are streamed at once."""

Right = Literal["read", "delete"]


@dataclass(frozen=True)
class Context:
    """What an application is built from, see ``build_app``; ``exports`` are the free places."""

    settings: Settings
    access: Access
    queries: Queries
    state: Callable[[], ServerState]
    delete: Callable[[str], None]
    exports: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_EXPORTS))


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


_bearer = HTTPBearer(
    auto_error=False, description="A token of the server's token file; none where it has no such file."
)


@dataclass(frozen=True)
class Caller:
    """Who asks: what a handler gets, with the right checks at hand."""

    context: Context
    token: str | None

    @property
    def queries(self) -> Queries:
        return self.context.queries

    def may(self, right: Right, run: str | None = None) -> bool:
        """Whether the caller's token gives it a right, on a run or at all."""
        return self.context.access.check(self.token, right, run) is None

    def require(self, right: Right, run: str | None = None) -> None:
        """Raises:
        ApiError: 401 without a token of the server's, 403 with one that does not allow it.
        """
        why = self.context.access.check(self.token, right, run)
        if why is None:
            return
        if not self.context.access.knows(self.token):
            raise ApiError(401, why, {"WWW-Authenticate": 'Bearer realm="steptron metrics"'})
        raise ApiError(403, why)

    async def run(self, name: str) -> Run:
        """A run that the caller may read.

        Raises:
            ApiError: it may not, or there is none of that name.
        """
        self.require("read", name)
        try:
            return await self.queries.look(lambda: self.queries.run(name))
        except KeyError:
            raise ApiError(404, f"there is no run {name!r}; GET /api/v1/runs lists them") from None


def _caller(
    context: Annotated[Context, Depends(_context)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    return Caller(context, credentials.credentials if credentials is not None else None)


def known_parameters(request: Request) -> None:
    """A misspelt parameter is refused: without this its default would answer another question.

    Raises:
        ApiError: 422 with the names that there are.
    """
    path = request.scope["route"].path
    documented = request.app.openapi()["paths"][path][request.method.lower()].get("parameters", ())
    known = {one["name"] for one in documented if one["in"] == "query"}
    for name in request.query_params:
        if name not in known:
            there_are = f"there are {', '.join(sorted(known))}" if known else "there are none"
            raise ApiError(422, f"{name[:64]}: no parameter of {path}; {there_are}")


Asking = Annotated[Caller, Depends(_caller)]
