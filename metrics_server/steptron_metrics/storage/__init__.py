"""Where aggregates are kept for good: one interface, DuckDB in the server's folder or PostgreSQL."""

from steptron_metrics.storage.opening import open_store

__all__ = ["open_store"]
