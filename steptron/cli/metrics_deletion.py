"""Asks a metrics server to delete a run."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

from steptron.errors import UserError

_TIMEOUT_SECONDS = 180.0


def delete_run(address: str, run: str, *, force: bool, token: str | None, certificate: Path | None) -> None:
    """Deletes everything that a running server has of a run.

    Args:
        address: of its page: host:port, or a URL.
        force: also while the run is live.
        token: bearer token, where the server asks for one.
        certificate: PEM file of the root certificate, where it is none that this machine knows.

    Raises:
        UserError: the server does not answer, or refuses; the message says why.
    """
    url = address if "://" in address else f"{'http' if certificate is None else 'https'}://{address}"
    url = f"{url.rstrip('/')}/api/v1/runs/{quote(run, safe='')}?force={str(force).lower()}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers, method="DELETE")
    context = None if certificate is None else ssl.create_default_context(cafile=certificate)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=context):
            return
    except urllib.error.HTTPError as error:
        raise UserError(_reason(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            if error.code == 409:
                return "the run is live: --force deletes it all the same, and it comes back with its next frame"
            return str(json.loads(error.read())["reason"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answers with status {error.code}"
