"""Signs of life of a run's processes: who died, who hangs, and where.

To the others, a process that died shows as a broken connection, one that hangs as a wait without an end. Here a thread
of each process gives signs of life through the store at which the processes met, looks after the next rank's, and ends
its process with a message that names the cause when the main thread cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from steptron.errors import PeerError, UserError
from steptron.platform.stacks import STACKS, location, write_stacks
from steptron.platform.timely_store import NoAnswerError, TimelyStore

_FAULT, _HANG, _LOOKING = "fault", "hang", "looking"
_NAMED = 8
_STORE_SECONDS = 10.0


class Watch:
    """A context in which this process gives signs of life, and ends when another one no longer does.

    Leaving it with an exception from a collective raises :class:`PeerError` instead, if another process is the cause.

    Args:
        store: where the processes met.
        rank, size: of this process, and the number of processes.
        dead_after: a process counts as dead after so many seconds without a sign of life.
        hang_after: the run counts as hanging after so many seconds without :meth:`progress`; never when None.
        output: folder of the run; ``stacks/`` in it gets the stacks of the processes of a run that hangs.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, dead_after: float, hang_after: float | None, output: Path
    ) -> None:
        def connect() -> dist.Store:
            # A connection of its own: the main thread may wait in its one.
            return dist.PrefixStore("watch", store.clone() if size > 1 else store)  # type: ignore[attr-defined]

        self._store = TimelyStore(connect, max(_STORE_SECONDS, dead_after))
        self._rank, self._size = rank, size
        self._dead_after, self._hang_after = dead_after, hang_after
        # With thousands of processes the store must not be busy with signs of life alone.
        self._interval = min(max(dead_after / 60, size / 1000, 0.05), dead_after / 5)
        self._stacks = output / STACKS
        self._main = threading.main_thread().ident or 0
        self._beats = 0
        self._doing: str | None = None
        self._since = self._looked = time.monotonic()
        self._away = 0.0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def progress(self, doing: str) -> None:
        """The main thread got on, and now does this (such as "step 12"). The run hangs if that takes too long."""
        self._since = time.monotonic()
        self._doing = doing

    def __enter__(self) -> Watch:
        try:
            self._give_sign()
        except RuntimeError as error:
            raise PeerError(self._store_is_gone(error)) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if error is not None and threading.current_thread() is threading.main_thread():
            # The process ends within seconds anyway, and should be able to say why.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._thread.join()
        try:
            if error is None:
                self._leave_done()
            else:
                self._leave_with(error)
        finally:
            self._store.close()

    def _leave_done(self) -> None:
        """Raises PeerError where a process is stopped at the very end: nobody would be left to notice."""
        remaining, dead = self._leave("done", self._dead_after), ""
        with contextlib.suppress(RuntimeError):  # the store's process has ended in order as well
            dead = self._describe_dead(self._silent()) if remaining else ""
        if self._store.silence is not None:
            raise PeerError(self._store_is_gone(self._store.silence))
        if dead:
            raise PeerError(dead)

    def _leave_with(self, error: BaseException) -> None:
        own = f"rank {self._rank} of {self._size} ({_whereabouts()}) ended with {_in_short(error)}"
        if (
            isinstance(error, Exception)
            and not isinstance(error, UserError)
            and (cause := self._cause(own)) is not None
        ):
            raise PeerError(f"{cause}\n  this process, rank {self._rank}, noticed by: {_in_short(error)}") from error
        if not isinstance(error, PeerError):
            self._declare(own)
        self._leave_failed()

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        next_rank = (self._rank + 1) % self._size
        seen, seen_at, silent_since = "", time.monotonic(), None
        while not self._pause():
            try:
                self._give_sign()
                if self._store.check([_FAULT]):
                    self._end(self._read(_FAULT))
                if self._store.check([_HANG]):
                    self._hang(self._read(_HANG))
                now = time.monotonic()
                if self._hang_after is not None and self._doing is not None and now - self._since > self._hang_after:
                    self._store.compare_set(_HANG, "", f"{self._doing}: no progress for {self._hang_after:g} s")
                    continue
                if self._size > 1:
                    sign = self._sign_of(next_rank)
                    if sign != seen or self._store.check([f"left/{next_rank}"]):
                        seen, seen_at = sign, now
                    elif now - seen_at > self._dead_after and (dead := self._silent()):
                        self._declare(self._describe_dead(dead))
                silent_since = None
            except NoAnswerError as error:
                self._end(self._store_is_gone(error))
            except RuntimeError as error:  # the store's process is gone
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > min(3 * self._interval, self._dead_after):
                    self._end(self._store_is_gone(error))

    def _pause(self) -> bool:
        """Waits for the next look; whether the watch was left. Time in which this process was stopped is no hang."""
        left = self._left.wait(self._interval)
        now = time.monotonic()
        if (away := now - self._looked) > self._dead_after + self._look():
            self._away = away
            self._since += away
        self._looked = now
        return left

    def _give_sign(self) -> None:
        self._beats += 1
        self._store.set(f"sign/{self._rank}", f"{self._beats} {_whereabouts()}")

    def _end(self, cause: str) -> None:
        """Ends the process, whose main thread is somewhere in a wait, unless it leaves by itself."""
        if self._left.wait(2 * self._interval + 1.0):
            return
        print(f"steptron: rank {self._rank} of {self._size} ends: {cause}", file=sys.stderr, flush=True)
        if self._rank == 0:
            self._leave_failed()
        sys.stdout.flush()
        os._exit(PeerError.exit_code)

    def _hang(self, what: str) -> None:
        """Writes this process's stacks and says where its main thread is; the first rank sums up for all."""
        with contextlib.suppress(OSError):  # a full disk must not keep a run that hangs from its end
            write_stacks(self._stacks, self._rank)
        self._store.set(f"where/{self._rank}", json.dumps(location(self._main)))
        if self._rank == 0:
            self._declare(f"the run hangs: {what}. {self._sum_up()}\n  stacks of all processes: {self._stacks}")
        while not self._left.is_set() and not self._store.check([_FAULT]):
            self._give_sign()
            time.sleep(self._interval)
        self._end(self._read(_FAULT))

    def _sum_up(self) -> str:
        """Of a hanging run: who gives no answer, who does not wait for others, where the others wait."""
        deadline = time.monotonic() + max(5 * self._interval, 2.0)
        missing = list(range(self._size))
        while missing and time.monotonic() < deadline:
            self._give_sign()
            missing = [rank for rank in missing if not self._store.check([f"where/{rank}"])]
            time.sleep(self._interval)
        places = {rank: json.loads(self._read(f"where/{rank}")) for rank in range(self._size) if rank not in missing}
        busy = {rank: place for rank, place in places.items() if not place["waits"]}
        parts = []
        if missing:
            parts.append(f"No answer (stopped, or without a CPU): {self._names(missing)}")
        parts += [f"Not waiting for others: {self._names([rank])} at {place['at']}" for rank, place in _few(busy)]
        waiting: dict[str, list[int]] = {}
        for rank, place in places.items():
            if place["waits"]:
                waiting.setdefault(place["at"], []).append(rank)
        parts += [f"Waiting at {at}: {self._names(ranks)}" for at, ranks in _few(waiting)]
        return "\n  ".join(parts)

    # -------------------------------------------------------------------------------------- the cause

    def _cause(self, own: str) -> str | None:
        """After a collective has failed: what another process did; None if this one seems to be the first to fail."""
        try:
            # One looks for all: thousands that ask after everybody would keep the store from its work.
            if not self._fault_within(1.0) and (self._is_first_to_look() or not self._fault_within(2 * self._look())):
                dead = self._silent()
                self._declare(self._describe_dead(dead) if dead else own)
            cause = self._read(_FAULT)
            self._leave_failed()
        except RuntimeError as error:
            return self._store_is_gone(error)
        return None if cause == own else cause

    def _fault_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([_FAULT]):
            if time.monotonic() > deadline:
                return False
            self._give_sign()
            time.sleep(0.05)
        return True

    def _is_first_to_look(self) -> bool:
        own = str(self._rank)
        return self._store.compare_set(_LOOKING, "", own).decode() == own

    def _look(self) -> float:
        """Seconds without a sign after which a process counts as silent."""
        # Longer than the longest pause between two signs of a process that is short of CPU.
        return max(3 * self._interval, min(self._dead_after, 3.0))

    def _silent(self) -> list[int]:
        """Ranks that give no sign of life during a few intervals and have not left."""
        if self._size == 1:
            return []
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        before = self._signs(ranks)
        deadline = time.monotonic() + self._look()
        while before and time.monotonic() < deadline:
            self._give_sign()
            time.sleep(self._interval)
            now = self._signs(before)
            before = {rank: sign for rank, sign in before.items() if now[rank] == sign}
        return [rank for rank in before if not self._store.check([f"left/{rank}"])]

    def _signs(self, ranks: Sequence[int] | Mapping[int, str]) -> dict[int, str]:
        return {rank: self._sign_of(rank) for rank in ranks}

    def _sign_of(self, rank: int) -> str:
        key = f"sign/{rank}"
        return self._read(key) if self._store.check([key]) else ""

    def _describe_dead(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        own = f" (but rank {self._rank}, which says so, was away itself for {self._away:.0f} s)" if self._away else ""
        return f"no sign of life from {self._names(ranks)}: killed, stopped, or its machine or network is gone{own}"

    def _names(self, ranks: Sequence[int]) -> str:
        shown = [f"{rank} ({self._sign_of(rank).partition(' ')[2] or 'never seen'})" for rank in ranks[:_NAMED]]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more} of {self._size}"

    def _store_is_gone(self, error: Exception) -> str:
        return (
            f"rank 0 of {self._size}, or the launcher that keeps the store where the processes meet, is gone, stopped "
            f"or does not answer: {_in_short(error)}"
        )

    # -------------------------------------------------------------------------------------- the store

    def _declare(self, cause: str) -> None:
        """Tells everybody what happened, if nobody has before."""
        with contextlib.suppress(RuntimeError):  # nobody is left to be told
            self._store.compare_set(_FAULT, "", cause)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode()

    def _leave_failed(self) -> None:
        self._leave("failed", 3 * self._interval + 2.0)

    def _leave(self, how: str, patience: float) -> set[int]:
        """The first rank may keep the store: it waits until the others have left, and seen what was declared.

        Returns:
            On the first rank, those that have not left.
        """
        remaining = set(range(1, self._size)) if self._rank == 0 else set()
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            self._store.check([f"left/{self._rank}"])  # unlike what sets a key, it has an answer
            self._store.set(f"left/{self._rank}", how)
            while remaining and time.monotonic() < deadline:
                remaining = {rank for rank in remaining if not self._store.check([f"left/{rank}"])}
                time.sleep(0.05)
        return remaining


def _whereabouts() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _few(items: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(items.items())[:_NAMED]
