"""A receiver process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal

import grpc
import grpc.aio

from steptron_metrics.access import Access, load_tokens
from steptron_metrics.errors import MetricsError
from steptron_metrics.journal.writer import SEGMENT_BYTES, Writer
from steptron_metrics.receiver import counters as status
from steptron_metrics.receiver.committer import Committer
from steptron_metrics.receiver.counters import Counters
from steptron_metrics.receiver.requests import Requests
from steptron_metrics.receiver.room import Room
from steptron_metrics.receiver.service import Service
from steptron_metrics.settings import Settings

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_MESSAGE_SLACK = 1 << 20
"""Messages that are too large by less than that are answered with a reason; with larger ones gRPC ends the call."""


def run(settings: Settings, number: int, port: int) -> None:
    """Main of a receiver process: serves until SIGTERM or SIGINT, or until its parent process is gone.

    What has arrived by then is committed and answered.

    Args:
        settings: of the server.
        number: of this receiver, from 0; two that run at once have different ones.
        port: to listen at, beside the other receivers; 0 takes a free one, which is in the receiver's file then (see
            ``counters``).

    Raises:
        MetricsError: it cannot listen there, or a file of the settings cannot be read.
    """
    _allow_open_files(settings.max_connections)
    access = load_tokens(settings.tokens)
    credentials = _credentials(settings)
    for folder in (settings.journal, status.folder(settings.folder)):
        folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_serve(settings, number, port, access, credentials))


async def _serve(
    settings: Settings, number: int, port: int, access: Access, credentials: grpc.ServerCredentials | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    counters = Counters()
    room = Room(settings.journal, settings.journal_bytes, settings.min_free_bytes)
    # Small journals have small segments: what can be pruned is whole segments.
    segment_bytes = min(SEGMENT_BYTES, max(settings.journal_bytes // 32, 1 << 16))
    committer = Committer(Writer(settings.journal, number, segment_bytes), room, counters)
    elsewhere = [status.connections_of_others(settings.folder, number)]
    service = Service(settings, access, committer, Requests(settings.requests), counters, others=lambda: elsewhere[0])
    server = grpc.aio.server(handlers=[service.handler()], options=_options(settings))
    port = _listen(server, f"{settings.host}:{port}", credentials)
    await server.start()
    gc.freeze()  # modules and the like are not looked through again
    log.info("receiver %d listens at %s:%d", number, settings.host, port)
    parent = os.getppid()

    def look() -> None:
        room.look()
        elsewhere[0] = status.connections_of_others(settings.folder, number)
        status.write(settings.folder, number, port, committer.waiting_bytes, counters)

    trouble = ""
    while not stop.is_set():
        try:
            await committer.tidy()
            await asyncio.to_thread(look)
            trouble = ""
        except OSError as error:
            if str(error) != trouble:  # once, not once a second
                trouble = str(error)
                log.error("housekeeping: %s", trouble)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stop.wait()
        if os.getppid() != parent:
            log.error("the process that started receiver %d is gone: it ends", number)
            break
    await service.stop(_STOP_SECONDS)
    await server.stop(grace=1.0)
    await committer.close()
    try:
        status.write(settings.folder, number, port, 0, counters)
    except OSError as error:
        log.error("housekeeping: %s", error)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_message_bytes + _MESSAGE_SLACK),
        ("grpc.max_send_message_length", 1 << 20),
        # Nothing is unpacked that is small on the wire and large in memory.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 60_000),
        # Clients that are gone without a word are noticed within 80 s, those that ping every 5 s cut off.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise MetricsError(f"cannot listen at {address}: {error}") from error


def _credentials(settings: Settings) -> grpc.ServerCredentials | None:
    if settings.certificate is None and settings.key is None:
        return None
    contents = []
    for name, path in (("key", settings.key), ("certificate", settings.certificate)):
        if path is None:
            raise MetricsError(f"{name}: TLS needs a certificate and its key, this one is missing")
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise MetricsError(f"{name} {path}: {error.strerror}") from error
    return grpc.ssl_server_credentials([(contents[0], contents[1])])


def _allow_open_files(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 1024
    if soft < wanted:
        reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        if reachable < wanted:
            log.warning("%d files may be open, %d connections would need %d", reachable, connections, wanted)
