"""Reads from a running server over its HTTP interface."""

from __future__ import annotations

import http.client
import json
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import numpy as np
import pyarrow as pa

from steptron_metrics.catalogue import Statistic
from steptron_metrics.errors import MetricsError
from steptron_metrics.results import Alert, MetricInfo, Points, Run

TIMEOUT_SECONDS = 180.0
_ROWS = 5000
_ATTEMPTS = 12
"""At what only a few get at once."""
_MAGIC = b"STP1"


class _Busy(MetricsError):
    """The server answers, and not this, at the moment.

    Attributes:
        seconds: after which to ask again.
    """

    def __init__(self, reason: str, retry_after: str) -> None:
        super().__init__(reason)
        self.seconds = min(float(retry_after), 10.0) if retry_after.isdigit() else 1.0


class RemoteSource:
    """A running server.

    Args:
        url: of its page.
        token: bearer token, where it asks for one.
        certificate: root certificate (PEM), where it has none that this machine trusts.
        journal: folder of its raw values, where it is on this machine.
        timeout_seconds: how long the server may be silent.

    Raises:
        MetricsError: the address or the certificate cannot be used.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        certificate: Path | None = None,
        journal: Path | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise MetricsError(f"{url}: expected the address of a metrics server's page, such as 127.0.0.1:7078")
        self.name = f"{parts.scheme}://{parts.netloc}"
        self.journal = journal
        self._token = token
        self._timeout_seconds = timeout_seconds
        context = None
        if certificate is not None:
            try:
                context = ssl.create_default_context(cafile=certificate)
            except (OSError, ssl.SSLError) as error:
                raise MetricsError(f"{certificate}: no PEM file of certificates ({error})") from error
        # Proxies are for the world outside, as in the client.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def runs(self) -> list[Run]:
        return [_run(one) for one in self._json("runs")]

    def metrics(self, run: str) -> list[MetricInfo]:
        found = self._json(f"{_path(run)}/metrics")
        return [MetricInfo(one["name"], tuple(one["layers"]), one["items"]) for one in found]

    def figures(self, run: str) -> list[str]:
        names: list[str] = self._json(f"{_path(run)}/figures")
        return names

    def iterations(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        schema = pa.schema(
            [
                *(("iteration", pa.int64()), ("session_ns", pa.int64()), ("world_size", pa.int32())),
                *(("num_ranks", pa.int32()), ("missing", pa.list_(pa.int32())), ("ended_ns", pa.int64())),
                *(("seconds", pa.float64()), ("consumed_tokens", pa.int64()), ("dropped", pa.int64())),
            ]
        )
        while first <= last:
            rows = self._json(f"{_path(run)}/iterations", {"first": first, "last": last, "limit": _ROWS})
            if not rows:
                return
            for row in rows:
                row["seconds"] = _number(row["seconds"])
            yield pa.Table.from_pylist(rows, schema)
            first = rows[-1]["iteration"] + 1

    def events(self, run: str, first: int, last: int) -> Iterator[pa.Table]:
        schema = pa.schema([("iteration", pa.int64()), ("kind", pa.string()), ("detail", pa.string())])
        while first <= last:
            rows = self._json(f"{_path(run)}/events", {"first": first, "last": last, "limit": _ROWS})
            if not rows:
                return
            end = rows[-1]["iteration"]
            if len(rows) == _ROWS and rows[0]["iteration"] < end:
                # The last iteration's may not all be among them: it begins the next part.
                rows = [row for row in rows if row["iteration"] < end]
                end -= 1
            yield pa.Table.from_pylist(rows, schema)
            first = end + 1

    def points(
        self, run: str, metric: str, layer: int, statistic: Statistic, first: int, last: int, max_points: int
    ) -> Points:
        return self._points(
            f"{_path(run)}/points",
            {"metric": metric, "layer": layer, "statistic": statistic, "first": first, "last": last},
            max_points,
        )

    def derived(self, run: str, name: str, first: int, last: int, max_points: int) -> Points:
        return self._points(f"{_path(run)}/derived", {"figure": name, "first": first, "last": last}, max_points)

    def table(self, run: str, metrics: Sequence[str] | None, first: int, last: int) -> Iterator[pa.RecordBatch]:
        parameters = {"first": first, "last": last, "metric": list(metrics or ())}
        response = self._open_stream(f"{_path(run)}/table", parameters)

        def batches(part: http.client.HTTPResponse) -> Iterator[pa.RecordBatch]:
            while True:
                following = part.headers.get("link", "")
                yield from self._stream(part, f"the table of run {run}")
                # The server hands out a bounded number of rows at once.
                if 'rel="next"' not in following:
                    return
                query = parse_qs(urlsplit(following.partition("<")[2].partition(">")[0]).query)
                part = self._open_stream(f"{_path(run)}/table", {**parameters, "first": int(query["first"][0])})

        return batches(response)

    def raw(self, run: str, iteration: int, metric: str, layer: int) -> Iterator[pa.RecordBatch]:
        parameters = {"iteration": iteration, "metric": metric, "layer": layer}
        return self._stream(self._open_stream(f"{_path(run)}/raw", parameters), f"raw values of run {run}")

    def alerts(self, run: str | None) -> list[Alert]:
        found = self._json("alerts", {"limit": _ROWS} | ({} if run is None else {"run": run}))
        for one in found:
            for name in ("value", "worst", "threshold"):
                one[name] = _number(one[name])
        return [Alert(**one) for one in found]

    def close(self) -> None:
        """Nothing stays open between requests."""

    # ---------------------------------------------------------------------------------------------------------------

    def _points(self, path: str, parameters: Mapping[str, object], max_points: int) -> Points:
        with self._open(path, {**parameters, "max_points": max_points, "form": "binary"}) as response:
            content = self._read(response)
        if content[:4] != _MAGIC:
            raise MetricsError(f"{self.name} answers in a form that this Steptron does not know")
        length = int.from_bytes(content[4:8], "little")
        (block,) = json.loads(content[8 : 8 + length])["blocks"]

        def array(name: str) -> np.ndarray:
            place = block[name]
            count = math.prod(place["shape"])
            flat = np.frombuffer(content, np.dtype(place["type"]), count, 8 + length + place["offset"])
            return flat.reshape(place["shape"])

        layers = np.array(block["columns"] if "figure" in block else [], np.int32)
        first, last = (array(name).astype(np.int64) for name in ("first", "last"))
        return Points(first, last, array("values"), array("low"), array("high"), layers)

    def _json(self, path: str, parameters: Mapping[str, object] | None = None) -> Any:
        with self._open(path, parameters or {}) as response:
            return json.loads(self._read(response))

    def _open_stream(self, path: str, parameters: Mapping[str, object]) -> http.client.HTTPResponse:
        """Opens what a server hands out to a few at once; waits for a place."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._open(path, parameters)
            except _Busy as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(error.seconds)
        raise AssertionError("unreachable")

    def _stream(self, response: http.client.HTTPResponse, what: str) -> Iterator[pa.RecordBatch]:
        with response:
            try:
                with pa.ipc.open_stream(response) as stream:
                    yield from stream
            except (pa.ArrowInvalid, OSError, http.client.HTTPException) as error:
                raise MetricsError(f"{self.name}: {what} broke off: {error}") from error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise MetricsError(f"{self.name}: the answer broke off: {error}") from error

    def delete(self, run: str, force: bool = False) -> None:
        """Deletes everything that the server has of a run; ``force``: also while it is live.

        Raises:
            KeyError: there is no such run.
            MetricsError: the server does not answer, or refuses.
        """
        with self._open(_path(run), {"force": str(force).lower()}, method="DELETE"):
            return

    def _open(self, path: str, parameters: Mapping[str, object], method: str = "GET") -> http.client.HTTPResponse:
        url = f"{self.name}/api/v1/{path}"
        if parameters:
            url += "?" + urlencode(parameters, doseq=True)
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_seconds)
        except urllib.error.HTTPError as error:
            reason = _reason(error)
            if error.code == 404:
                raise KeyError(reason) from None
            if error.code == 503:
                raise _Busy(f"{self.name}: {reason}", error.headers.get("retry-after", "")) from None
            raise MetricsError(f"{self.name} refuses: {reason}") from None
        except http.client.BadStatusLine as error:
            # Its text would be the bytes of whatever protocol that is.
            raise MetricsError(
                f"{self.name} does not speak HTTP: give the port of the page (serve --http-port), not that of training"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            raise MetricsError(f"the metrics server at {self.name} does not answer: {cause}") from error
        return response


def _path(run: str) -> str:
    return f"runs/{quote(run, safe='')}"


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["reason"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return f"status {error.code}"


def _run(answer: Mapping[str, Any]) -> Run:
    return Run(**{name: value for name, value in answer.items() if name != "live"})


def _number(value: float | str | None) -> float:
    """A number as the interface writes it in JSON."""
    return math.nan if value is None else float(value)
