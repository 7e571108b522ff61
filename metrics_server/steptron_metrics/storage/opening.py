"""Opening a server's store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptron_metrics.settings import Settings

if TYPE_CHECKING:
    from steptron_metrics.storage.base import Store


def open_store(settings: Settings, *, read_only: bool = False) -> Store:
    """The store that a server's settings name, with its schema brought up to date.

    Args:
        settings: of the server.
        read_only: changes nothing. PostgreSQL can be read so beside the server; a DuckDB file when it is stopped only.

    Raises:
        MetricsError: it is out of reach or in use by another server, or its schema is not one that this code knows.
    """
    # Each needs its database's driver, and only one is used.
    if settings.database is not None:
        from steptron_metrics.storage.postgres_store import open_postgres

        return open_postgres(settings.database, read_only=read_only)
    from steptron_metrics.storage.duckdb_store import FILE, open_duckdb

    return open_duckdb(settings.folder / FILE, read_only=read_only)
