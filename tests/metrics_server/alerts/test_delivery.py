"""Log, webhook and requests for checkpoints."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from steptron_metrics.alerts.book import Change
from steptron_metrics.alerts.delivery import Delivery
from steptron_metrics.alerts.requests import Requests
from steptron_metrics.alerts.webhook import Webhook
from steptron_metrics.errors import MetricsError
from steptron_metrics.receiver.requests import Requests as ReceiversRequests
from steptron_metrics.results import Alert

ALERT = Alert(
    number=3,
    run="r",
    rule="blow_up_output",
    severity="critical",
    subject="layer 4 expert 17",
    layer=4,
    item=17,
    since_iteration=100,
    since_ns=10**18,
    last_iteration=102,
    ended_iteration=None,
    value=float("inf"),
    worst=float("inf"),
    threshold=20.0,
    saw="It is 100% too large.",
    cause="A cause.",
    remedy="A remedy.",
    wants_checkpoint=True,
)


def change(what: Literal["began", "changed", "ended"], **fields: Any) -> Change:
    if what == "ended":
        fields = {"ended_iteration": 130} | fields
    return Change(replace(ALERT, **fields), what)


class Hook:
    """A server that answers with the given statuses one after the other, and 200 from then on."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.attempts = 0
        self.release = threading.Event()
        self.release.set()
        hook, left = self, list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.attempts += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.release.wait(10)
                status = left.pop(0) if left else 200
                if status == 200:
                    hook.bodies.append(json.loads(body))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def hook_of(*statuses: int, pause: float = 0.02) -> Iterator[tuple[Hook, Webhook]]:
    hook = Hook(*statuses)
    webhook = Webhook(hook.url, timeout_seconds=5, first_pause_seconds=pause)
    try:
        yield hook, webhook
    finally:
        hook.release.set()
        webhook.close()
        hook.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_log_file_and_webhook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), hook_of() as (hook, webhook):
        delivery = Delivery(tmp_path / "alerts.jsonl", webhook)
        delivery.deliver([change("began"), change("changed"), change("ended")])
        until(lambda: len(hook.bodies) == 2)
        delivery.close()
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert lines == hook.bodies and [line["event"] for line in lines] == ["began", "ended"]
    assert lines[0]["alert"]["value"] == "inf" and lines[0]["alert"]["layer"] == 4
    assert lines[0]["text"] == (
        "[critical] r: blow_up_output, layer 4 expert 17, since iteration 100. It is 100% too large. A cause. A remedy."
    )
    assert "alert: run r, blow_up_output, layer 4 expert 17, since iteration 100: It is 100% too large." in caplog.text
    assert "alert ended: run r, blow_up_output, layer 4 expert 17, iterations 100 to 130" in caplog.text


def test_a_webhook_that_fails_twice_gets_everything_in_order(caplog: pytest.LogCaptureFixture) -> None:
    with hook_of(503, 500) as (hook, webhook):
        for number in range(3):
            webhook.post({"number": number})
        until(lambda: len(hook.bodies) == 3)
        assert [body["number"] for body in hook.bodies] == [0, 1, 2] and hook.attempts == 5
        until(lambda: webhook.waiting == 0)
        assert webhook.failed == 0
    assert "status 503, attempt 1; again in 0.02 s" in caplog.text and "attempt 2; again in 0.04 s" in caplog.text
    assert "secret" not in caplog.text


def test_what_cannot_be_delivered_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with hook_of(*[500] * 6, 404, 302) as (hook, webhook):
        for number in range(4):
            webhook.post({"number": number})
        until(lambda: len(hook.bodies) == 1)
        assert hook.bodies == [{"number": 3}] and hook.attempts == 9 and webhook.failed == 3
    for part in ("status 500, attempt 6", "status 404, attempt 1", "status 302, attempt 1"):
        assert f"an alert is given up: {part}" in caplog.text


def test_nobody_waits_for_a_webhook_and_it_holds_no_more_than_it_may() -> None:
    with hook_of() as (hook, webhook):
        hook.release.clear()
        started = time.monotonic()
        for number in range(300):
            webhook.post({"number": number})
        assert time.monotonic() - started < 1
        # One is being sent, or none yet.
        assert 300 - 257 <= webhook.failed <= 300 - 256 and webhook.waiting + webhook.failed == 300
        hook.release.set()
        until(lambda: webhook.waiting == 0)


def test_a_webhook_where_nobody_listens_and_the_end(caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook()
    hook.close()
    webhook = Webhook(hook.url, first_pause_seconds=30)
    webhook.post({})
    until(lambda: "again in 30 s" in caplog.text)
    started = time.monotonic()
    webhook.close()
    assert time.monotonic() - started < 3 and webhook.failed == 1


@pytest.mark.parametrize("url", ["", "example.org", "file:///etc/passwd", "http://", "http://x:99999/", "http://[x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(MetricsError, match="webhook: expected a URL such as"):
        Webhook(url)


def asked(folder: Path) -> list[tuple[int, str]]:
    """As the receivers understand it."""
    return [(one.number, one.reason) for one in ReceiversRequests(folder).of("r")]


def test_one_request_for_all_alerts_until_the_run_has_a_checkpoint(tmp_path: Path) -> None:
    requests = Requests(tmp_path / "requests")
    requests.update("r", [change("began", wants_checkpoint=False)])
    assert asked(tmp_path / "requests") == [] and requests.pending("r") is None
    requests.update("r", [change("began"), change("began", number=4, subject="layer 5 expert 1")])
    expected = [(3, "blow_up_output, layer 4 expert 17: It is 100% too large.")]
    assert asked(tmp_path / "requests") == expected
    # After a restart, and the same once more.
    requests = Requests(tmp_path / "requests")
    requests.update("r", [change("began"), change("changed")])
    requests.update("r", [], ["stage"])
    assert asked(tmp_path / "requests") == expected
    requests.update("r", [change("changed")], ["checkpoint"])
    assert asked(tmp_path / "requests") == []
    requests.update("r", [change("began", number=9)], ["checkpoint"])  # that checkpoint was before
    assert [number for number, _ in asked(tmp_path / "requests")] == [9]


def test_a_request_goes_with_the_last_alert_that_wanted_it(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    requests.update("r", [change("began"), change("began", number=4)])
    requests.update("r", [change("ended")])
    assert [number for number, _ in asked(tmp_path)] == [3]
    requests.update("r", [change("ended", number=4)])
    assert asked(tmp_path) == [] and not list(tmp_path.iterdir())
    requests.update("r", [change("began")])
    requests.forget("r")
    assert requests.pending("r") is None


def test_a_damaged_file_of_requests_is_no_request(tmp_path: Path) -> None:
    for content in ("", "{", '{"requests": 3}', '{"requests": [3]}', '{"requests": [{"number": 1}]}'):
        (tmp_path / "r.json").write_text(content)
        requests = Requests(tmp_path)
        assert requests.pending("r") is None
        requests.update("r", [change("began")])
        assert [number for number, _ in asked(tmp_path)] == [3]
