"""Whole tables, streamed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from steptron_metrics.http.context import MAX_EXPORTS, Asking, Context
from steptron_metrics.http.errors import ApiError
from steptron_metrics.http.parameters import LAST_ITERATION, MAX_EXPORTED_METRICS, First, Last, MetricName, RunName
from steptron_metrics.results import STATISTICS

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


@router.get(
    "/table",
    summary="All aggregates",
    response_class=StreamingResponse,
    responses={200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}}},
)
async def table(
    asking: Asking,
    run: RunName,
    metric: Annotated[
        list[MetricName],
        Query(max_length=MAX_EXPORTED_METRICS, description="Only these, the parameter once for each; all without it."),
    ] = [],  # noqa: B006 - never changed
    first: First = 0,
    last: Last = LAST_ITERATION,
    form: Annotated[
        Literal["arrow", "parquet"], Query(description="`arrow`: a stream of Arrow IPC; `parquet`: a file, zstd.")
    ] = "arrow",
) -> StreamingResponse:
    """One row an item: iteration, metric, layer, item, count, mean, rms, min, median, max, p99. Streamed: nothing is
    held in memory whole. An answer that ends early was not completed."""
    found = await asking.run(run)
    store = asking.queries.store
    if metric:
        known, _ = await asking.queries.do(lambda: asking.queries.described(found))
        for name in metric:
            if name not in known:
                raise ApiError(404, f"run {run!r} has no metric {name!r}; GET /api/v1/runs/{run}/metrics lists them")
    context = asking.context
    if not context.exports.acquire(blocking=False):
        raise ApiError(503, f"{MAX_EXPORTS} exports are running already", {"Retry-After": "10"})
    batches = store.table(run, metric or None, max(first, found.first_iteration), min(last, found.last_iteration))
    return _Export(context, _arrow(batches) if form == "arrow" else _parquet(batches), run, form)


class _Export(StreamingResponse):
    """Gives back its place among the exports however it ends."""

    def __init__(self, context: Context, chunks: Iterator[bytes], run: str, form: str) -> None:
        ending = "arrows" if form == "arrow" else "parquet"
        super().__init__(
            _in_a_thread(chunks),
            media_type=MEDIA_TYPES[form],
            headers={"content-disposition": f'attachment; filename="{run}.{ending}"'},
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
