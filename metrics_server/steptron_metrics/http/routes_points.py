"""Values over time."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from steptron_metrics import catalogue
from steptron_metrics.http import encoding
from steptron_metrics.http.context import Asking
from steptron_metrics.http.encoding import Table
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.models import Blocks
from steptron_metrics.http.parameters import (
    LAST_ITERATION,
    FigureNames,
    First,
    FoldItems,
    Form,
    Items,
    Last,
    Layers,
    MaxPoints,
    MetricName,
    Planes,
    RunName,
    StatisticName,
)
from steptron_metrics.http.queries import version_of
from steptron_metrics.http.routes_runs import not_modified, set_version, unchanged
from steptron_metrics.http.timeline import COLUMNS, timeline
from steptron_metrics.results import Run

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["values over time"])

MAX_READ_VALUES = 8_000_000
"""Values of one layer that a request may have the database roll up at once: 32 MB for each of three planes."""
MAX_BINARY_VALUES = 16_000_000
MAX_JSON_VALUES = 500_000

_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"content": {encoding.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "Nothing has been stored since the answer whose ETag the request names."},
}


@router.get("/points", summary="A metric over time", response_model=Blocks, responses=_ANSWERS)
async def points(
    asking: Asking,
    request: Request,
    run: RunName,
    metric: MetricName,
    layer: Layers,
    statistic: StatisticName = None,
    item: Items = None,
    fold_items: FoldItems = False,
    first: First = 0,
    last: Last = LAST_ITERATION,
    max_points: MaxPoints = 500,
    plane: Planes = ["values", "low", "high"],  # noqa: B006 - never changed
    form: Form = "json",
) -> Response:
    """A statistic of a metric, for each of some layers: a block each, of points by items."""
    found = await asking.run(run)
    queries = asking.queries
    version = version_of(found, sorted(request.query_params.multi_items()))
    if unchanged(request, version):
        return not_modified(version)
    infos, _ = await queries.do(lambda: queries.described(found))
    if metric not in infos:
        raise ApiError(404, f"run {run!r} has no metric {metric!r}; GET /api/v1/runs/{run}/metrics lists them")
    info = infos[metric]
    layers = list(dict.fromkeys(layer))
    unknown = [one for one in layers if one not in info.layers]
    if unknown:
        raise ApiError(404, f"run {run!r} has no metric {metric!r} of layer {unknown[0]}")
    first, last = _within(found, first, last)
    num_points = min(max_points, found.iterations)
    if num_points * info.items > MAX_READ_VALUES:
        most = max(1, MAX_READ_VALUES // info.items)
        raise ApiError(422, f"max_points: {metric!r} has {info.items} items, at most {most} points of it can be read")
    columns = len(item) if item else len(encoding.FOLDED) if fold_items else info.items
    _check_size(num_points * columns * len(set(plane)) * len(layers), form)
    chosen = statistic or _headline(metric)

    def read(one: int) -> Table:
        got = queries.store.points(run, metric, one, chosen, first, last, max_points)
        about: dict[str, object] = {"metric": metric, "layer": one, "statistic": chosen}
        table = encoding.table_of(got, about, range(got.values.shape[1]), plane)
        if item:
            table = encoding.choose_items(table, item)
        return encoding.fold_items(table) if fold_items else table

    tables = [await queries.do(partial(read, one)) for one in layers]
    return await _answer(asking, run, tables, form, version)


@router.get("/figures", summary="Names of derived figures", response_model=list[str])
async def figures(asking: Asking, run: RunName) -> object:
    """Figures that the server derives for each layer from the aggregates, such as max/median over the experts."""
    found = await asking.run(run)
    _, names = await asking.queries.do(lambda: asking.queries.described(found))
    return sorted(names)


@router.get("/derived", summary="Derived figures over time", response_model=Blocks, responses=_ANSWERS)
async def derived(
    asking: Asking,
    request: Request,
    run: RunName,
    figure: FigureNames,
    first: First = 0,
    last: Last = LAST_ITERATION,
    max_points: MaxPoints = 500,
    plane: Planes = ["values", "low", "high"],  # noqa: B006 - never changed
    form: Form = "json",
) -> Response:
    """Derived figures: a block each, of points by layers."""
    found = await asking.run(run)
    queries = asking.queries
    version = version_of(found, sorted(request.query_params.multi_items()))
    if unchanged(request, version):
        return not_modified(version)
    _, known = await queries.do(lambda: queries.described(found))
    names = list(dict.fromkeys(figure))
    for name in names:
        if name not in known:
            raise ApiError(404, f"run {run!r} has no figure {name!r}; GET /api/v1/runs/{run}/figures lists them")
    first, last = _within(found, first, last)

    def read(name: str) -> Table:
        got = queries.store.derived(run, name, first, last, max_points)
        return encoding.table_of(got, {"figure": name}, [int(layer) for layer in got.layers], plane)

    tables = [await queries.do(partial(read, name)) for name in names]
    _check_size(sum(value.size for table in tables for value in table.planes.values()), form)
    return await _answer(asking, run, tables, form, version)


@router.get("/timeline", summary="Iterations over time", response_model=Blocks, responses=_ANSWERS)
async def time_line(
    asking: Asking,
    request: Request,
    run: RunName,
    first: First = 0,
    last: Last = LAST_ITERATION,
    max_points: MaxPoints = 500,
    form: Form = "json",
) -> Response:
    """Of the iterations themselves: `seconds`, `missing_ranks`, `dropped` frames, `consumed_tokens` in millions,
    `ended_ns` in seconds since the first one of the range, `tokens_per_second`."""
    found = await asking.run(run)
    version = version_of(found, sorted(request.query_params.multi_items()))
    if unchanged(request, version):
        return not_modified(version)
    first, last = _within(found, first, last)
    queries = asking.queries
    got = await queries.do(lambda: timeline(queries.store, run, first, last, max_points))
    table = encoding.table_of(got, {}, COLUMNS, ["values", "low", "high"])
    return await _answer(asking, run, [table], form, version)


def _within(run: Run, first: int, last: int) -> tuple[int, int]:
    """The part of a range in which the run has iterations."""
    return max(first, run.first_iteration), min(last, run.last_iteration)


def _check_size(values: int, form: str) -> None:
    most = MAX_JSON_VALUES if form == "json" else MAX_BINARY_VALUES
    if values > most:
        hint = " or form=binary" if form == "json" else ""
        raise ApiError(422, f"that is {values} values, at most {most}: ask for fewer points, layers or planes{hint}")


async def _answer(asking: Asking, run: str, tables: list[Table], form: str, version: str) -> Response:
    encode = encoding.to_binary if form == "binary" else encoding.to_json
    content = await asking.queries.do(lambda: encode(run, tables))
    response = Response(content, media_type=encoding.MEDIA_TYPE if form == "binary" else "application/json")
    set_version(response, version)
    return response


def _headline(metric: str) -> catalogue.Statistic:
    known = catalogue.find(metric)
    return known.headline if known else "mean"
