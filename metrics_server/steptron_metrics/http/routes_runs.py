"""Runs, and what there is of them."""

from __future__ import annotations

import time
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from steptron_metrics.http.context import Asking, Context
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.models import EventModel, IterationModel, MetricModel, RunModel
from steptron_metrics.http.parameters import LAST_ITERATION, First, Last, Limit, RunName
from steptron_metrics.http.queries import version_of
from steptron_metrics.results import Run

router = APIRouter(prefix="/api/v1", tags=["runs"])


def is_live(context: Context, run: Run) -> bool:
    return not run.finished and time.time_ns() - run.last_ended_ns < context.settings.stale_after_seconds * 1e9


def unchanged(request: Request, version: str) -> bool:
    """Whether the client has the answer of this version already."""
    held = request.headers.get("if-none-match", "")
    return version in (one.strip() for one in held.split(","))


def not_modified(version: str) -> Response:
    return Response(status_code=304, headers={"etag": version, "cache-control": "no-cache"})


def set_version(response: Response, version: str) -> None:
    response.headers["etag"] = version
    response.headers["cache-control"] = "no-cache"


@router.get("/runs", summary="All runs", response_model=list[RunModel], responses={304: {"description": "As before."}})
async def runs(asking: Asking, request: Request, response: Response) -> object:
    """The runs that the token may read, the latest first. With an `ETag`: ask again with `If-None-Match`, as often as
    every second, to see what has changed."""
    asking.require("read")
    found = [run for run in await asking.queries.look(asking.queries.runs) if asking.may("read", run.name)]
    live = [is_live(asking.context, run) for run in found]
    version = version_of(found, live)
    if unchanged(request, version):
        return not_modified(version)
    set_version(response, version)
    return [RunModel.of(run, alive) for run, alive in zip(found, live, strict=True)]


@router.get("/runs/{run}", summary="A run", response_model=RunModel, responses={304: {"description": "As before."}})
async def one_run(asking: Asking, request: Request, response: Response, run: RunName) -> object:
    """A run's summary, which changes with each stored iteration and alert; with an `ETag` for cheap polling."""
    found = await asking.run(run)
    live = is_live(asking.context, found)
    version = version_of(found, live)
    if unchanged(request, version):
        return not_modified(version)
    set_version(response, version)
    return RunModel.of(found, live)


@router.delete("/runs/{run}", summary="Delete a run", status_code=204)
async def delete_run(
    asking: Asking,
    run: RunName,
    force: Annotated[bool, Query(description="Also while the run is live; it comes back with its next frame.")] = False,
) -> Response:
    """Deletes everything of a run: aggregates, alerts and raw values. Needs a token with the right `delete`. A 503 says
    why the run is still there; the server goes on trying."""
    asking.require("delete", run)
    queries = asking.queries
    try:
        found = await queries.look(lambda: queries.run(run))
    except KeyError:
        # One that has never been stored has raw values only.
        if not (asking.context.settings.journal / run).is_dir():
            raise ApiError(404, f"there is no run {run!r}") from None
        found = None
    if not force and found is not None and is_live(asking.context, found):
        raise ApiError(
            409,
            f"run {run!r} is live: with force=true (--force) it is deleted all the same, and it comes back with its "
            "next frame",
        )
    try:
        await queries.do(lambda: asking.context.delete(run))
    finally:
        queries.forget_runs()
    return Response(status_code=204)


@router.get("/runs/{run}/metrics", summary="What is measured", response_model=list[MetricModel])
async def metrics(asking: Asking, run: RunName) -> object:
    """What the run has aggregates of, by name, with what the server's catalogue knows of it."""
    found = await asking.run(run)
    metrics, _ = await asking.queries.do(lambda: asking.queries.described(found))
    return [MetricModel.of(metrics[name]) for name in sorted(metrics)]


@router.get("/runs/{run}/iterations", summary="Iterations", response_model=list[IterationModel])
async def iterations(
    asking: Asking,
    run: RunName,
    first: First = 0,
    last: Last = LAST_ITERATION,
    partial: Annotated[bool, Query(description="Only those that lack the frames of some rank.")] = False,
    latest: Annotated[bool, Query(description="The latest rows where there are more than `limit`.")] = False,
    limit: Limit = 1000,
) -> object:
    """Stored iterations, ascending: whether they are whole, how long they took."""
    await asking.run(run)

    def read() -> list[dict[str, object]]:
        table = asking.queries.store.iterations(run, first, last)
        if partial:
            table = table.filter(pc.less(table["num_ranks"], table["world_size"]))
        return _cut(table, limit, latest)

    return await asking.queries.do(read)


@router.get("/runs/{run}/events", summary="Events", response_model=list[EventModel])
async def events(
    asking: Asking,
    run: RunName,
    first: First = 0,
    last: Last = LAST_ITERATION,
    latest: Annotated[bool, Query(description="The latest rows where there are more than `limit`.")] = False,
    limit: Limit = 1000,
) -> object:
    """What ranks reported beside measuring: skipped steps, checkpoints, stages; ascending."""
    await asking.run(run)
    return await asking.queries.do(lambda: _cut(asking.queries.store.events(run, first, last), limit, latest))


def _cut(table: pa.Table, limit: int, latest: bool) -> list[dict[str, object]]:
    start = max(0, len(table) - limit) if latest else 0
    rows: list[dict[str, object]] = table.slice(start, limit).to_pylist()
    return rows
