"""The process that makes of the journal what is stored, judged and shown."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import steptron_metrics.http.server as http_server
from steptron_metrics.access import load_tokens
from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.engine import Alerts
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.alerts.webhook import Webhook
from steptron_metrics.http.app import build_app
from steptron_metrics.reducer.workers import Reducers
from steptron_metrics.server import remembered
from steptron_metrics.server.overview import Overview
from steptron_metrics.server.pipeline import Pipeline
from steptron_metrics.server.space import Space
from steptron_metrics.server.writer import Writer
from steptron_metrics.settings import Settings
from steptron_metrics.storage import open_store

log = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Main of the processor: until SIGTERM.

    Raises:
        MetricsError: database, rules, tokens or port cannot be used.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    rules, access = load_rules(settings.rules), load_tokens(settings.tokens)
    space = Space(settings.folder, settings.min_free_bytes, settings.database is None)
    with contextlib.ExitStack() as stack:
        space.use_reserve()  # where the disk is full, so that the database can be opened
        store = open_store(settings)
        stack.callback(store.close)
        remembered.write(settings.folder, settings.database)
        webhook = None if settings.webhook is None else Webhook(settings.webhook)
        delivery = Delivery(settings.folder / "alerts.jsonl", webhook)
        stack.callback(delivery.close)
        alerts = Alerts(store, rules, stale_after_seconds=settings.stale_after_seconds)
        writer = Writer(store, alerts, delivery, Requests(settings.requests), settings.folder, space)
        stack.callback(writer.close)
        reducers = Reducers(settings.reducers, settings.limits)
        stack.callback(reducers.close)
        pipeline = Pipeline(settings, store, reducers, writer, space)
        overview = Overview(settings, store, pipeline, writer, reducers, webhook)
        stack.callback(overview.close)
        app = build_app(settings, store, access, overview.state, pipeline.delete)
        server = http_server.start(settings, app)
        stack.callback(server.stop)
        while not stop.is_set():
            pipeline.turn()
            if not (server.running and writer.running):
                raise RuntimeError(f"the thread of the {'writer' if server.running else 'API'} has ended")
    log.info("the processor has ended")
