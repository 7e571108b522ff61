"""The application: the API under ``/api/v1``, ``/metrics`` for Prometheus, and the page."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from steptron_metrics.access import Access
from steptron_metrics.errors import MetricsError
from steptron_metrics.http import prometheus, routes_export, routes_points, routes_runs, routes_server
from steptron_metrics.http.context import Asking, Context, known_parameters
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.models import Failure
from steptron_metrics.http.queries import Queries
from steptron_metrics.http.security import Guard
from steptron_metrics.http.state import ServerState
from steptron_metrics.http.static import page_router
from steptron_metrics.settings import Settings
from steptron_metrics.storage.base import Store

_FAILURES: dict[int | str, dict[str, object]] = {
    401: {"model": Failure, "description": "A token of the server is needed."},
    403: {"model": Failure, "description": "The token does not allow it."},
    404: {"model": Failure, "description": "There is no such run, metric, layer or figure."},
    409: {"model": Failure, "description": "The run is live."},
    422: {"model": Failure, "description": "A parameter is unknown or not within its limits."},
    503: {
        "model": Failure,
        "description": "The database does not answer, or too much is asked at once; Retry-After says when to ask again",
    },
}


def build_app(
    settings: Settings,
    store: Store,
    access: Access,
    state: Callable[[], ServerState],
    delete: Callable[[str], None] | None = None,
) -> FastAPI:
    """The application.

    Args:
        settings: of the server.
        store: that is read; its threads are the application's.
        access: the tokens.
        state: how the server does, called in a thread; has to be quick.
        delete: deletes everything of a run, called in a thread while others write; None: the store's own.
    """
    queries = Queries(store, trouble=lambda: state().trouble)
    requests = prometheus.RequestMetrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queries.close()

    app = FastAPI(
        title="Steptron metrics",
        version="1",
        summary="What a run measures: values by layer and expert over time, derived figures, alerts.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # Swagger's page would load its script from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=_FAILURES,
    )
    app.state.context = Context(settings, access, queries, state, delete or store.delete)
    for module in (routes_runs, routes_points, routes_export, routes_server):
        app.include_router(module.router, dependencies=[Depends(known_parameters)])

    @app.get("/metrics", tags=["server"], summary="For Prometheus", response_class=Response)
    async def metrics(asking: Asking) -> Response:
        """The derived values of the runs that are not stale, alerts, and the server itself, as Prometheus' text."""
        asking.require("read")

        def scrape() -> bytes:
            return prometheus.exposition(
                requests,
                store,
                lambda: [run for run in queries.runs() if asking.may("read", run.name)],
                state,
                settings.stale_after_seconds,
            )

        return Response(await queries.do(scrape), media_type=prometheus.CONTENT_TYPE)

    app.include_router(page_router())
    _explain_errors(app)
    app.add_middleware(
        Guard,
        local_only=_is_loopback(settings.host) and not access.asks,
        encrypted=settings.certificate is not None,
        observe=requests.observe,
    )
    return app


def _explain_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse({"reason": error.reason}, error.status, error.headers)

    @app.exception_handler(MetricsError)
    async def away(_: Request, error: MetricsError) -> Response:
        # Of the store, which cannot be reached or written.
        return JSONResponse({"reason": str(error)}, 503, {"Retry-After": "5"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        parts = [f"{'.'.join(str(place) for place in one['loc'][1:])}: {one['msg']}" for one in error.errors()[:10]]
        return JSONResponse({"reason": "; ".join(parts)}, 422)

    @app.exception_handler(KeyError)
    async def gone(_: Request, error: KeyError) -> Response:
        # Readers of the store raise it for a run that was deleted between two queries.
        return JSONResponse({"reason": f"there is no {str(error.args[0] if error.args else '')[:200]!r} any more"}, 404)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"reason": str(error.detail)}, error.status_code, error.headers)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
