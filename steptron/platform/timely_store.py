"""A store that answers in time, or is given up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_SLICES = 10


class NoAnswerError(RuntimeError):
    """The store's process gives no answer. A RuntimeError, like what torch raises for a store that is gone."""


class TimelyStore:
    """A store whose every call, connecting included, ends in time: with an answer or with :class:`NoAnswerError`.

    A TCPStore whose process is stopped, or whose machine is gone, keeps its callers for ever: its timeout is one for
    keys that are missing and is kept by that very process. Here a thread of its own makes the calls, one after the
    other, and is left behind if one does not return. From then on every call fails at once.

    Args:
        connect: opens the store, at the first call, for this class alone.
        patience: seconds to wait for an answer. Time in which this process itself was stopped hardly counts.
    """

    def __init__(self, connect: Callable[[], dist.Store], patience: float) -> None:
        self.silence: NoAnswerError | None = None
        """Why the store was given up, once it was."""
        self._patience = patience
        self._calls: SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, args=(connect,), name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Sets a key. Returns before the store's process has read it."""
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Value of a key that is there."""
        return self._ask(lambda store: store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of some keys are there."""
        return self._ask(lambda store: store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it holds what is expected (empty: or is not there); what it holds then."""
        return self._ask(lambda store: store.compare_set(key, expected, desired))

    def close(self) -> None:
        """Ends the thread and the connection, if no call keeps them."""
        self._calls.put(None)

    def _ask(self, call: Callable[[dist.Store], _T]) -> _T:
        answer: Future[_T] = Future()
        self._calls.put((call, answer))
        # In slices: after this process was stopped only one of them has passed, and the answer is on its way.
        for _ in range(_SLICES):
            if self.silence is not None:
                raise self.silence
            with contextlib.suppress(TimeoutError):
                return answer.result(self._patience / _SLICES)
        self.silence = NoAnswerError(f"no answer for {self._patience:g} s")
        raise self.silence

    def _serve(self, connect: Callable[[], dist.Store]) -> None:
        store = None
        while (item := self._calls.get()) is not None:
            call, answer = item
            try:
                if store is None:
                    store = connect()
                answer.set_result(call(store))
            except Exception as error:
                answer.set_exception(error)
