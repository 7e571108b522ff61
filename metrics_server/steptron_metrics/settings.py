"""How a server is to run; ``steptron metrics serve`` makes it from its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from steptron_metrics.protocol.description import Limits


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        folder: for journal, embedded database and log.
        database: URL of a PostgreSQL database; None: DuckDB in the folder.
        host: address to listen at.
        port: of gRPC; 0 takes a free one.
        http_port: of the API and the page; likewise.
        receivers, reducers: numbers of processes.
        tokens: file of bearer tokens; None: none are asked for.
        certificate, key: PEM files of TLS; None: no TLS.
        rules: file of alert rules; None: the defaults.
        webhook: URL that gets alerts; None: none does.
        partial_after_seconds: an iteration whose ranks have not all sent is reduced without them that long after its
            first frame arrived.
        stale_after_seconds: a run that nothing has come from for so long is called stale.
        raw_iterations: raw values are kept of at least so many latest iterations of a run ...
        journal_bytes: ... but take up at most this together; what is not yet reduced is never deleted, and when it
            alone takes up this much, clients are told to wait.
        min_free_bytes: space that is left free on the disk.
        max_frames, max_frame_bytes, max_message_bytes: limits of messages.
        max_world_size, max_runs, max_connections: limits of a server.
        max_runs_per_token: runs that a token which is limited to patterns of names can begin: so many runs may match
            them. One that may write all runs is limited by ``max_runs`` only.
        limits: of descriptions, and of what all descriptions of a run say together.
    """

    folder: Path
    database: str | None = None
    host: str = "127.0.0.1"
    port: int = 7077
    http_port: int = 7078
    receivers: int = 1
    reducers: int = 1
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    rules: Path | None = None
    webhook: str | None = None
    partial_after_seconds: float = 120.0
    stale_after_seconds: float = 600.0
    raw_iterations: int = 100
    journal_bytes: int = 8 << 30
    min_free_bytes: int = 1 << 30
    max_frames: int = 256
    max_frame_bytes: int = 4 << 20
    max_message_bytes: int = 16 << 20
    max_world_size: int = 65_536
    max_runs: int = 1000
    max_runs_per_token: int = 200
    max_connections: int = 8192
    limits: Limits = field(default_factory=Limits)

    @property
    def journal(self) -> Path:
        """Frames as they came, see ``journal``."""
        return self.folder / "journal"

    @property
    def requests(self) -> Path:
        """What alerts ask of runs: ``<run>.json``, written atomically by the alerts, read by the receivers."""
        return self.folder / "requests"
