"""How the server does, for the page."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from typing import Any

from steptron_metrics.alerts.webhook import Webhook
from steptron_metrics.http.state import ReceiverState, ReducerState, ServerState
from steptron_metrics.journal.retention import journal_bytes
from steptron_metrics.receiver import counters
from steptron_metrics.reducer.workers import Reducers
from steptron_metrics.server import status
from steptron_metrics.server.pipeline import Pipeline
from steptron_metrics.server.writer import Writer
from steptron_metrics.settings import Settings
from steptron_metrics.storage.base import Store

log = logging.getLogger(__name__)

_EVERY_SECONDS = 2.0
SOFTWARE = "steptron metrics server"


class Overview:
    """Looks at everything every two seconds, in a thread of its own: a database may be slow to answer."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        pipeline: Pipeline,
        writer: Writer,
        reducers: Reducers,
        webhook: Webhook | None,
    ) -> None:
        self._settings, self._store, self._pipeline = settings, store, pipeline
        self._writer, self._reducers, self._webhook = writer, reducers, webhook
        self._started_ns = time.time_ns()
        self._sizes: dict[str, int] = {}
        self._receivers: tuple[ReceiverState, ...] = ()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overview", daemon=True)
        self._thread.start()

    def state(self) -> ServerState:
        """At this moment, sizes as of the last look."""
        return ServerState(
            software=SOFTWARE,
            started_ns=self._started_ns,
            now_ns=time.time_ns(),
            receivers=self._receivers,
            reducers=tuple(ReducerState(number, *work) for number, work in enumerate(self._reducers.work())),
            pending_iterations=self._pipeline.num_pending,
            waiting=self._pipeline.pending,
            stored_iterations=self._writer.stored,
            journal_bytes=self._sizes.get("journal", 0),
            journal_limit_bytes=self._settings.journal_bytes,
            database_bytes=self._sizes.get("database", 0),
            free_bytes=self._sizes.get("free", 0),
            dropped_frames=self._writer.dropped_frames,
            ignored_frames=self._pipeline.ignored,
            webhook_waiting=0 if self._webhook is None else self._webhook.waiting,
            webhook_failed=0 if self._webhook is None else self._webhook.failed,
            set_aside=self._writer.set_aside,
            trouble=self._pipeline.trouble or self._writer.trouble or self._want_of_room() or None,
        )

    def _want_of_room(self) -> str:
        free, wanted = self._sizes.get("free"), self._settings.min_free_bytes
        if free is None or free >= wanted:
            return ""
        return f"the disk has {free / 1e9:.2f} GB left, of which {wanted / 1e9:.2f} stay free (--min-free-gb)"

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            # Each by itself: one that fails keeps its last figure.
            for name, look in (
                ("journal", lambda: sum(journal_bytes(self._settings.journal).values())),
                ("free", lambda: shutil.disk_usage(self._settings.folder).free),
                ("database", self._store.size_bytes),
            ):
                try:
                    self._sizes[name] = look()
                except Exception as error:
                    log.debug("size of %s: %s", name, error)
            self._receivers = self._look_at_receivers()
            if self._closing.wait(_EVERY_SECONDS):
                return

    def _look_at_receivers(self) -> tuple[ReceiverState, ...]:
        server = status.read(self._settings.folder)
        pids, restarts = ({}, {}) if server is None else (server.pids, server.restarts)
        found = []
        for number in range(self._settings.receivers):
            name = f"receiver {number}"
            counted = self._counted(number)
            found.append(
                ReceiverState(
                    number=number,
                    pid=pids.get(name, 0),
                    restarts=restarts.get(name, 0),
                    **{key: int(counted.get(key, 0)) for key in ("connections", "frames", "bytes", "refused", "later")},
                )
            )
        return tuple(found)

    def _counted(self, number: int) -> dict[str, Any]:
        try:
            content = (counters.folder(self._settings.folder) / f"{number}.json").read_text(encoding="utf-8")
            counted = json.loads(content)
        except (OSError, ValueError):
            return {}
        return counted if isinstance(counted, dict) else {}
