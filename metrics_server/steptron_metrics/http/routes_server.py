"""Alerts, and the server itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from steptron_metrics.http.context import Asking
from steptron_metrics.http.models import AlertModel, Health, ServerModel
from steptron_metrics.http.parameters import Limit
from steptron_metrics.protocol.description import RUN_NAME

router = APIRouter()


@router.get("/api/v1/alerts", tags=["alerts"], summary="Alerts", response_model=list[AlertModel])
async def alerts(
    asking: Asking,
    run: Annotated[
        str | None, Query(pattern=f"^{RUN_NAME.pattern}$", max_length=128, description="Of this run only.")
    ] = None,
    open: Annotated[bool, Query(description="Only those that have not ended.")] = False,
    limit: Limit = 1000,
) -> object:
    """Alerts, the latest first."""
    if run is not None:
        await asking.run(run)
    else:
        asking.require("read")
    found = await asking.queries.look(lambda: asking.queries.store.alerts(run, open))
    readable = [alert for alert in found if asking.may("read", alert.run)]
    return [AlertModel.of(alert) for alert in readable[:limit]]


@router.get("/api/v1/server", tags=["server"], summary="How the server does", response_model=ServerModel)
async def server(asking: Asking) -> object:
    """Processes, what waits, what was dropped, and what room is left."""
    asking.require("read")
    # Not among the queries: this says what is wrong when those do not come to an end.
    state = asdict(asking.context.state())
    state["waiting"] = [waiting for waiting in state["waiting"] if asking.may("read", waiting["run"])]
    return state


@router.get("/healthz", tags=["server"], summary="Whether the server answers", response_model=Health)
async def health(asking: Asking) -> object:
    """Needs no token and reads no database; what the trouble is `/api/v1/server` says."""
    return Health(status="trouble" if asking.context.state().trouble else "ok")
