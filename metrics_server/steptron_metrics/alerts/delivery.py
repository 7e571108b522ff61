"""Brings what happens to alerts to people: the server's log, a file of JSON lines, and a webhook."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.webhook import Webhook

log = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
_FILE_BYTES = 16 << 20


class Delivery:
    """Delivers beginnings and ends; what changes between them is for the page.

    Args:
        file: of JSON lines, beside which four older ones of 16 MiB are kept.
        webhook: also gets them.
    """

    def __init__(self, file: Path, webhook: Webhook | None = None) -> None:
        self._file = RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=4, encoding="utf-8", delay=True)
        self._webhook = webhook

    def deliver(self, changes: Iterable[Change]) -> None:
        """Never raises and never waits for the network."""
        for change in changes:
            if change.what == "changed":
                continue
            alert = change.alert
            if change.what == "began":
                log.log(
                    _LEVELS[alert.severity],
                    "alert: run %s, %s, %s, since iteration %d: %s %s %s",
                    *(
                        alert.run,
                        alert.rule,
                        alert.subject,
                        alert.since_iteration,
                        alert.saw,
                        alert.cause,
                        alert.remedy,
                    ),
                )
            else:
                log.info(
                    "alert ended: run %s, %s, %s, iterations %d to %s",
                    *(alert.run, alert.rule, alert.subject, alert.since_iteration, alert.ended_iteration),
                )
            line = json.dumps(as_json(change), allow_nan=False)
            # The handler takes records; a file that cannot be written is reported on stderr and does no more harm.
            self._file.handle(logging.makeLogRecord({"msg": line}))
            if self._webhook is not None:
                self._webhook.post(as_json(change))

    def close(self) -> None:
        self._file.close()
        if self._webhook is not None:
            self._webhook.close()


def as_json(change: Change) -> dict[str, Any]:
    """What happened, "began" or "ended", the alert's fields, and all in one text; infinity and NaN are texts."""
    alert = change.alert
    fields = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(alert).items()
    }
    title = f"[{alert.severity}] {alert.run}: {alert.rule}, {alert.subject}"
    if change.what == "ended":
        words = f"{title}: ended at iteration {alert.ended_iteration}"
    else:
        words = f"{title}, since iteration {alert.since_iteration}. {alert.saw} {alert.cause} {alert.remedy}"
    return {"event": change.what, "text": words, "alert": fields}
