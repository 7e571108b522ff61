"""Data frames of what a server has stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from steptron_metrics import catalogue
from steptron_metrics.catalogue import Statistic
from steptron_metrics.reading.source import LAST_ITERATION, Source, open_source
from steptron_metrics.reading.whole import LAYERS, whole
from steptron_metrics.results import STATISTICS, Alert, Points, Run

if TYPE_CHECKING:
    import pandas as pd


class MetricsReader:
    """Reads runs as pandas data frames.

    ::

        with MetricsReader("127.0.0.1:7078") as reader:
            norms = reader.aggregates("my-run", "moe.output_norm_max", layer=44)   # iterations x experts
            ratio = reader.derived("my-run", "moe.output_norm_max.max_over_median")   # iterations x layers

    Args:
        where: address of a running server's page, folder of a server, or URL of its PostgreSQL database.
        token, certificate: bearer token and root certificate (PEM) of a running server.
        journal: folder of the server's journal, for ``raw`` of a PostgreSQL database; a running server and a server's
            folder have it themselves.

    Raises:
        MetricsError: it cannot be read. Methods raise ``KeyError`` where a run, metric, layer or figure does not exist.
    """

    def __init__(
        self,
        where: str | Path,
        token: str | None = None,
        *,
        certificate: Path | None = None,
        journal: str | Path | None = None,
    ) -> None:
        self._source: Source = open_source(where, token=token, certificate=certificate)
        self._journal = self._source.journal if journal is None else Path(journal)

    def runs(self) -> pd.DataFrame:
        """A row a run, the latest first; columns as of :class:`steptron_metrics.results.Run`."""
        import pandas as pd

        return pd.DataFrame([asdict(run) for run in self._source.runs()], columns=[one.name for one in fields(Run)])

    def metrics(self, run: str) -> pd.DataFrame:
        """What the run has: ``metric``, ``layers``, ``items``, ``headline`` (the statistic that says most)."""
        import pandas as pd

        found = self._source.metrics(run)
        rows = [{**asdict(one), "headline": headline(one.metric)} for one in found]
        return pd.DataFrame(rows, columns=["metric", "layers", "items", "headline"])

    def figures(self, run: str) -> list[str]:
        """Names of derived figures."""
        return self._source.figures(run)

    def iterations(self, run: str, first: int = 0, last: int = LAST_ITERATION) -> pd.DataFrame:
        """A row an iteration: session_ns, world_size, num_ranks, missing, ended_ns, seconds, consumed_tokens, dropped;
        the index is ``iteration``."""
        return self._frame(list(self._source.iterations(run, first, last)), run).set_index("iteration")

    def events(self, run: str, first: int = 0, last: int = LAST_ITERATION) -> pd.DataFrame:
        """What ranks reported: ``iteration``, ``kind``, ``detail``."""
        import pandas as pd

        parts = list(self._source.events(run, first, last))
        return self._frame(parts, run) if parts else pd.DataFrame(columns=["iteration", "kind", "detail"])

    def aggregates(
        self,
        run: str,
        metric: str,
        layer: int = -1,
        statistic: Statistic | None = None,
        first: int = 0,
        last: int = LAST_ITERATION,
        max_points: int | None = None,
    ) -> pd.DataFrame:
        """A statistic of a metric, one row an iteration and one column an item.

        Args:
            layer: -1 of what is not of a layer.
            statistic: over micro-batches and replicas; the metric's headline without it.
            max_points: at most so many rows, rolled up; the index is then the first iteration of each.
        """
        chosen = statistic or headline(metric)

        def read(begin: int, end: int, most: int) -> Points:
            return self._source.points(run, metric, layer, chosen, begin, end, most)

        items = max([one.items for one in self._source.metrics(run) if one.metric == metric], default=1)
        return _wide(whole(self._source, run, read, first, last, max_points, items), "item")

    def derived(
        self, run: str, name: str, first: int = 0, last: int = LAST_ITERATION, max_points: int | None = None
    ) -> pd.DataFrame:
        """A derived figure, one row an iteration and one column a layer; ``max_points`` as above."""

        def read(begin: int, end: int, most: int) -> Points:
            return self._source.derived(run, name, begin, end, most)

        return _wide(whole(self._source, run, read, first, last, max_points, LAYERS), "layer")

    def table(
        self, run: str, metrics: Sequence[str] | None = None, first: int = 0, last: int = LAST_ITERATION
    ) -> pd.DataFrame:
        """All statistics, a row an item: iteration, metric, layer, item, count, mean, rms, min, median, max, p99.

        Everything is in memory at once: of large runs choose metrics and a range, or export.
        """
        import pandas as pd
        import pyarrow as pa

        parts = list(self._source.table(run, metrics, first, last))
        if not parts:
            return pd.DataFrame(columns=["iteration", "metric", "layer", "item", *STATISTICS])
        return pa.Table.from_batches(parts).to_pandas()

    def alerts(self, run: str | None = None) -> pd.DataFrame:
        """A row an alert, the latest first; columns as of :class:`steptron_metrics.results.Alert`."""
        import pandas as pd

        found = [asdict(alert) for alert in self._source.alerts(run)]
        return pd.DataFrame(found, columns=[one.name for one in fields(Alert)])

    def raw(self, run: str, iteration: int, metric: str, layer: int = -1) -> pd.DataFrame:
        """What each rank sent of a metric: ``rank``, ``row`` (micro-batch), ``item``, ``value``; of latest iterations
        only, see ``Settings.raw_iterations``.

        Raises:
            MetricsError: a database alone has no raw values.
        """
        from steptron_metrics.reading.raw import frame_of, raw_values

        if self._journal is not None:
            return raw_values(self._journal, run, iteration, metric, layer)
        return frame_of(self._source.raw(run, iteration, metric, layer))

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> MetricsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _frame(self, parts: Sequence[object], run: str) -> pd.DataFrame:
        import pyarrow as pa

        if not parts:
            raise KeyError(f"iterations of run {run} in this range")
        return pa.concat_tables(parts).to_pandas()


def headline(metric: str) -> Statistic:
    """The statistic that says most of a metric."""
    known = catalogue.find(metric)
    return known.headline if known else "mean"


def _wide(points: Points, columns: str) -> pd.DataFrame:
    import pandas as pd

    names = points.layers if len(points.layers) else np.arange(points.values.shape[1])
    return pd.DataFrame(
        points.values,
        index=pd.Index(points.first, name="iteration"),
        columns=pd.Index(names, name=columns),
    )
