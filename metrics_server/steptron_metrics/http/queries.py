"""Database work of requests: in threads of its own, a few at a time, with a bounded number waiting."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from steptron_metrics.http.errors import ApiError
from steptron_metrics.results import MetricInfo, Run
from steptron_metrics.storage.base import Store

T = TypeVar("T")

THREADS = 4
MAX_WAITING = 128
TIMEOUT_SECONDS = 60.0
LOOK_THREADS = 2
LOOK_SECONDS = 5.0
"""For what is small: lists of runs and alerts. A database that takes longer is away."""
RUNS_KEPT_SECONDS = 0.25
FAILURE_KEPT_SECONDS = 2.0
RUNS_DESCRIBED = 64
"""Runs of which is kept what they have; a page asks for many values at once, each of which is checked against it."""


class Queries:
    """Runs functions on the store.

    Args:
        store: that they read.
        threads: how many run at once.
        max_waiting: how many may be running or waiting; beyond that requests are told to come back.
        timeout_seconds: how long a request waits for its function.
        look_seconds: how long it waits for one that is small.
        trouble: why the database may not answer; None or empty where nothing is known.
    """

    def __init__(
        self,
        store: Store,
        threads: int = THREADS,
        max_waiting: int = MAX_WAITING,
        timeout_seconds: float = TIMEOUT_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.store = store
        self.timeout_seconds, self.look_seconds = timeout_seconds, look_seconds
        self._trouble = trouble
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="http-query")
        self._quick = ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="http-look")
        self._lock = threading.Lock()
        self._outstanding = 0
        self._failure: tuple[float, Exception] | None = None
        self._runs_lock = threading.Lock()
        self._runs: list[Run] = []
        self._runs_at = -float("inf")
        self._described: dict[str, tuple[Run, dict[str, MetricInfo], frozenset[str]]] = {}

    @property
    def outstanding(self) -> int:
        """Functions that run or wait."""
        return self._outstanding

    async def do(self, function: Callable[[], T]) -> T:
        """Runs a function in one of the threads.

        Raises:
            ApiError: 503 when too many are waiting or it does not end in time.
        """
        return await self._do(function, self._pool, self.timeout_seconds)

    async def look(self, function: Callable[[], T]) -> T:
        """Runs a function that reads little, beside those that read much; likewise, with less patience."""
        return await self._do(function, self._quick, self.look_seconds)

    async def _do(self, function: Callable[[], T], pool: ThreadPoolExecutor, seconds: float) -> T:
        with self._lock:
            if self._outstanding >= self._max_waiting:
                raise ApiError(503, f"{self._max_waiting} queries are waiting already", {"Retry-After": "1"})
            self._outstanding += 1
        try:
            future = pool.submit(function)
        except RuntimeError:
            self._done(None)
            raise ApiError(503, "the server is stopping") from None
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError:
            if future.done() and not future.cancelled() and future.exception() is not None:
                raise  # the function's own
            why = self._trouble()
            reason = f"the database did not answer within {seconds:g} s" + (f" ({why})" if why else "")
            raise ApiError(503, reason, {"Retry-After": "5"}) from None

    def _done(self, _: Future[T] | None) -> None:
        with self._lock:
            self._outstanding -= 1

    def runs(self) -> list[Run]:
        """The store's runs, at most a quarter of a second old; to be called in a query."""
        with self._runs_lock:
            if time.monotonic() - self._runs_at > RUNS_KEPT_SECONDS:
                # Those that waited for the lock do not wait for the database one after the other.
                if self._failure is not None and time.monotonic() - self._failure[0] < FAILURE_KEPT_SECONDS:
                    raise self._failure[1]
                self._failure = None
                try:
                    self._runs = self.store.runs()
                except Exception as error:
                    self._failure = time.monotonic(), error
                    raise
                self._runs_at = time.monotonic()
            return self._runs

    def run(self, name: str) -> Run:
        """One of them.

        Raises:
            KeyError: there is none of that name.
        """
        for run in self.runs():
            if run.name == name:
                return run
        raise KeyError(name)

    def described(self, run: Run) -> tuple[dict[str, MetricInfo], frozenset[str]]:
        """What a run has aggregates of, by name, and its derived figures, as of its latest iteration; to be called in a
        query."""
        with self._runs_lock:
            held = self._described.get(run.name)
        if held is not None and held[0] == run:
            return held[1], held[2]
        metrics = {info.metric: info for info in self.store.metrics(run.name)}
        figures = frozenset(self.store.derived_names(run.name))
        with self._runs_lock:
            self._described.pop(run.name, None)
            self._described[run.name] = run, metrics, figures
            while len(self._described) > RUNS_DESCRIBED:
                del self._described[next(iter(self._described))]
        return metrics, figures

    def forget_runs(self) -> None:
        """Reads them anew the next time."""
        with self._runs_lock:
            self._runs_at = -float("inf")

    def close(self) -> None:
        """Ends the threads when they are through with what they do; what waits is given up."""
        for pool in (self._pool, self._quick):
            pool.shutdown(wait=False, cancel_futures=True)


def version_of(*parts: object) -> str:
    """An entity tag for what is made from these; the same for the same."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
    return f'W/"{digest}"'
