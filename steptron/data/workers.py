"""Spreading the encoding of batches over processes, results in input order."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar, cast

from steptron.data.errors import DataError
from steptron.data.readers import BadDocument, RawDocument

Batch = list[RawDocument | BadDocument]
Encoded = TypeVar("Encoded")
Encoded_co = TypeVar("Encoded_co", covariant=True)


class BatchEncoder(Protocol[Encoded_co]):
    """What a worker does with a batch: a pure function of the batch, which can be pickled."""

    def encode(self, items: Sequence[RawDocument | BadDocument]) -> Encoded_co: ...


# A worker that needs longer than this for a batch is taken for hung. Tokenizers do megabytes per
# second; 20 kB/s is far below anything seen.
_SLOWEST_BYTES_PER_SECOND = 20_000
_SECONDS_BEFORE_DOUBT = 600
# Batches that wait per worker: enough to keep it busy, few enough to bound the memory.
_BATCHES_PER_WORKER = 3

_encoder: BatchEncoder[object] | None = None


def encode_in_order(
    batches: Iterable[Batch], encoder: BatchEncoder[Encoded], num_workers: int
) -> Generator[Encoded, None, None]:
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
        num_workers, multiprocessing.get_context("spawn"), _start_worker, (pickle.dumps(encoder),)
    )
    waiting: deque[tuple[Future[object], int]] = deque()
    try:
        for batch in batches:
            if len(waiting) == num_workers * _BATCHES_PER_WORKER:
                yield cast(Encoded, _result(*waiting.popleft()))
            waiting.append((executor.submit(_encode, batch), _num_bytes(batch)))
        while waiting:
            yield cast(Encoded, _result(*waiting.popleft()))
    except (TimeoutError, BrokenProcessPool) as error:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        reason = "did not answer in time" if isinstance(error, TimeoutError) else "died (out of memory?)"
        raise DataError(f"a tokenizing worker process {reason}; try fewer --workers") from error
    finally:
        executor.shutdown(cancel_futures=True)


def _result(future: Future[object], num_bytes: int) -> object:
    return future.result(timeout=_SECONDS_BEFORE_DOUBT + num_bytes / _SLOWEST_BYTES_PER_SECOND)


def _num_bytes(batch: Sequence[RawDocument | BadDocument]) -> int:
    return sum(len(item.payload) for item in batch if isinstance(item, RawDocument))


def _start_worker(pickled_encoder: bytes) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = pickle.loads(pickled_encoder)  # last: tokenizers must not start threads of their own


def _exit_with_parent() -> None:
    """Ends this worker when its parent was killed; otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode(batch: Batch) -> object:
    assert _encoder is not None
    return _encoder.encode(batch)
