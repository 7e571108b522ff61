"""What a database has to do for the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from steptron_metrics.catalogue import Statistic
from steptron_metrics.errors import MetricsError
from steptron_metrics.results import Alert, Iteration, MetricInfo, Points, Run

if TYPE_CHECKING:
    import pyarrow as pa


class Invalidated(MetricsError):
    """The database does nothing more until the process opens it anew."""


class Unstorable(MetricsError):
    """What was to be stored is not as the store takes it, whenever it is tried."""


class Store(Protocol):
    """Aggregates, derived figures and alerts of all runs.

    One thread writes; any number of threads read meanwhile, and see whole iterations only. Where a run does not exist
    readers raise ``KeyError`` with its name.
    """

    def put(self, iterations: Sequence[Iteration]) -> None:
        """Stores iterations in one transaction, with the roll-ups that they complete.

        An iteration replaces one of the same number of its session that fewer ranks had sent (another is ignored, so
        that storing twice is storing once), and the first one of a later session replaces all iterations from its own
        on that belong to earlier sessions of the run. Iterations of an earlier session from that point on are ignored.
        """

    def stored(self, run: str) -> dict[tuple[int, int], int]:
        """For each iteration of a run (session_ns, iteration): how many ranks' frames it was made from. Empty for a run
        that does not exist."""

    def runs(self) -> list[Run]:
        """All runs, the latest first."""

    def metrics(self, run: str) -> list[MetricInfo]:
        """What the run has aggregates of."""

    def derived_names(self, run: str) -> list[str]: ...

    def iterations(self, run: str, first: int, last: int) -> pa.Table:
        """Of each stored iteration in [first, last]: iteration, session_ns, world_size, num_ranks, missing (list of
        the first 100 ranks), ended_ns, seconds, consumed_tokens, dropped; ascending."""

    def numbers(self, run: str, first: int, last: int, most: int) -> list[int]:
        """Stored iterations in [first, last], ascending, the first ``most``."""

    def events(self, run: str, first: int, last: int) -> pa.Table:
        """iteration, kind, detail; ascending."""

    def points(
        self, run: str, metric: str, layer: int, statistic: Statistic, first: int, last: int, max_points: int
    ) -> Points:
        """A statistic over the iterations in [first, last], rolled up so that there are at most ``max_points``
        points."""

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        """A derived figure of all layers, likewise."""

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Aggregates one row an item (iteration, metric, layer, item, and the seven statistics), for exports; without
        items that nothing was measured of."""

    def put_alerts(self, alerts: Sequence[Alert]) -> None:
        """Inserts, or replaces those of the same run and number."""

    def alerts(self, run: str | None = None, open_only: bool = False) -> list[Alert]:
        """Alerts, the latest first."""

    def delete(self, run: str) -> None:
        """Deletes everything of a run."""

    def refuses(self, error: Exception) -> bool:
        """Whether an error of writing is about what was to be written: the same would be refused again, and something
        else taken. Other errors are about the database, its disk or the way there."""

    def size_bytes(self) -> int:
        """What the database takes up."""

    def close(self) -> None: ...
