"""What can be found wrong before a server starts."""

from __future__ import annotations

import os
import shutil
import ssl
import tempfile
from collections.abc import Callable

from steptron_metrics.access import load_tokens
from steptron_metrics.alerts.loading import load_rules
from steptron_metrics.alerts.webhook import check_url
from steptron_metrics.errors import MetricsError
from steptron_metrics.server.ports import is_local
from steptron_metrics.settings import Settings


def check(settings: Settings, *, allow_unauthenticated: bool = False) -> None:
    """Looks at settings, folder and files; database and ports are looked at by those who use them.

    Args:
        allow_unauthenticated: others than this machine may connect though no tokens are asked for.

    Raises:
        MetricsError: listing all that is wrong.
    """
    problems: list[str] = []

    def attempt(look: Callable[[], object]) -> None:
        try:
            look()
        except MetricsError as error:
            problems.append(str(error))

    attempt(lambda: _numbers(settings))
    attempt(lambda: _folder(settings))
    attempt(lambda: _reach(settings, allow_unauthenticated))
    attempt(lambda: _certificate(settings))
    attempt(lambda: load_tokens(settings.tokens))
    attempt(lambda: load_rules(settings.rules))
    if settings.webhook is not None:
        webhook = settings.webhook
        attempt(lambda: check_url(webhook))
    if len(problems) == 1:
        raise MetricsError(problems[0])
    if problems:
        raise MetricsError("\n".join(["the server cannot start:", *(f"  - {problem}" for problem in problems)]))


def _numbers(settings: Settings) -> None:
    least = {
        **dict.fromkeys(
            (
                "receivers",
                "reducers",
                "max_frames",
                "max_world_size",
                "max_runs",
                "max_runs_per_token",
                "max_connections",
            ),
            1,
        ),
        **dict.fromkeys(("port", "http_port", "raw_iterations", "min_free_bytes"), 0),
        **dict.fromkeys(("partial_after_seconds", "stale_after_seconds"), 0.1),
        "max_frame_bytes": 1 << 10,
        "max_message_bytes": settings.max_frame_bytes,
        # Small segments have to fit in it, and one message.
        "journal_bytes": max(16 << 20, 2 * settings.max_message_bytes),
    }
    wrong = [
        f"{name} {getattr(settings, name):,}: expected at least {value:,}"
        for name, value in least.items()
        if not getattr(settings, name) >= value
    ]
    wrong += [
        f"{name} {getattr(settings, name):,}: expected at most {most:,}"
        for name, most in (("port", 65_535), ("http_port", 65_535), ("receivers", 64), ("reducers", 256))
        if getattr(settings, name) > most
    ]
    if settings.port == settings.http_port != 0:
        wrong.append(f"port and http_port are both {settings.port}: they have to differ")
    if wrong:
        raise MetricsError("; ".join(wrong))


def _folder(settings: Settings) -> None:
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.folder) as file:
            file.write(b"0")
            file.flush()
        free = shutil.disk_usage(settings.folder).free
    except OSError as error:
        raise MetricsError(f"folder {settings.folder}: cannot be written to: {error.strerror}") from error
    if free < settings.min_free_bytes:
        wanted = settings.min_free_bytes / 1e9
        raise MetricsError(
            f"folder {settings.folder}: {free / 1e9:.1f} GB are free on its disk, and {wanted:.1f} are to be left: "
            "make room, or ask for less"
        )


def _reach(settings: Settings, allow_unauthenticated: bool) -> None:
    if settings.tokens is None and not allow_unauthenticated and not is_local(settings.host):
        raise MetricsError(
            f"host {settings.host}: others than this machine could write and read everything there: give a file of "
            "tokens (--tokens), or say that this is meant (--allow-unauthenticated)"
        )


def _certificate(settings: Settings) -> None:
    if (settings.certificate is None) != (settings.key is None):
        missing = "certificate" if settings.certificate is None else "key"
        raise MetricsError(f"TLS needs a certificate and its key: the {missing} is missing")
    if settings.certificate is None or settings.key is None:
        return
    for name, path in (("certificate", settings.certificate), ("key", settings.key)):
        if not os.access(path, os.R_OK) or path.is_dir():
            raise MetricsError(f"{name} {path}: there is no such file, or it cannot be read")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MetricsError(
            f"certificate {settings.certificate}, key {settings.key}: not a PEM certificate with its key ({reason})"
        ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")
