"""Where results are read from: a running server, a server's folder, or its PostgreSQL database."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from steptron_metrics.catalogue import Statistic
from steptron_metrics.errors import MetricsError
from steptron_metrics.results import Alert, MetricInfo, Points, Run
from steptron_metrics.server import remembered, status
from steptron_metrics.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from steptron_metrics.storage.base import Store

LAST_ITERATION = (1 << 53) - 1
_ROWS = 5000
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


class Source(Protocol):
    """What can be read of runs.

    Where a run does not exist, or a metric, layer or figure, ``KeyError`` with its name is raised.

    Attributes:
        name: for messages.
        journal: folder of raw values; None where there is none on this machine.
    """

    name: str
    journal: Path | None

    def runs(self) -> list[Run]:
        """The latest first."""

    def metrics(self, run: str) -> list[MetricInfo]: ...

    def figures(self, run: str) -> list[str]:
        """Names of derived figures."""

    def iterations(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        """As ``Store.iterations``, a bounded number of rows at a time."""

    def events(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        """As ``Store.events``, likewise."""

    def points(
        self, run: str, metric: str, layer: int, statistic: Statistic, first: int, last: int, max_points: int
    ) -> Points:
        """As ``Store.points``."""

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        """As ``Store.derived``."""

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """As ``Store.table``."""

    def raw(self, run: str, iteration: int, metric: str, layer: int) -> Iterator[pa.RecordBatch]:
        """What each rank sent, see :class:`steptron_metrics.reading.raw.RawValues`."""

    def alerts(self, run: str | None) -> list[Alert]:
        """The latest first."""

    def close(self) -> None: ...


def open_source(where: str | Path, *, token: str | None = None, certificate: Path | None = None) -> Source:
    """Finds out what is meant and opens it.

    Args:
        where: address of a running server's page (``host:port`` or a URL), ``postgresql://...``, or the folder of a
            server: one that runs is asked, of one that is stopped the database is read.
        token, certificate: bearer token and root certificate (PEM), of a running server only.

    Raises:
        MetricsError: it is none of these, or cannot be read.
    """
    from steptron_metrics.storage import open_store

    text = str(where)
    if isinstance(where, str) and text.startswith(("http://", "https://")):
        return _remote(text, token, certificate)
    if isinstance(where, str) and text.startswith(("postgresql://", "postgres://")):
        return StoredSource(open_store(Settings(Path(), database=text), read_only=True), "the database", None)
    folder = Path(where)
    if folder.is_dir():
        settings = Settings(folder, database=remembered.read(folder))
        running = status.read(folder)
        if running is not None and running.ready and _lives(running.pid):
            return _remote(running.http_address, token, certificate, settings.journal)
        try:
            store = open_store(settings, read_only=True)
        except MetricsError as error:
            if settings.database is None:
                raise
            raise MetricsError(
                f"the server of {text} keeps its results in PostgreSQL, of which the folder remembers no password: "
                f"give the database's URL, or set PGPASSWORD ({error})"
            ) from error
        return StoredSource(store, text, settings.journal)
    if isinstance(where, str) and _ADDRESS.fullmatch(text):
        return _remote(f"{'http' if certificate is None else 'https'}://{text}", token, certificate)
    raise MetricsError(
        f"{text}: expected the address of a running server such as 127.0.0.1:7078, its folder, or a URL of PostgreSQL"
    )


def _remote(url: str, token: str | None, certificate: Path | None, journal: Path | None = None) -> Source:
    from steptron_metrics.reading.remote import RemoteSource

    return RemoteSource(url, token, certificate, journal)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class StoredSource:
    """A store read directly."""

    def __init__(self, store: Store, name: str, journal: Path | None) -> None:
        self.name = name
        self.journal = journal if journal is not None and journal.is_dir() else None
        self._store = store

    def runs(self) -> list[Run]:
        return self._store.runs()

    def metrics(self, run: str) -> list[MetricInfo]:
        return self._store.metrics(run)

    def figures(self, run: str) -> list[str]:
        return self._store.derived_names(run)

    def iterations(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        for begin, end in windows(first, last, self._run(run)):
            table = self._store.iterations(run, begin, end)
            if len(table):
                yield table

    def events(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        for begin, end in windows(first, last, self._run(run)):
            table = self._store.events(run, begin, end)
            if len(table):
                yield table

    def points(
        self, run: str, metric: str, layer: int, statistic: Statistic, first: int, last: int, max_points: int
    ) -> Points:
        if not any(one.metric == metric and layer in one.layers for one in self._store.metrics(run)):
            raise KeyError(f"{metric} of layer {layer}")
        return self._store.points(run, metric, layer, statistic, first, last, max_points)

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        if name not in self._store.derived_names(run):
            raise KeyError(name)
        return self._store.derived(run, name, first, last, max_points)

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        known = {one.metric for one in self._store.metrics(run)}
        for name in metrics or ():
            if name not in known:
                raise KeyError(name)
        return self._store.table(run, metrics, first, last)

    def raw(self, run: str, iteration: int, metric: str, layer: int) -> Iterator[pa.RecordBatch]:
        from steptron_metrics.reading.raw import RawValues

        if self.journal is None:
            raise MetricsError(
                f"raw values are not in {self.name} but in the journal in the server's folder: give its address, or "
                "journal=FOLDER/journal where that folder is mounted"
            )
        return RawValues(self.journal, run, iteration, metric, layer).batches()

    def alerts(self, run: str | None) -> list[Alert]:
        return self._store.alerts(run)

    def close(self) -> None:
        self._store.close()

    def _run(self, name: str) -> Run:
        for run in self._store.runs():
            if run.name == name:
                return run
        raise KeyError(name)


def windows(first: int, last: int, run: Run, size: int = _ROWS) -> Iterator[tuple[int, int]]:
    """Parts of the range in which the run has iterations."""
    first, last = max(first, run.first_iteration), min(last, run.last_iteration)
    for begin in range(first, last + 1, size):
        yield begin, min(begin + size - 1, last)
