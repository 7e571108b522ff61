"""Whole tables, streamed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from steptron_metrics.http.context import MAX_EXPORTS, Asking, Context
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.parameters import (
    LAST_ITERATION,
    MAX_EXPORTED_METRICS,
    MAX_RANK,
    MAX_RAW_VALUES,
    MAX_TABLE_ROWS,
    First,
    Last,
    MetricName,
    RunName,
)
from steptron_metrics.reading.raw import RawValues
from steptron_metrics.results import STATISTICS, Run

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["export"])

BATCH_TIMEOUT_SECONDS = 120.0
MEDIA_TYPES = {"arrow": "application/vnd.apache.arrow.stream", "parquet": "application/vnd.apache.parquet"}
SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("metric", pa.string()),
        ("layer", pa.int32()),
        ("item", pa.int32()),
        *((statistic, pa.float32()) for statistic in STATISTICS),
    ]
)
"""Of tables without rows; others have the store's, which may encode the metrics' names."""


_STREAMS: dict[int | str, dict[str, object]] = {200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}}}
Stream = Annotated[
    Literal["arrow", "parquet"], Query(description="`arrow`: a stream of Arrow IPC; `parquet`: a file, zstd.")
]


@router.get("/table", summary="All aggregates", response_class=StreamingResponse, responses=_STREAMS)
async def table(
    asking: Asking,
    request: Request,
    run: RunName,
    metric: Annotated[
        list[MetricName],
        Query(max_length=MAX_EXPORTED_METRICS, description="Only these, the parameter once for each; all without it."),
    ] = [],  # noqa: B006 - never changed
    first: First = 0,
    last: Last = LAST_ITERATION,
    limit: Annotated[
        int | None,
        Query(
            ge=1,
            le=MAX_TABLE_ROWS,
            description="At most so many rows (5,000,000 without it), but whole iterations, and one in any case. Where "
            "there are more the "
            'answer has a header `Link: <...>; rel="next"` with the address of those that follow.',
        ),
    ] = None,
    form: Stream = "arrow",
) -> StreamingResponse:
    """One row an item: iteration, metric, layer, item, count, mean, rms, min, median, max, p99. Streamed: nothing is
    held in memory whole. An answer that ends early was not completed; one with a header `Link` is not the last one."""
    found = await asking.run(run)
    store = asking.queries.store
    known, _ = await asking.queries.do(lambda: asking.queries.described(found))
    for name in metric:
        if name not in known:
            raise ApiError(404, f"run {run!r} has no metric {name!r}; GET /api/v1/runs/{run}/metrics lists them")
    width = sum(known[name].items * len(known[name].layers) for name in metric or known)
    most = max((limit or MAX_TABLE_ROWS) // max(width, 1), 1)
    first, last = max(first, found.first_iteration), min(last, found.last_iteration)
    numbers = await asking.queries.do(lambda: store.numbers(run, first, last, most + 1))
    headers = {}
    if len(numbers) > most:
        last = numbers[most - 1]
        following = request.url.include_query_params(first=numbers[most])
        headers["link"] = f'<{following.path}?{following.query}>; rel="next"'
    _take_place(asking.context)
    batches = store.table(run, metric or None, first, last)
    return _Export(asking.context, _arrow(batches) if form == "arrow" else _parquet(batches), run, form, headers)


@router.get("/raw", summary="Raw values", response_class=StreamingResponse, responses=_STREAMS)
async def raw(
    asking: Asking,
    run: RunName,
    iteration: Annotated[int, Query(ge=1, le=LAST_ITERATION, description="Of the latest session that has it.")],
    metric: MetricName,
    layer: Annotated[int, Query(ge=-1, le=MAX_RANK, description="-1 for what is not of a layer.")] = -1,
    first_rank: Annotated[int, Query(ge=0, le=MAX_RANK, description="Ranks before this one are left out.")] = 0,
    last_rank: Annotated[int, Query(ge=0, le=MAX_RANK, description="Ranks after this one are left out.")] = MAX_RANK,
    form: Stream = "arrow",
) -> StreamingResponse:
    """What each rank sent of a metric and layer in one of the latest iterations, as long as the journal has it: rank,
    row (the micro-batch; of folded series 0 to 4 are count, sum, sum of squares, minimum and maximum), item, value.
    Streamed, in the order of the ranks; at most 20,000,000 values: of more ask for some ranks at a time."""
    found: Run = await asking.run(run)
    context = asking.context
    _take_place(context)
    try:
        values = await asking.queries.do(
            lambda: RawValues(
                *(context.settings.journal, found.name, iteration, metric, layer),
                ranks=(first_rank, last_rank),
                limits=context.settings.limits,
            )
        )
        if values.number > MAX_RAW_VALUES:
            raise ApiError(
                422, f"that is {values.number} values, at most {MAX_RAW_VALUES}: ask for some ranks at a time"
            )
    except BaseException as error:
        context.exports.release()
        if isinstance(error, KeyError):
            raise ApiError(404, f"there are no {error.args[0]} in the journal") from None
        raise
    batches = values.batches()
    return _Export(context, _arrow(batches) if form == "arrow" else _parquet(batches), run, form, {})


def _take_place(context: Context) -> None:
    if not context.exports.acquire(blocking=False):
        raise ApiError(503, f"{MAX_EXPORTS} exports are running already", {"Retry-After": "10"})


class _Export(StreamingResponse):
    """Gives back its place among the exports however it ends."""

    def __init__(
        self, context: Context, chunks: Iterator[bytes], run: str, form: str, headers: Mapping[str, str]
    ) -> None:
        ending = "arrows" if form == "arrow" else "parquet"
        super().__init__(
            _in_a_thread(chunks),
            media_type=MEDIA_TYPES[form],
            headers={"content-disposition": f'attachment; filename="{run}.{ending}"', **headers},
        )
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._context.exports.release()


async def _in_a_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Draws from an iterator in one thread of its own, since a database's cursor may belong to a thread."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="http-export")
    try:
        while True:
            chunk = await asyncio.wait_for(
                loop.run_in_executor(thread, next, chunks, None), timeout=BATCH_TIMEOUT_SECONDS
            )
            if chunk is None:
                return
            if chunk:
                yield chunk
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            thread.submit(close)
        thread.shutdown(wait=False)


class _Pieces(io.RawIOBase):
    """A file that hands out what was written since the last time."""

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        view = memoryview(content)  # type: ignore[arg-type]
        self._written += view
        self._position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


def _arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    sink = _Pieces()
    first = next(batches, None)
    with pa.ipc.new_stream(sink, first.schema if first is not None else SCHEMA) as writer:
        batch = first
        while batch is not None:
            writer.write_batch(batch)
            yield sink.take()
            batch = next(batches, None)
    yield sink.take()


def _parquet(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    sink = _Pieces()
    first = next(batches, None)
    with pq.ParquetWriter(sink, first.schema if first is not None else SCHEMA, compression="zstd") as writer:
        batch = first
        while batch is not None:
            writer.write_batch(batch)
            yield sink.take()
            batch = next(batches, None)
    yield sink.take()
