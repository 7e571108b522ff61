"""Spreading the encoding of batches over processes, results in input order."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from steptron.data.encoding import EncodedBatch, Encoder
from steptron.data.errors import DataError
from steptron.data.readers import BadDocument, Fields, RawDocument
from steptron.data.tokenizer import Tokenizer

Batch = list[RawDocument | BadDocument]

# A worker that needs longer than this for a batch is taken for hung. Tokenizers do megabytes per
# second; 20 kB/s is far below anything seen.
_SLOWEST_BYTES_PER_SECOND = 20_000
_SECONDS_BEFORE_DOUBT = 600
# Batches that wait per worker: enough to keep it busy, few enough to bound the memory.
_BATCHES_PER_WORKER = 3

_encoder: Encoder | None = None


def encode_in_order(
    batches: Iterable[Batch], encoder: Encoder, num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encodes batches; the results do not depend on ``num_workers``.

    Args:
        batches: read lazily, a few ahead of the workers.
        encoder: what to do with each.
        num_workers: processes; with 1 the work is done in this process.

    Raises:
        DataError: a worker died or hung.
    """
    if num_workers == 1:
        for batch in batches:
            yield encoder.encode(batch)
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _start_worker, _encoder_arguments(encoder)
    )
    waiting: deque[tuple[Future[EncodedBatch], int]] = deque()
    try:
        for batch in batches:
            if len(waiting) == num_workers * _BATCHES_PER_WORKER:
                yield _result(*waiting.popleft())
            waiting.append((executor.submit(_encode, batch), _num_bytes(batch)))
        while waiting:
            yield _result(*waiting.popleft())
    except (TimeoutError, BrokenProcessPool) as error:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        reason = "did not answer in time" if isinstance(error, TimeoutError) else "died (out of memory?)"
        raise DataError(f"a tokenizing worker process {reason}; try fewer --workers") from error
    finally:
        executor.shutdown(cancel_futures=True)


def _result(future: Future[EncodedBatch], num_bytes: int) -> EncodedBatch:
    return future.result(timeout=_SECONDS_BEFORE_DOUBT + num_bytes / _SLOWEST_BYTES_PER_SECOND)


def _num_bytes(batch: Sequence[RawDocument | BadDocument]) -> int:
    return sum(len(item.payload) for item in batch if isinstance(item, RawDocument))


def _encoder_arguments(encoder: Encoder) -> tuple[bytes, str, Fields, int, float, str]:
    tokenizer = encoder.tokenizer
    return (
        tokenizer.file_bytes,
        tokenizer.eod_token,
        encoder.fields,
        encoder.seed,
        encoder.validation_fraction,
        encoder.dtype.str,
    )


def _start_worker(
    tokenizer_bytes: bytes, eod_token: str, fields: Fields, seed: int, validation_fraction: float, dtype: str
) -> None:
    global _encoder
    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = Encoder(Tokenizer(tokenizer_bytes, eod_token), fields, seed, validation_fraction, np.dtype(dtype))


def _exit_with_parent() -> None:
    """Ends this worker when its parent was killed; otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode(batch: Batch) -> EncodedBatch:
    assert _encoder is not None
    return _encoder.encode(batch)
